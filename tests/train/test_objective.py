from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.comm.errors import ConfigError
from headrace.comm.trajectory import Trajectory, Unit
from headrace.train.aggregation import AGGREGATIONS
from headrace.train.batch import Denominators, LossOutput, TrainSample
from headrace.train.config import TrainConfig
from headrace.train.objective import build_samples, denominators_of, make_objective, needs_proximal, needs_reference

POLICY_VERSION = 3
"""Of the batches that `pack` makes."""


def random_sample(seed: int, length: int) -> TrainSample:
    random = np.random.default_rng(seed)

    def column(scale: float) -> Any:
        return (scale * random.standard_normal(length)).astype(np.float32)

    mask = (random.random(length) < 0.7).astype(np.float32)
    mask[0] = 0
    rollout = -np.abs(column(1.5))
    return TrainSample(
        tokens=random.integers(0, 50, length).astype(np.int32),
        loss_mask=mask,
        advantages=np.full(length, random.standard_normal(), np.float32),
        rollout_logprobs=rollout,
        versions=random.integers(0, POLICY_VERSION + 1, length).astype(np.int32),
        group=0,
        proximal_logprobs=rollout + column(0.3),
        reference_logprobs=rollout + column(0.5),
    )


def logprobs_of(samples: list[TrainSample], pack: Any) -> torch.Tensor:
    """Made-up current log-probs, a function of the sample only, near those of the rollout."""
    batch = pack(samples)
    return torch.where(batch.positions == 0, 0.0, batch.rollout_logprobs + 0.4 * (batch.tokens % 7 - 3) / 3)


def evaluate(
    samples: list[TrainSample], config: TrainConfig, denominators: Denominators, pack: Any
) -> tuple[LossOutput, torch.Tensor]:
    """The output, and the gradient with respect to a temperature-like factor common to all log-probs."""
    factor = torch.ones((), dtype=torch.float64, requires_grad=True)
    logprobs = logprobs_of(samples, pack) * factor
    output = make_objective(config)(logprobs, -logprobs.detach(), pack(samples), denominators)
    (grad,) = torch.autograd.grad(output.loss, factor)
    return output, grad


CONFIGS = [
    TrainConfig(
        loss=loss, correction=correction, kl=kl, kl_weight=0.0 if kl == "none" else 0.1, aggregation=aggregation
    )
    for aggregation, (loss, correction, kl) in itertools.product(
        AGGREGATIONS.names,
        [
            ("ppo", "none", "none"),
            ("ppo", "tis_sequence", "k3"),
            ("decoupled_ppo", "none", "k1"),
            ("importance_sampling", "tis_token", "k2"),
            ("examples/my_loss.py:cispo", "none", "none"),
        ],
    )
]


@settings(max_examples=15, deadline=None)
@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.aggregation}-{c.loss}-{c.correction}-{c.kl}")
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=8), data=st.data())
def test_loss_gradient_and_stats_do_not_depend_on_packing(
    config: TrainConfig, lengths: list[int], data: st.DataObject, pack: Any
) -> None:
    samples = [random_sample(seed, length) for seed, length in enumerate(lengths)]
    denominators = denominators_of(samples, max_tokens=9)
    whole, whole_grad = evaluate(samples, config, denominators, pack)
    shuffled = data.draw(st.permutations(samples))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(samples)), max_size=3)))
    edges = itertools.pairwise([0, *cuts, len(samples)])
    parts = [evaluate(shuffled[start:end], config, denominators, pack) for start, end in edges]
    torch.testing.assert_close(sum(output.loss for output, _ in parts), whole.loss)
    torch.testing.assert_close(sum(grad for _, grad in parts), whole_grad)
    for name, total in whole.stats.items():
        torch.testing.assert_close(sum(output.stats[name] for output, _ in parts), total, msg=name)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.aggregation}-{c.loss}-{c.correction}-{c.kl}")
def test_a_step_with_nothing_in_the_loss_gives_zeros(config: TrainConfig, pack: Any) -> None:
    masked = random_sample(0, 5)
    masked.loss_mask[:] = 0
    for samples in ([masked], []):
        output, grad = evaluate(samples, config, denominators_of(samples, max_tokens=9), pack)
        assert output.loss.item() == 0
        assert grad.item() == 0
        assert all(value.item() == 0 for value in output.stats.values())


