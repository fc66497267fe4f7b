"""The supervised warm start."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engine_kit import Folders, assert_equal, make_engine, whole_weights
from transformers import AutoModelForCausalLM

from headrace.comm.errors import DataError
from headrace.train.config import WarmStartConfig
from headrace.train.warm_start import warm_start

EXAMPLES = [([number, 60], [(number * 3) % 50, 61]) for number in range(1, 13)]


def test_the_warm_start_learns_the_examples(folders: Folders) -> None:
    engine = make_engine(folders["tied"], weight_decay=0.0)
    losses = warm_start(engine, EXAMPLES, WarmStartConfig(steps=120, batch=12, lr=1e-2), 0, 0, 1)
    assert len(losses) == 120
    assert losses[-1] < 0.1 < 1 < losses[0]


def test_the_first_loss_is_the_cross_entropy_of_the_responses(folders: Folders) -> None:
    engine = make_engine(folders["tied"])
    losses = warm_start(engine, EXAMPLES, WarmStartConfig(steps=1, batch=12, lr=1e-2), 0, 0, 1)
    model = AutoModelForCausalLM.from_pretrained(folders["tied"])
    rows = torch.tensor([[*prompt, *response] for prompt, response in EXAMPLES])
    labels = rows.clone()
    labels[:, :2] = -100
    with torch.no_grad():
        assert losses[0] == pytest.approx(float(model(input_ids=rows, labels=labels).loss), abs=1e-5)


def test_the_rate_falls_linearly_to_a_tenth(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(folders["tied"])
    rates: list[float | None] = []
    step_of = engine.optim_step
    monkeypatch.setattr(engine, "optim_step", lambda step, lr=None: (rates.append(lr), step_of(step, lr))[1])
    warm_start(engine, EXAMPLES, WarmStartConfig(steps=5, batch=4, lr=1.0e-3), 0, 0, 1)
    np.testing.assert_allclose(rates, [1e-3, 7.75e-4, 5.5e-4, 3.25e-4, 1e-4])


def test_the_seed_decides_the_order_and_what_follows_starts_afresh(folders: Folders) -> None:
    config = WarmStartConfig(steps=3, batch=5, lr=1e-2)
    engines = [make_engine(folders["tied"]) for _ in range(3)]
    losses = [warm_start(engine, EXAMPLES, config, seed, 0, 1) for engine, seed in zip(engines, (4, 4, 5), strict=True)]
    assert_equal(whole_weights(engines[0]), whole_weights(engines[1]))
    assert losses[0] == losses[1] != losses[2]
    assert not engines[0].optimizer.state
    assert engines[0].updates == 0


@pytest.mark.parametrize("examples", [[], [([1], [])], [([], [1])]])
def test_examples_that_cant_be_used_are_refused(folders: Folders, examples: list[tuple[list[int], list[int]]]) -> None:
    with pytest.raises(DataError, match="warm start"):
        warm_start(make_engine(folders["tied"]), examples, WarmStartConfig(), 0, 0, 1)
