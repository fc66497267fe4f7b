"""Token-wise policy losses.

A loss function maps `(logprobs [N] with gradient, micro-batch, config)` to a `TokenLoss`. What it returns is then
weighted by the correction, joined by the KL penalty and aggregated (`objective.py`), so it does none of that.

Notation: A advantage, π current policy, μ rollout policy (per token, whatever version sampled it), and
r = π / π_old, where "old" is the proximal policy (the one the step starts from) when the batch has its log-probs,
and otherwise the rollout policy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import TypeVar

import torch
from torch import Tensor

from headrace.train.batch import PackedBatch
from headrace.train.config import TrainConfig
from headrace.train.corrections import tis_token
from headrace.train.kl import LOG_RATIO_BOUND
from headrace.train.registry import Registry


@dataclass(slots=True)
class TokenLoss:
    """What a loss function returns for one micro-batch. Rows where the loss mask is 0 are ignored."""

    values: Tensor
    """Loss of every token, [N], with gradient."""
    stats: dict[str, Tensor] = field(default_factory=dict)
    """Metrics by name, [N] each; their means over all trained tokens of the step are reported."""


TokenLossFunction = Callable[[Tensor, PackedBatch, TrainConfig], TokenLoss]
"""(logprobs [N] with gradient, micro-batch, config) → losses and metrics of its tokens."""

F = TypeVar("F", bound=Callable[..., object])

LOSSES: Registry[TokenLossFunction] = Registry("train.loss")


def uses_proximal(function: F) -> F:
    """Decorator: this loss reads `batch.proximal_logprobs`, so the trainer is to compute them before the step."""
    function.uses_proximal = True  # type: ignore[attr-defined]
    return function


@LOSSES.register("ppo")
def ppo(logprobs: Tensor, batch: PackedBatch, config: TrainConfig) -> TokenLoss:
    """max(−A·r, −A·clip(r, 1 − clip_low, 1 + clip_high)); for A < 0 at most −A·clip_dual if that is given.

    Sources: PPO (arXiv:1707.06347), eq. 7; clip-higher, DAPO (arXiv:2503.14476), section 3.1; dual clip, Mastering
    Complex Control in MOBA Games (arXiv:1912.09729), "Dual-clip PPO".
    `policy/clip_fraction` counts the tokens whose gradient either clip removes.
    """
    ratio = log_ratio(logprobs, batch).exp()
    free = -batch.advantages * ratio
    clipped = -batch.advantages * ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    values, is_cut = torch.maximum(free, clipped), clipped > free
    if config.clip_dual is not None:
        bound = -batch.advantages * config.clip_dual
        is_bounded = (batch.advantages < 0) & (values > bound)
        values, is_cut = torch.where(is_bounded, bound, values), is_cut | is_bounded
    return TokenLoss(values, {"policy/clip_fraction": is_cut.to(ratio.dtype), "policy/ratio_mean": ratio})


@LOSSES.register("decoupled_ppo")
@uses_proximal
def decoupled_ppo(logprobs: Tensor, batch: PackedBatch, config: TrainConfig) -> TokenLoss:
    """(π_proximal / μ) · PPO's loss with r = π / π_proximal: clipped around the policy the step starts from, not around
    the several older ones that sampled.

    Sources: Hilton et al., Batch size-invariance for policy optimization (arXiv:2110.00641), the decoupled clipped
    objective; AReaL (arXiv:2505.24298), "Decoupled PPO Objective".
    The weight has no gradient. It is whole with `train.correction: none`, and otherwise what that correction makes it.
    """
    loss = ppo(logprobs, batch, config)
    if config.correction == "none":
        loss.values = loss.values * tis_token(batch, inf)
    return loss


@LOSSES.register("importance_sampling")
def importance_sampling(logprobs: Tensor, batch: PackedBatch, config: TrainConfig) -> TokenLoss:
    """−A·r, whose gradient is −r·A·∇log π: REINFORCE corrected for the policy that sampled, without a clip.

    Source: Degris et al., Off-Policy Actor-Critic (arXiv:1205.4839); here with a weight per token.
    """
    ratio = log_ratio(logprobs, batch).exp()
    nothing_cut = torch.zeros_like(ratio)
    return TokenLoss(-batch.advantages * ratio, {"policy/clip_fraction": nothing_cut, "policy/ratio_mean": ratio})


def log_ratio(logprobs: Tensor, batch: PackedBatch) -> Tensor:
    """log r = log π − log π_old [N] with gradient, clamped to ±20; 0 where the mask is 0."""
    old = batch.rollout_logprobs if batch.proximal_logprobs is None else batch.proximal_logprobs
    difference = torch.where(batch.loss_mask > 0, logprobs - old, 0.0)
    return difference.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
