"""Estimators of KL(p ‖ q) from single tokens sampled from p (Schulman, Approximating KL Divergence, 2020).

With x the log-probability of the token under p and y under q, and r = exp(y − x):

    k1 = −log r             unbiased, high variance, may be negative
    k2 = (log r)² / 2       biased, low variance; its gradient in x is that of the KL when p is the policy sampled from
    k3 = r − 1 − log r      unbiased, low variance, never negative

All are token-wise: [N] and [N] → [N].
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from headrace.train.registry import Registry

KlForm = Callable[[Tensor, Tensor], Tensor]
"""(log-probs of p [N], log-probs of q [N]) → estimates [N]."""

KL_PENALTIES: Registry[KlForm] = Registry("train.kl")
"""Terms of the loss: p is the policy being trained, q the reference."""

LOG_RATIO_BOUND = 20.0
"""Log-ratios are clamped to ± this before `exp`, so that one absurd token can't overflow; its gradient is then 0."""

PENALTY_BOUND = 10.0
"""The k3 penalty of one token is at most this, as in verl: beyond it the exponential would drown all other tokens."""


@KL_PENALTIES.register("k1")
def k1(logprobs: Tensor, other: Tensor) -> Tensor:
    """x − y. As a loss its gradient is that of x alone: zero in expectation."""
    return logprobs - other


@KL_PENALTIES.register("k2")
def k2(logprobs: Tensor, other: Tensor) -> Tensor:
    """(x − y)² / 2."""
    return 0.5 * (logprobs - other).square()


def k3(logprobs: Tensor, other: Tensor) -> Tensor:
    """exp(y − x) − 1 − (y − x)."""
    log_ratio = (other - logprobs).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return log_ratio.expm1() - log_ratio


@KL_PENALTIES.register("k3")
def bounded_k3(logprobs: Tensor, other: Tensor) -> Tensor:
    """k3, at most `PENALTY_BOUND`."""
    return k3(logprobs, other).clamp(max=PENALTY_BOUND)
