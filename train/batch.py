"""Batches, and what a loss gets to see.

The engine turns `TrainSample`s into packed micro-batches and hands each to a loss as `PackedBatch` with the
log-probabilities that the current weights give. A loss returns a sum over the tokens of the micro-batch, already
divided by global denominators, so that micro-batches and ranks simply add up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(slots=True)
class TrainSample:
    """One trajectory, ready for training. Columns have length T; row t describes token t itself."""

    tokens: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.float32]
    """0 or 1 (or a weight); row 0 is always 0, since nothing predicts it."""
    advantages: npt.NDArray[np.float32]
    rollout_logprobs: npt.NDArray[np.float32]
    """Behaviour policy; 0 where nothing was sampled."""
    versions: npt.NDArray[np.int32]
    """-1 where nothing was sampled."""
    group: int
    """Index of the group in the whole step, the same on every rank."""
    proximal_logprobs: npt.NDArray[np.float32] | None = None
    """Of the policy before this step (decoupled PPO); None where the loss doesn't ask for it."""
    reference_logprobs: npt.NDArray[np.float32] | None = None


@dataclass(frozen=True, slots=True)
class Denominators:
    """Counts over the whole step, over all ranks: what makes the result independent of packing and distribution."""

    tokens: float
    """Sum of the loss mask."""
    sequences: int
    """Samples with at least one token in the loss."""
    max_tokens: int
    """Longest possible response, the constant of `seq_mean_token_sum_norm`."""


@dataclass(slots=True)
class PackedBatch:
    """One micro-batch without padding: N tokens of n sequences one after the other. All columns are [N]."""

    tokens: Tensor
    """int64."""
    positions: Tensor
    """int64, starting at 0 in every sequence."""
    sequence_ids: Tensor
    """int64, 0 … n-1: which sequence of this micro-batch a token belongs to."""
    starts: Tensor
    """int32 [n + 1]: where each sequence begins; the last entry is N."""
    loss_mask: Tensor
    """float32."""
    advantages: Tensor
    rollout_logprobs: Tensor
    versions: Tensor
    """int32."""
    proximal_logprobs: Tensor | None
    reference_logprobs: Tensor | None
    policy_version: int
    """Version of the weights being trained; `policy_version - versions` is the age of a token."""


@dataclass(slots=True)
class LossOutput:
    """What a loss returns for one micro-batch."""

    loss: Tensor
    """Scalar, divided by global denominators: the step's loss is the sum over micro-batches and ranks."""
    stats: dict[str, Tensor]
    """Scalars without gradient that add up likewise (so means are already divided by the global denominators)."""


LossFunction: TypeAlias = "Callable[[Tensor, Tensor, PackedBatch, Denominators], LossOutput]"
"""(logprobs [N] with gradient, entropy [N] without gradient, micro-batch, denominators) → loss.

`logprobs[t]` is log p(tokens[t] | tokens before t in its sequence) under the current weights. Both columns are 0 for
the first token of each sequence and for tokens whose loss mask is 0: only tokens in the loss are computed.
"""
