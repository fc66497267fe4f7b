from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
import torch

from headrace.train.batch import PackedBatch, TrainSample
from headrace.train.config import TrainConfig
from headrace.train.corrections import CORRECTIONS, tis_sequence, tis_token

MODES = ["token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "seq_mean_token_sum_norm"]


@pytest.fixture
def batch(pack: Any) -> PackedBatch:
    """Two sequences; the first token of each isn't in the loss, whatever its log-probs."""

    def sample(*weights: float) -> TrainSample:
        length = len(weights)
        proximal = np.log(np.array(weights, np.float32)) - 1
        rollout = np.full(length, -1, np.float32)
        mask = np.array([0] + [1] * (length - 1), np.float32)
        return TrainSample(np.zeros(length, np.int32), mask, mask, rollout, np.zeros(length, np.int32), 0, proximal)

    packed: PackedBatch = pack([sample(9.0, 0.5, 3.0), sample(0.1, 1.5, 4.0)])
    return packed


@pytest.mark.parametrize("name", ["tis_token", "tis_sequence"])
def test_weights_agree_with_verl(name: str, verl_cases: list[Any]) -> None:
    for case in verl_cases:
        batch = replace(case.batch, proximal_logprobs=case.found["proximal"][case.kept])
        ours = CORRECTIONS.get(name)(batch, 2.0) * batch.loss_mask
        torch.testing.assert_close(ours, case.verl(f"weights/{name}"), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["tis_token", "tis_sequence"])
def test_corrected_losses_and_gradients_agree_with_verl(name: str, mode: str, verl_cases: list[Any]) -> None:
    config = TrainConfig(correction=name, correction_cap=2.0, aggregation=mode, clip_high=0.28, clip_dual=3.0)
    for case in verl_cases:
        with_proximal = replace(case, batch=replace(case.batch, proximal_logprobs=case.found["proximal"][case.kept]))
        loss, grad, _ = with_proximal.objective(config)
        key = f"{name}/{mode.replace('_', '-')}"
        torch.testing.assert_close(loss, case.verl(f"loss/{key}"), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(grad, case.verl(f"grad/{key}"), rtol=1e-5, atol=1e-5)


def test_tokens_are_truncated_one_by_one(batch: PackedBatch) -> None:
    weights = tis_token(batch, 2.0)[batch.loss_mask > 0]
    torch.testing.assert_close(weights, torch.tensor([0.5, 2.0, 1.5, 2.0], dtype=torch.float64))


def test_a_sequence_has_the_truncated_product_of_its_tokens_in_the_loss(batch: PackedBatch) -> None:
    weights = tis_sequence(batch, 2.0)[batch.loss_mask > 0]
    torch.testing.assert_close(weights, torch.tensor([1.5, 1.5, 2.0, 2.0], dtype=torch.float64))


def test_without_a_cap_the_weight_is_the_ratio(batch: PackedBatch) -> None:
    weights = tis_token(batch, math.inf)[batch.loss_mask > 0]
    torch.testing.assert_close(weights, torch.tensor([0.5, 3.0, 1.5, 4.0], dtype=torch.float64))


@pytest.mark.parametrize("correction", [tis_token, tis_sequence])
def test_an_absurd_weight_overflows_nothing_even_without_a_cap(correction: Any, batch: PackedBatch) -> None:
    absurd = replace(batch, proximal_logprobs=batch.rollout_logprobs + 1000)
    weights = correction(absurd, math.inf)[batch.loss_mask > 0]
    torch.testing.assert_close(weights, torch.full((4,), math.exp(20), dtype=torch.float64))


@pytest.mark.parametrize("correction", [tis_token, tis_sequence])
def test_weights_carry_no_gradient(correction: Any, batch: PackedBatch) -> None:
    assert batch.proximal_logprobs is not None
    batch.proximal_logprobs.requires_grad_()
    assert not correction(batch, 2.0).requires_grad


@pytest.mark.parametrize("correction", [tis_token, tis_sequence])
def test_missing_proximal_logprobs_are_named(correction: Any, batch: PackedBatch) -> None:
    with pytest.raises(ValueError, match="proximal log-probs"):
        correction(replace(batch, proximal_logprobs=None), 2.0)


def test_the_config_offers_what_there_is() -> None:
    assert set(get_args(TrainConfig.model_fields["correction"].annotation)) == {"none", *CORRECTIONS.names}