def test_the_parts_of_the_objective_add_up(pack: Any) -> None:
    samples = [random_sample(seed, 8) for seed in range(4)]
    denominators = denominators_of(samples, max_tokens=9)
    plain, _ = evaluate(samples, TrainConfig(correction="tis_token"), denominators, pack)
    config = TrainConfig(correction="tis_token", kl="k3", kl_weight=0.3)
    penalized, _ = evaluate(samples, config, denominators, pack)
    penalty = penalized.stats["policy/kl_reference"]
    assert penalty > 0
    torch.testing.assert_close(penalized.loss, plain.loss + 0.3 * penalty)


def test_stats_are_means_over_the_trained_tokens(pack: Any) -> None:
    samples = [replace(random_sample(seed, 8), proximal_logprobs=None) for seed in range(4)]
    output, _ = evaluate(samples, TrainConfig(), denominators_of(samples, max_tokens=9), pack)
    batch = pack(samples)
    trained = batch.loss_mask > 0
    current, rollout = logprobs_of(samples, pack)[trained], batch.rollout_logprobs[trained]
    ratio = (current - rollout).exp()
    estimates = ratio - 1 - ratio.log()
    fresh = batch.versions[trained] == POLICY_VERSION
    assert 0 < fresh.sum() < len(fresh)
    expected = {
        "policy/entropy": (-current).mean(),
        "policy/kl_rollout": estimates.mean(),
        "policy/kl_mismatch_sum": estimates[fresh].sum(),
        "policy/kl_mismatch_tokens": fresh.sum(),
        "policy/ratio_mean": ratio.mean(),
    }
    for name, value in expected.items():
        assert output.stats[name].item() == pytest.approx(value.item()), name
    assert 0 < output.stats["policy/clip_fraction"] < 1
    assert not any(value.requires_grad for value in output.stats.values())


def test_stale_tokens_have_no_part_in_the_mismatch(pack: Any) -> None:
    stale = random_sample(0, 8)
    stale.versions[:] = POLICY_VERSION - 1
    output, _ = evaluate([stale], TrainConfig(), denominators_of([stale], max_tokens=9), pack)
    assert output.stats["policy/kl_mismatch_tokens"] == 0
    assert output.stats["policy/kl_mismatch_sum"] == 0
    assert output.stats["policy/kl_rollout"] > 0


@pytest.mark.parametrize(
    ("config", "proximal", "reference"),
    [
        (TrainConfig(), False, False),
        (TrainConfig(loss="decoupled_ppo"), True, False),
        (TrainConfig(loss="importance_sampling"), False, False),
        (TrainConfig(correction="tis_token"), True, False),
        (TrainConfig(correction="tis_sequence", kl="k1", kl_weight=0.1), True, True),
        (TrainConfig(loss="examples/my_loss.py:cispo", kl="k3", kl_weight=0.1), False, True),
    ],
)
def test_which_other_policies_are_needed(config: TrainConfig, proximal: bool, reference: bool) -> None:
    assert needs_proximal(config) is proximal
    assert needs_reference(config) is reference


def test_a_loss_of_ones_own_can_ask_for_the_proximal_policy(tmp_path: Path) -> None:
    file = tmp_path / "asking.py"
    file.write_text(
        "from headrace.train.losses import TokenLoss, uses_proximal\n"
        "@uses_proximal\n"
        "def loss(logprobs, batch, config):\n"
        "    return TokenLoss(logprobs - batch.proximal_logprobs, {})\n"
    )
    assert needs_proximal(TrainConfig(loss=f"{file}:loss"))


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ("return (logprobs - batch.rollout_logprobs).mean()", "must return a TokenLoss, but it returned Tensor"),
        (
            "return TokenLoss(logprobs.mean())",
            r"returned values of shape \(\); it must have one number for every token",
        ),
        ("return TokenLoss(logprobs, {'mine': logprobs[:1]})", r"returned mine of shape \(1,\)"),
    ],
)
def test_a_loss_that_breaks_the_contract_is_named(body: str, complaint: str, tmp_path: Path, pack: Any) -> None:
    file = tmp_path / "broken.py"
    file.write_text(f"from headrace.train.losses import TokenLoss\ndef loss(logprobs, batch, config):\n    {body}\n")
    samples = [random_sample(0, 5)]
    with pytest.raises(ConfigError, match=f"train.loss: .*broken.py:loss {complaint}"):
        evaluate(samples, TrainConfig(loss=f"{file}:loss"), denominators_of(samples, max_tokens=9), pack)


