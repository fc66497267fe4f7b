"""Puts the algorithms together, from the config to the loss that an engine calls.

    groups ── build_samples ──▶ TrainSamples ──(engine packs)──▶ micro-batch ── objective ──▶ loss, stats
               advantages                                         loss · correction + KL, aggregated

Token t of the step contributes  weight_t · (correction_t · loss_t + kl_weight · kl_t)  where the weights come from
the aggregation mode.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from headrace.comm.errors import ConfigError
from headrace.comm.trajectory import Trajectory
from headrace.train.advantages import ADVANTAGES
from headrace.train.aggregation import AGGREGATIONS, weighted_sum
from headrace.train.batch import Denominators, LossFunction, LossOutput, PackedBatch, TrainSample
from headrace.train.config import TrainConfig
from headrace.train.corrections import CORRECTIONS
from headrace.train.kl import KL_PENALTIES, k3
from headrace.train.losses import LOSSES, TokenLoss


def needs_proximal(config: TrainConfig) -> bool:
    """Whether the trainer has to compute `proximal_logprobs` (by `engine.forward`, before the step)."""
    return config.correction != "none" or getattr(LOSSES.get(config.loss), "uses_proximal", False)


def needs_reference(config: TrainConfig) -> bool:
    """Whether samples need `reference_logprobs`, those of the initial model."""
    return config.kl != "none"


def build_samples(
    groups: Sequence[Sequence[Trajectory]], config: TrainConfig, group_indices: Sequence[int]
) -> list[TrainSample]:
    """Samples of whole groups, in their order, with their advantages; log-probs of other policies are the caller's.

    Args:
        groups: the trajectories of each group.
        config: its `advantage` is used.
        group_indices: index of each group in the whole step.

    Raises:
        ConfigError: the advantage function gave something other than one finite number per sample.
    """
    members = [(index, one) for index, group in zip(group_indices, groups, strict=True) for one in group]
    if not members:
        return []
    rewards = torch.tensor([one.reward for _, one in members], dtype=torch.float64)
    advantages = _advantages(rewards, torch.tensor([index for index, _ in members], dtype=torch.int64), config)
    return [_sample(one, index, value) for (index, one), value in zip(members, advantages, strict=True)]


def denominators_of(samples: Iterable[TrainSample], max_tokens: int) -> Denominators:
    """The counts of these samples; `tokens` and `sequences` are to be summed over all ranks.

    Args:
        samples: this rank's part of the step.
        max_tokens: longest possible response.
    """
    sums = [float(sample.loss_mask.sum(dtype=np.float64)) for sample in samples]
    return Denominators(sum(sums), sum(total > 0 for total in sums), max_tokens)


def make_objective(config: TrainConfig) -> LossFunction:
    """The loss function that the config describes. Its stats are, over all trained tokens of the step:

    `policy/entropy`: mean entropy of the current policy.
    `policy/kl_rollout`: mean k3 estimate of KL(rollout ‖ current).
    `policy/kl_mismatch_sum`, `policy/kl_mismatch_tokens`: the same estimate summed over the tokens that were sampled
    by the very version being trained, and their number; the quotient shows pure numerics.
    `policy/kl_reference`: mean penalty, with `train.kl`; `policy/correction_mean`: mean weight, with
    `train.correction`. Besides them the loss's own: the built-in ones give `policy/clip_fraction` and
    `policy/ratio_mean`.

    Raises:
        ConfigError: a name in the config is unknown or can't be imported; on a call, a user's own loss returned
            something of another shape.
    """
    token_loss, aggregation = LOSSES.get(config.loss), AGGREGATIONS.get(config.aggregation)
    correction = None if config.correction == "none" else CORRECTIONS.get(config.correction)
    penalty = None if config.kl == "none" else KL_PENALTIES.get(config.kl)

    def objective(logprobs: Tensor, entropy: Tensor, batch: PackedBatch, denominators: Denominators) -> LossOutput:
        loss = _checked(token_loss(logprobs, batch, config), logprobs, config)
        values, stats = loss.values, {"policy/entropy": entropy, **loss.stats}
        if correction is not None:
            weights = stats["policy/correction_mean"] = correction(batch, config.correction_cap)
            values = values * weights
        if penalty is not None:
            divergence = stats["policy/kl_reference"] = penalty(logprobs, _reference(batch))
            values = values + config.kl_weight * divergence
        total = weighted_sum(values, aggregation(batch, denominators))
        rollout_kl = _rollout_kl(logprobs.detach(), batch, denominators)
        return LossOutput(total, _means(stats, batch, denominators) | rollout_kl)

    return objective


def _advantages(rewards: Tensor, group_ids: Tensor, config: TrainConfig) -> list[float]:
    advantages = ADVANTAGES.get(config.advantage)(rewards, group_ids)
    got = tuple(advantages.shape) if isinstance(advantages, Tensor) else type(advantages).__name__
    if got != tuple(rewards.shape):
        raise ConfigError(
            f"train.advantage: {config.advantage} returned {got}; it must return a tensor with one number for each of "
            f"the {len(rewards)} samples."
        )
    if not advantages.isfinite().all():
        raise ConfigError(
            f"train.advantage: {config.advantage} returned numbers that aren't finite, from rewards between "
            f"{rewards.min():.4g} and {rewards.max():.4g}; check it for divisions by a spread of zero."
        )
    values: list[float] = advantages.tolist()
    return values


def _sample(trajectory: Trajectory, group: int, advantage: float) -> TrainSample:
    mask = trajectory.loss_mask.astype(np.float32)
    mask[:1] = 0  # no token before the first one predicts it
    return TrainSample(
        tokens=trajectory.tokens,
        loss_mask=mask,
        advantages=np.where(mask > 0, np.float32(advantage), np.float32(0)),
        rollout_logprobs=trajectory.logprobs,
        versions=trajectory.versions,
        group=group,
    )


def _checked(loss: TokenLoss, logprobs: Tensor, config: TrainConfig) -> TokenLoss:
    if not isinstance(loss, TokenLoss):
        raise ConfigError(f"train.loss: {config.loss} must return a TokenLoss, but it returned {type(loss).__name__}.")
    for name, column in {"values": loss.values, **loss.stats}.items():
        if column.shape != logprobs.shape:
            raise ConfigError(
                f"train.loss: {config.loss} returned {name} of shape {tuple(column.shape)}; it must have one number "
                f"for every token of the micro-batch, {tuple(logprobs.shape)}."
            )
    return loss


def _reference(batch: PackedBatch) -> Tensor:
    if batch.reference_logprobs is None:
        raise ValueError("a KL penalty needs reference log-probs; see needs_reference")
    return batch.reference_logprobs


def _means(stats: dict[str, Tensor], batch: PackedBatch, denominators: Denominators) -> dict[str, Tensor]:
    """This micro-batch's part of the means over all trained tokens."""
    weights = AGGREGATIONS.get("token_mean")(batch, denominators)
    return {name: weighted_sum(column.detach(), weights) for name, column in stats.items()}


def _rollout_kl(logprobs: Tensor, batch: PackedBatch, denominators: Denominators) -> dict[str, Tensor]:
    estimates = k3(batch.rollout_logprobs, logprobs)
    fresh = batch.loss_mask * (batch.versions == batch.policy_version)
    return _means({"policy/kl_rollout": estimates}, batch, denominators) | {
        "policy/kl_mismatch_sum": weighted_sum(estimates, fresh),
        "policy/kl_mismatch_tokens": fresh.sum(),
    }
