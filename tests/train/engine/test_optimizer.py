"""Schedules, clipping, decay, and AdamW against torch's own loop."""

from __future__ import annotations

import math
from typing import Literal

import pytest
import torch

from headrace.train.collectives import Peers
from headrace.train.config import TrainConfig
from headrace.train.optimizer import clip, global_norm, learning_rate, make_adamw

ALONE = Peers(None, torch.device("cpu"))


@pytest.mark.parametrize(
    ("schedule", "middle", "last"), [("constant", 2.0, 2.0), ("linear", 1.1, 0.2), ("cosine", 1.1, 0.2)]
)
def test_schedules_warm_up_and_end_at_the_floor(
    schedule: Literal["constant", "linear", "cosine"], middle: float, last: float
) -> None:
    config = TrainConfig(lr=2.0, schedule=schedule, warmup_steps=4, lr_floor=0.1)
    rates = [learning_rate(config, step, 15) for step in range(15)]
    assert rates[:5] == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0])
    assert rates[9] == pytest.approx(middle)
    assert rates[14] == pytest.approx(last)


def test_cosine_equals_its_formula() -> None:
    config = TrainConfig(lr=1.0, schedule="cosine")
    rates = [learning_rate(config, step, 11) for step in range(11)]
    assert rates == pytest.approx([(1 + math.cos(math.pi * step / 10)) / 2 for step in range(11)])


def test_a_schedule_that_is_run_past_its_end_stays_at_the_floor() -> None:
    config = TrainConfig(lr=1.0, schedule="linear", lr_floor=0.25)
    assert learning_rate(config, 50, 10) == pytest.approx(0.25)
    assert learning_rate(config, 0, 1) == pytest.approx(1.0)


def test_adamw_on_split_groups_equals_torch_adamw() -> None:
    torch.manual_seed(0)
    ours = [torch.randn(4, 3, requires_grad=True), torch.randn(3, requires_grad=True)]
    theirs = [tensor.detach().clone().requires_grad_() for tensor in ours]
    config = TrainConfig(lr=0.05, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.3)
    optimizer = make_adamw(config, ours[:1], ours[1:])
    groups = [{"params": theirs[:1], "weight_decay": 0.3}, {"params": theirs[1:], "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, lr=0.05, betas=(0.8, 0.95), eps=1e-6, fused=False, foreach=False)
    for _ in range(5):
        for mine, other in zip(ours, theirs, strict=True):
            mine.grad = torch.randn_like(mine)
            other.grad = mine.grad.clone()
        optimizer.step()
        reference.step()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("limit", [0.0, 0.5, 100.0])
def test_clipping_equals_torch(limit: float) -> None:
    torch.manual_seed(0)
    gradients = [torch.randn(5, 4), torch.randn(3), torch.zeros(0, 4)]
    parameters = [torch.zeros_like(gradient) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    norm = global_norm(gradients, ALONE)
    clip(gradients, norm, limit)
    assert norm == pytest.approx(float(torch.nn.utils.clip_grad_norm_(parameters, limit or math.inf)))
    for parameter, gradient in zip(parameters, gradients, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-6, atol=1e-7)