def test_missing_reference_logprobs_are_named(pack: Any) -> None:
    sample = random_sample(0, 5)
    sample.reference_logprobs = None
    with pytest.raises(ValueError, match="reference log-probs"):
        evaluate([sample], TrainConfig(kl="k3", kl_weight=0.1), denominators_of([sample], max_tokens=9), pack)


def trajectory(reward: float, mask: list[int], born: int = 2) -> Trajectory:
    length, sampled = len(mask), np.array(mask, np.uint8)
    return Trajectory(
        unit=Unit(0, 0, 0),
        tokens=np.arange(length, dtype=np.int32),
        loss_mask=sampled,
        logprobs=np.where(sampled, -0.5, 0).astype(np.float32),
        versions=np.where(sampled, born, -1).astype(np.int32),
        reward=reward,
        finish="stop",
    )


def test_samples_carry_the_advantage_of_their_group_on_every_token_in_the_loss() -> None:
    groups = [[trajectory(1.0, [0, 1, 1]), trajectory(0.0, [0, 0, 1, 0, 1])], [trajectory(4.0, [0, 1])]]
    samples = build_samples(groups, TrainConfig(advantage="dr_grpo"), [5, 9])
    assert [sample.group for sample in samples] == [5, 5, 9]
    assert [sample.advantages.tolist() for sample in samples] == [[0, 0.5, 0.5], [0, 0, -0.5, 0, -0.5], [0, 4]]
    assert [sample.loss_mask.tolist() for sample in samples] == [[0, 1, 1], [0, 0, 1, 0, 1], [0, 1]]
    assert samples[1].versions.tolist() == [-1, -1, 2, -1, 2]
    for sample in samples:
        assert sample.loss_mask.dtype == sample.advantages.dtype == sample.rollout_logprobs.dtype == np.float32
        assert sample.proximal_logprobs is None
        assert sample.reference_logprobs is None


def test_the_first_token_is_never_in_the_loss() -> None:
    original = trajectory(1.0, [1, 1])
    (sample,) = build_samples([[original]], TrainConfig(), [0])
    assert sample.loss_mask.tolist() == [0, 1]
    assert sample.advantages[0] == 0
    assert original.loss_mask.tolist() == [1, 1]


def test_equal_rewards_train_nothing() -> None:
    samples = build_samples([[trajectory(0.1, [0, 1, 1]) for _ in range(7)]], TrainConfig(), [0])
    assert all((sample.advantages == 0).all() for sample in samples)


def test_a_rank_without_groups_has_no_samples_and_asks_for_no_advantages(tmp_path: Path) -> None:
    file = tmp_path / "best_of.py"
    file.write_text("def advantage(rewards, group_ids):\n    return rewards - rewards.max()\n")
    assert build_samples([], TrainConfig(advantage=f"{file}:advantage"), []) == []


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ("return rewards.mean()", r"returned \(\); it must return a tensor with one number for each of the 2 samples"),
        ("return rewards.tolist()", "returned list; it must return a tensor"),
        ("return rewards / 0", "returned numbers that aren't finite"),
    ],
)
def test_an_advantage_that_breaks_the_contract_is_named(body: str, complaint: str, tmp_path: Path) -> None:
    file = tmp_path / "broken_advantage.py"
    file.write_text(f"def advantage(rewards, group_ids):\n    {body}\n")
    config = TrainConfig(advantage=f"{file}:advantage")
    with pytest.raises(ConfigError, match=f"train.advantage: .*:advantage {complaint}"):
        build_samples([[trajectory(1.0, [0, 1]), trajectory(0.0, [0, 1])]], config, [0])


def test_the_example_advantage_works_in_whole_groups() -> None:
    groups = [[trajectory(1.0, [0, 1]), trajectory(0.0, [0, 1]), trajectory(0.5, [0, 1])]]
    samples = build_samples(groups, TrainConfig(advantage="examples/my_loss.py:rloo"), [0])
    assert [sample.advantages[1] for sample in samples] == [0.75, -0.75, 0.0]


def test_denominators_count_tokens_and_sequences_with_any_in_the_loss() -> None:
    samples = build_samples(
        [[trajectory(1.0, [0, 1, 1]), trajectory(0.0, [0, 1]), trajectory(0.0, [0, 0])]], TrainConfig(), [0]
    )
    assert denominators_of(samples, max_tokens=64) == Denominators(tokens=3.0, sequences=2, max_tokens=64)
