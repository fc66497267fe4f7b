"""Corrections between the policy that sampled a token and the policy the step starts from.

The two differ by staleness, and by numerics even at the same version. Each token's loss is multiplied by the
importance weight w = π_proximal / π_rollout, truncated at `cap` and without gradient; the loss's own ratio is then
current / proximal. Source: Ionides, Truncated Importance Sampling (2008); for language models Yao et al., Your
Efficient RL Framework Secretly Brings You Off-Policy RL Training (2025).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from headrace.train.aggregation import sum_per_sequence
from headrace.train.batch import PackedBatch
from headrace.train.kl import LOG_RATIO_BOUND
from headrace.train.registry import Registry

Correction = Callable[[PackedBatch, float], Tensor]
"""(micro-batch with proximal log-probs, cap) → weights [N] without gradient; meaningless where the mask is 0."""

CORRECTIONS: Registry[Correction] = Registry("train.correction")


@CORRECTIONS.register("tis_token")
def tis_token(batch: PackedBatch, cap: float) -> Tensor:
    """w_t = min(π_proximal(t) / π_rollout(t), cap). Low variance, biased for sequences."""
    return _truncated(_log_weights(batch), cap)


@CORRECTIONS.register("tis_sequence")
def tis_sequence(batch: PackedBatch, cap: float) -> Tensor:
    """w = min(Π_t π_proximal(t) / π_rollout(t), cap) over the sequence's tokens in the loss, the same for all of them.
    Unbiased but for the truncation, high variance."""
    return _truncated(sum_per_sequence(_log_weights(batch), batch), cap)[batch.sequence_ids]


def _log_weights(batch: PackedBatch) -> Tensor:
    if batch.proximal_logprobs is None:
        raise ValueError("a correction needs proximal log-probs; see needs_proximal")
    difference = (batch.proximal_logprobs - batch.rollout_logprobs).detach()
    return torch.where(batch.loss_mask > 0, difference, 0.0)


def _truncated(log_weights: Tensor, cap: float) -> Tensor:
    return log_weights.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp().clamp(max=cap)
