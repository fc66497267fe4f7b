"""A loss and an advantage of your own: `train.loss=examples/my_loss.py:cispo train.advantage=examples/my_loss.py:rloo`.

What the two functions are given and what they must return is explained in docs/loss.md.
"""

import torch
from torch import Tensor

from headrace.train.batch import PackedBatch
from headrace.train.config import TrainConfig
from headrace.train.losses import TokenLoss, log_ratio


def cispo(logprobs: Tensor, batch: PackedBatch, config: TrainConfig) -> TokenLoss:
    """−clip(r)·A·log π, the clipped ratio without gradient, so no token is cut off (arXiv:2506.13585, CISPO)."""
    ratio = log_ratio(logprobs, batch).exp().detach()
    weight = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    is_clipped = (weight != ratio).to(ratio.dtype)
    return TokenLoss(-weight * batch.advantages * logprobs, {"policy/clip_fraction": is_clipped})


def rloo(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """The reward minus the mean reward of the other samples of the group (arXiv:2402.14740); alone: the reward."""
    same_group = group_ids[:, None] == group_ids[None, :]
    others = same_group & ~torch.eye(len(rewards), dtype=torch.bool)
    totals = (others * rewards).sum(dim=1)
    return rewards - totals / others.sum(dim=1).clamp(min=1)
