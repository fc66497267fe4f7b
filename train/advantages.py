"""Advantages: how much better a sample did than the other samples of its group.

An advantage function maps `(rewards [n] float, group_ids [n] int64)` to advantages `[n]`, one per sample, in the dtype
of the rewards. Samples of a group may stand anywhere. The caller spreads the value over the sample's tokens.
A group of one has no baseline and no spread: mean 0 and deviation 1 are used, as in verl.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from headrace.train.registry import Registry

AdvantageFunction = Callable[[Tensor, Tensor], Tensor]
"""(rewards [n], group_ids [n]) → advantages [n]."""

ADVANTAGES: Registry[AdvantageFunction] = Registry("train.advantage")

STD_EPS = 1e-6
"""Added to the standard deviation."""


@ADVANTAGES.register("grpo")
def grpo(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """A_i = (r_i − mean(r)) / (std(r) + 1e-6) over the group of i, with the unbiased standard deviation.

    Source: DeepSeekMath (arXiv:2402.03300), section 4.1.2, outcome supervision. Equal rewards give exactly 0.

    Args:
        rewards: float [n].
        group_ids: int64 [n].
    """
    return _per_group(rewards, group_ids, lambda group: _centred(group) / (_deviation(group) + STD_EPS))


@ADVANTAGES.register("dr_grpo")
def dr_grpo(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """A_i = r_i − mean(r) over the group of i.

    Source: Understanding R1-Zero-Like Training (arXiv:2503.20783), section 3.2: without the division by the deviation,
    questions that are nearly always or nearly never solved don't weigh more than others.

    Args:
        rewards: float [n].
        group_ids: int64 [n].
    """
    return _per_group(rewards, group_ids, _centred)


def _per_group(rewards: Tensor, group_ids: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    advantages = torch.zeros_like(rewards)
    for group_id in torch.unique(group_ids):
        members = group_ids == group_id
        advantages[members] = function(rewards[members])
    return advantages


def _centred(group: Tensor) -> Tensor:
    """The rewards minus their mean; they are first taken relative to one of them, so that equal ones give exactly 0."""
    if len(group) == 1:
        return group
    relative = group - group[0]
    return relative - relative.mean()


def _deviation(group: Tensor) -> Tensor:
    return (group - group[0]).std() if len(group) > 1 else torch.ones_like(group[0])
