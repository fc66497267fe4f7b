"""The frozen reference model of a KL penalty."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from engine_kit import LENGTHS, denominators, make_engine, make_model, make_samples, weighted_nll

from headrace.train.scoring import ReferenceModel


@pytest.mark.parametrize("name", ["tied", "qwen3"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 5e-2)])
def test_the_reference_stays_what_the_engine_was(tmp_path: Path, name: str, dtype: str, tolerance: float) -> None:
    folder = make_model(name, tmp_path / "model")
    engine = make_engine(folder, dtype=dtype)
    reference = ReferenceModel(folder, 80, dtype, torch.device("cpu"), None, 1.0)
    samples = make_samples(LENGTHS)
    before = engine.forward(samples)
    for mine, theirs in zip(before, reference.forward(samples), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=tolerance)
    engine.forward_backward(samples, weighted_nll, denominators(samples), 0)
    engine.optim_step(0)
    after, frozen = engine.forward(samples), reference.forward(samples)
    moved = max(float(np.abs(mine - theirs).max()) for mine, theirs in zip(after, frozen, strict=True))
    assert moved > 2 * tolerance
    for mine, theirs in zip(before, frozen, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=tolerance)


def test_a_model_saved_by_the_engine_is_a_reference(tmp_path: Path) -> None:
    engine = make_engine(make_model("untied", tmp_path / "model"))
    samples = make_samples(LENGTHS)
    engine.forward_backward(samples, weighted_nll, denominators(samples), 0)
    engine.optim_step(0)
    engine.save_model(tmp_path / "reference")
    reference = ReferenceModel(tmp_path / "reference", 80, "float32", torch.device("cpu"), None, 1.0)
    for mine, theirs in zip(engine.forward(samples), reference.forward(samples), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-5)
