"""Batches for the tests of the algorithms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from headrace.train.batch import Denominators, PackedBatch, TrainSample
from headrace.train.config import TrainConfig
from headrace.train.objective import make_objective

Pack = Callable[[Sequence[TrainSample]], PackedBatch]


@dataclass
class VerlCase:
    """One random batch of the fixtures, packed without its padding, and what verl made of it."""

    batch: PackedBatch
    current: Tensor
    denominators: Denominators
    found: dict[str, Tensor]
    kept: Tensor
    """bool [rows, width]: which places of verl's padded batch are in the packed one."""

    def verl(self, name: str) -> Tensor:
        """verl's result, packed if it has one value per token."""
        result = self.found[name]
        return result[self.kept] if result.shape == self.kept.shape else result

    def objective(self, config: TrainConfig) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """(loss, its gradient in the current log-probs, stats) by `config`."""
        current = self.current.clone().requires_grad_()
        output = make_objective(config)(current, torch.zeros_like(current), self.batch, self.denominators)
        return output.loss.detach(), torch.autograd.grad(output.loss, current)[0], output.stats


@pytest.fixture(scope="session")
def pack() -> Pack:
    """Packs samples by hand, in float64, as a training engine would."""
    return pack_samples


@pytest.fixture(scope="session")
def verl_cases() -> list[VerlCase]:
    tensors = load_file(Path(__file__).parent / "fixtures" / "verl.safetensors")
    tensors = {name: tensor.double() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    count = len(tensors["mask"])
    return [verl_case({name: tensor[case] for name, tensor in tensors.items()}) for case in range(count)]


def verl_case(found: dict[str, Tensor]) -> VerlCase:
    mask = found["mask"]
    kept = mask.flip(1).cumsum(1).flip(1) > 0  # up to the last token in the loss; empty rows vanish
    lengths = kept.sum(1)[kept.any(1)]
    batch = PackedBatch(
        tokens=torch.zeros(int(kept.sum()), dtype=torch.int64),
        positions=torch.cat([torch.arange(int(length)) for length in lengths]),
        sequence_ids=torch.repeat_interleave(torch.arange(len(lengths)), lengths),
        starts=torch.cat([torch.zeros(1), lengths.cumsum(0)]).int(),
        loss_mask=mask[kept],
        advantages=found["advantages"][kept],
        rollout_logprobs=found["rollout"][kept],
        versions=torch.zeros(int(kept.sum()), dtype=torch.int32),
        proximal_logprobs=None,
        reference_logprobs=found["reference"][kept],
        policy_version=0,
    )
    denominators = Denominators(float(mask.sum()), len(lengths), mask.shape[1])
    return VerlCase(batch, found["current"][kept], denominators, found, kept)


def pack_samples(samples: Sequence[TrainSample]) -> PackedBatch:
    lengths = [len(sample.tokens) for sample in samples]

    def joined(name: str, dtype: torch.dtype) -> Tensor:
        columns = [getattr(sample, name) for sample in samples]
        return torch.from_numpy(np.concatenate([np.zeros(0), *columns])).to(dtype)

    def optional(name: str) -> Tensor | None:
        return None if any(getattr(one, name) is None for one in samples) else joined(name, torch.float64)

    return PackedBatch(
        tokens=joined("tokens", torch.int64),
        positions=torch.cat([torch.zeros(0, dtype=torch.int64), *map(torch.arange, lengths)]),
        sequence_ids=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.int64)),
        starts=torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32),
        loss_mask=joined("loss_mask", torch.float64),
        advantages=joined("advantages", torch.float64),
        rollout_logprobs=joined("rollout_logprobs", torch.float64),
        versions=joined("versions", torch.int32),
        proximal_logprobs=optional("proximal_logprobs"),
        reference_logprobs=optional("reference_logprobs"),
        policy_version=3,
    )
