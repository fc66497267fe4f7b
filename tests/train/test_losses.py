from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from headrace.comm.errors import ConfigError
from headrace.train.batch import PackedBatch, TrainSample
from headrace.train.config import TrainConfig
from headrace.train.losses import LOSSES, TokenLoss, decoupled_ppo, importance_sampling, log_ratio, ppo

MODES = ["token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "seq_mean_token_sum_norm"]
CLIPS = {
    "symmetric": TrainConfig(clip_low=0.2, clip_high=0.2),
    "higher": TrainConfig(clip_low=0.2, clip_high=0.28),
    "dual": TrainConfig(clip_low=0.2, clip_high=0.28, clip_dual=3.0),
}


def with_mode(config: TrainConfig, mode: str, **changes: Any) -> TrainConfig:
    return config.model_copy(update={"aggregation": mode, **changes})


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("clip", CLIPS)
def test_ppo_values_and_gradients_agree_with_verl(clip: str, mode: str, verl_cases: list[Any]) -> None:
    for case in verl_cases:
        loss, grad, stats = case.objective(with_mode(CLIPS[clip], mode))
        key = f"ppo/{clip}/{mode.replace('_', '-')}"
        torch.testing.assert_close(loss, case.verl(f"loss/{key}"), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(grad, case.verl(f"grad/{key}"), rtol=1e-5, atol=1e-5)
        clipped = stats["policy/clip_fraction"]
        torch.testing.assert_close(clipped, case.verl(f"clip_fraction/{clip}"), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_decoupled_ppo_agrees_with_verl(mode: str, verl_cases: list[Any]) -> None:
    config = with_mode(CLIPS["dual"], mode, loss="decoupled_ppo")
    for case in verl_cases:
        decoupled = replace(case, batch=replace(case.batch, proximal_logprobs=case.found["proximal"][case.kept]))
        loss, grad, _ = decoupled.objective(config)
        key = f"decoupled/{mode.replace('_', '-')}"
        torch.testing.assert_close(loss, case.verl(f"loss/{key}"), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(grad, case.verl(f"grad/{key}"), rtol=1e-5, atol=1e-5)


def test_the_gradient_of_importance_sampling_is_that_of_verls_weighted_reinforce(verl_cases: list[Any]) -> None:
    compared = 0
    for case in verl_cases:
        if (case.current - case.batch.rollout_logprobs).abs().max() > 20:
            continue  # the ratio is bounded there: verl stops its growth, headrace its gradient too
        _, grad, _ = case.objective(TrainConfig(loss="importance_sampling"))
        torch.testing.assert_close(grad, case.verl("grad/reinforce"), rtol=1e-5, atol=1e-5)
        compared += 1
    assert compared >= 30


def test_the_example_agrees_with_verl(verl_cases: list[Any]) -> None:
    config = TrainConfig(loss="examples/my_loss.py:cispo", clip_high=0.28)
    for case in verl_cases:
        loss, grad, _ = case.objective(config)
        torch.testing.assert_close(loss, case.verl("loss/cispo"), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(grad, case.verl("grad/cispo"), rtol=1e-5, atol=1e-5)


@pytest.fixture
def tokens(pack: Any) -> Any:
    """Makes a batch of one sequence from (ratio to the rollout policy, advantage) of every token in the loss, and the
    current log-probs with those ratios."""

    def make(*rows: tuple[float, float]) -> tuple[torch.Tensor, PackedBatch]:
        length = len(rows) + 1
        mask = np.array([0] + [1] * len(rows), np.float32)
        advantages = np.array([0, *(advantage for _, advantage in rows)], np.float32)
        rollout, versions = np.full(length, -1.5, np.float32), np.zeros(length, np.int32)
        batch = pack([TrainSample(np.zeros(length, np.int32), mask, advantages, rollout, versions, 0)])
        ratios = torch.tensor([1.0, *(ratio for ratio, _ in rows)], dtype=torch.float64)
        return (batch.rollout_logprobs + ratios.log()).requires_grad_(), batch

    return make


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "gradient", "is_clipped"),
    [
        pytest.param(1.1, 2.0, -2.2, -2.2, False, id="inside, good"),
        pytest.param(0.9, -2.0, 1.8, 1.8, False, id="inside, bad"),
        pytest.param(1.5, 2.0, -2.56, 0.0, True, id="above, good: clipped"),
        pytest.param(1.5, -2.0, 3.0, 3.0, False, id="above, bad: free to come back"),
        pytest.param(0.5, 2.0, -1.0, -1.0, False, id="below, good: free to come back"),
        pytest.param(0.5, -2.0, 1.6, 0.0, True, id="below, bad: clipped"),
        pytest.param(5.0, -2.0, 6.0, 0.0, True, id="far above, bad: dual clip"),
        pytest.param(2.9, -2.0, 5.8, 5.8, False, id="above, bad: just below the dual clip"),
        pytest.param(5.0, 2.0, -2.56, 0.0, True, id="far above, good: dual clip has no part in it"),
        pytest.param(1.5, 0.0, 0.0, 0.0, False, id="no advantage"),
    ],
)
def test_every_branch_of_the_clip(
    ratio: float, advantage: float, value: float, gradient: float, is_clipped: bool, tokens: Any
) -> None:
    logprobs, batch = tokens((ratio, advantage))
    loss = ppo(logprobs, batch, CLIPS["dual"])
    (grad,) = torch.autograd.grad(loss.values.sum(), logprobs)
    assert loss.values[1].item() == pytest.approx(value)
    assert grad[1].item() == pytest.approx(gradient)
    assert loss.stats["policy/clip_fraction"][1].item() == is_clipped
    assert loss.stats["policy/ratio_mean"][1].item() == pytest.approx(ratio)


def test_without_dual_clip_the_loss_of_a_bad_token_is_unbounded(tokens: Any) -> None:
    logprobs, batch = tokens((50.0, -2.0))
    assert ppo(logprobs, batch, CLIPS["higher"]).values[1].item() == pytest.approx(100.0)


def test_clip_higher_differs_from_symmetric_only_above_and_for_good_tokens(tokens: Any) -> None:
    logprobs, batch = tokens((1.25, 1.0), (1.25, -1.0), (0.75, 1.0), (0.75, -1.0))
    symmetric, higher = (ppo(logprobs, batch, CLIPS[name]) for name in ("symmetric", "higher"))
    assert (symmetric.values != higher.values).tolist() == [False, True, False, False, False]
    (cut,) = torch.autograd.grad(symmetric.values[1], logprobs)
    (free,) = torch.autograd.grad(higher.values[1], logprobs)
    assert cut[1].item() == 0
    assert free[1].item() == pytest.approx(-1.25)


def with_proximal(batch: PackedBatch, shift: float) -> PackedBatch:
    return replace(batch, proximal_logprobs=batch.rollout_logprobs + shift)


def test_decoupled_ppo_is_ppo_where_the_proximal_policy_is_the_rollouts(tokens: Any) -> None:
    logprobs, batch = tokens((1.1, 1.0), (1.5, 1.0), (0.5, -1.0), (5.0, -1.0))
    plain = ppo(logprobs, batch, CLIPS["dual"])
    decoupled = decoupled_ppo(logprobs, with_proximal(batch, 0.0), CLIPS["dual"])
    torch.testing.assert_close(decoupled.values, plain.values)
    grads = [torch.autograd.grad(loss.values.sum(), logprobs)[0] for loss in (plain, decoupled)]
    torch.testing.assert_close(*grads)


def test_decoupled_ppo_clips_around_the_proximal_policy_and_weighs_by_it(tokens: Any) -> None:
    logprobs, batch = tokens((3.0, 1.0), (3.0, 1.0))
    batch = with_proximal(batch, math.log(2.5))
    loss = decoupled_ppo(logprobs, batch, CLIPS["symmetric"])
    assert loss.stats["policy/ratio_mean"][1].item() == pytest.approx(1.2)
    assert loss.values[1].item() == pytest.approx(-2.5 * 1.2)


def test_the_correction_takes_the_place_of_decoupled_ppos_own_weight(tokens: Any) -> None:
    logprobs, batch = tokens((3.0, 1.0))
    batch = with_proximal(batch, math.log(2.5))
    capped = CLIPS["symmetric"].model_copy(update={"correction": "tis_token"})
    torch.testing.assert_close(decoupled_ppo(logprobs, batch, capped).values, ppo(logprobs, batch, capped).values)


def test_importance_sampling_has_no_clip(tokens: Any) -> None:
    logprobs, batch = tokens((5.0, 2.0), (0.1, -1.0))
    loss = importance_sampling(logprobs, batch, CLIPS["symmetric"])
    assert loss.values[1:].tolist() == pytest.approx([-10.0, 0.1])
    (grad,) = torch.autograd.grad(loss.values.sum(), logprobs)
    assert grad[1:].tolist() == pytest.approx([-10.0, 0.1])


@pytest.mark.parametrize("name", ["ppo", "decoupled_ppo", "importance_sampling"])
@pytest.mark.parametrize("clip", CLIPS)
def test_gradients_are_right_to_second_order_of_differences(name: str, clip: str, tokens: Any) -> None:
    logprobs, batch = tokens((1.1, 1.0), (1.5, 1.0), (0.5, -1.0), (5.0, -1.0), (0.6, 1.0), (1.9, -2.0))
    batch = with_proximal(batch, 0.05)
    assert torch.autograd.gradcheck(lambda x: LOSSES.get(name)(x, batch, CLIPS[clip]).values, logprobs)


@pytest.mark.parametrize("name", ["ppo", "importance_sampling"])
def test_what_is_masked_out_has_no_gradient_not_even_nan(name: str, tokens: Any) -> None:
    logprobs, batch = tokens((1.1, 1.0), (1.2, 1.0))
    with torch.no_grad():
        logprobs[0] = torch.nan
    loss = LOSSES.get(name)(logprobs, batch, CLIPS["dual"])
    (grad,) = torch.autograd.grad(loss.values.sum(), logprobs)
    assert grad[0].item() == 0
    assert grad.isfinite().all()


def test_an_absurd_ratio_is_bounded(tokens: Any) -> None:
    logprobs, batch = tokens((1.0, -1.0))
    ratio = log_ratio(logprobs + 1000, batch).exp()
    assert ratio[1].item() == pytest.approx(math.exp(20))


def test_the_ratio_of_what_is_masked_out_is_one(tokens: Any) -> None:
    logprobs, batch = tokens((2.0, 1.0))
    assert log_ratio(logprobs + 1, batch).tolist() == pytest.approx([0, math.log(2) + 1])


def test_old_is_the_proximal_policy_where_it_is_given(tokens: Any) -> None:
    logprobs, batch = tokens((2.0, 1.0))
    assert log_ratio(logprobs, batch)[1].item() == pytest.approx(math.log(2))
    assert log_ratio(logprobs, with_proximal(batch, math.log(2)))[1].item() == pytest.approx(0)


def test_an_unknown_loss_is_refused_with_the_nearest_ones() -> None:
    with pytest.raises(ConfigError, match=r"train\.loss: there is no 'decoupled_po'\. Did you mean decoupled_ppo"):
        LOSSES.get("decoupled_po")


def test_a_loss_needs_no_metrics_of_its_own() -> None:
    assert TokenLoss(torch.zeros(3)).stats == {}
