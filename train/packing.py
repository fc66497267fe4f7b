"""Micro-batches: which samples share one, and how they are laid out without padding."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from headrace.train.batch import PackedBatch, TrainSample


def plan_micro_batches(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Divide samples of these lengths (in tokens) over micro-batches of at most `budget` tokens.

    Returns the indices of each micro-batch, longest sample first (so that samples of like length are neighbours);
    samples longer than the budget come first, one each. The others go, longest first, to the emptiest of k
    micro-batches (greedy balancing, Graham 1969), for the smallest k ≥ total / budget for which all fit.
    A pure function: the same lengths give the same plan everywhere.
    """
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    alone = [[index] for index in order if lengths[index] > budget]
    shared = order[len(alone) :]
    count = -(-sum(lengths[index] for index in shared) // budget)
    while (bins := _balance(shared, lengths, budget, count)) is None:
        count += 1
    return alone + bins


def _balance(order: list[int], lengths: Sequence[int], budget: int, count: int) -> list[list[int]] | None:
    """Greedy balancing into `count` bins, or None if that overfills one."""
    bins: list[list[int]] = [[] for _ in range(count)]
    heap = [(0, number) for number in range(count)]
    for index in order:
        filled, number = heap[0]
        if filled + lengths[index] > budget:
            return None
        bins[number].append(index)
        heapq.heapreplace(heap, (filled + lengths[index], number))
    return bins


def pack(samples: Sequence[TrainSample], policy_version: int, device: torch.device) -> PackedBatch:
    """Lay samples one after the other; raises ValueError if only some of them have an optional column."""
    lengths = [len(sample.tokens) for sample in samples]
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)

    def column(name: str, dtype: torch.dtype) -> torch.Tensor:
        return _to_device(np.concatenate([getattr(sample, name) for sample in samples]), dtype, device)

    def optional(name: str) -> torch.Tensor | None:
        present = [getattr(sample, name) is not None for sample in samples]
        if any(present) != all(present):
            raise ValueError(f"some samples of a micro-batch have {name} and some don't")
        return column(name, torch.float32) if all(present) else None

    return PackedBatch(
        tokens=column("tokens", torch.int64),
        positions=_to_device(np.concatenate([np.arange(length) for length in lengths]), torch.int64, device),
        sequence_ids=_to_device(np.repeat(np.arange(len(lengths)), lengths), torch.int64, device),
        starts=_to_device(starts, torch.int32, device),
        loss_mask=column("loss_mask", torch.float32),
        advantages=column("advantages", torch.float32),
        rollout_logprobs=column("rollout_logprobs", torch.float32),
        versions=column("versions", torch.int32),
        proximal_logprobs=optional("proximal_logprobs"),
        reference_logprobs=optional("reference_logprobs"),
        policy_version=policy_version,
    )


def _to_device(values: npt.NDArray[np.generic], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(values).to(device=device, dtype=dtype)


def filler_sample() -> TrainSample:
    """Two tokens that count for nothing: what a rank without work runs so that the ranks' collectives match."""
    zeros = np.zeros(2, np.float32)
    return TrainSample(
        tokens=np.zeros(2, np.int32),
        loss_mask=zeros,
        advantages=zeros,
        rollout_logprobs=zeros,
        versions=np.full(2, -1, np.int32),
        group=-1,
    )
