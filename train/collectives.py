"""The few things that trainer ranks agree on beside gradients.

Sums run in rank order, so every rank gets the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Peers:
    """The data-parallel ranks, or just this one (`group` None)."""

    group: dist.ProcessGroup | None
    device: torch.device

    @property
    def rank(self) -> int:
        return 0 if self.group is None else self.group.rank()

    @property
    def size(self) -> int:
        return 1 if self.group is None else self.group.size()

    def largest(self, value: int) -> int:
        """Maximum over the ranks."""
        return max(int(row) for row in self._gather(torch.tensor([value])))

    def sum(self, value: float) -> float:
        return sum(float(row) for row in self._gather(torch.tensor([value], dtype=torch.float64)))

    def sum_named(self, values: dict[str, float]) -> dict[str, float]:
        """Sum name by name; a rank may lack names (it had no samples, so it can't know them)."""
        encoded = torch.frombuffer(bytearray(msgspec.msgpack.encode(values)), dtype=torch.uint8)
        lengths = [int(row) for row in self._gather(torch.tensor([len(encoded)]))]
        padded = encoded.new_zeros(max(lengths))
        padded[: len(encoded)] = encoded
        totals: dict[str, float] = {}
        for row, length in zip(self._gather(padded), lengths, strict=True):
            for name, value in msgspec.msgpack.decode(row[:length].numpy().tobytes(), type=dict[str, float]).items():
                totals[name] = totals.get(name, 0.0) + value
        return totals

    def _gather(self, value: Tensor) -> list[Tensor]:
        if self.group is None:
            return [value]
        value = value.to(self.device)
        rows = [torch.empty_like(value) for _ in range(self.size)]
        dist.all_gather(rows, value, group=self.group)
        return [row.cpu() for row in rows]
