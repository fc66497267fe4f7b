"""The example configs as whole jobs: the tiny one learns, its control doesn't, the one of a real model runs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import yaml
from jobs import check_books, merged, run_job
from tiny import ENVIRONMENT, EXAMPLES

ROOT = EXAMPLES.parent
LIMIT_S = 900

pytestmark = [pytest.mark.slow, pytest.mark.timeout(LIMIT_S + 60)]


def example(name: str, **sections: dict[str, Any]) -> dict[str, Any]:
    """An example config with `sections` laid over it, to be started from any folder."""
    config: dict[str, Any] = yaml.safe_load((EXAMPLES / name).read_text())
    return merged(merged(config, {"run": {"name": "job"}}), sections)


def addition(**sections: dict[str, Any]) -> dict[str, Any]:
    return merged(example("addition-tiny.yaml", data={"environment": f"{ENVIRONMENT}:addition"}), sections)


def accuracies(folder: Path) -> dict[str, float]:
    """Greedy accuracy on the held-out tasks, before and after."""
    lines = [json.loads(line) for line in (folder / "runs/job/evaluations.jsonl").read_text().splitlines()]
    return {line["label"]: line["accuracy"] for line in lines}


def spread_of_difference(share: float, groups: int) -> float:
    """Standard deviation of the difference between two mean rewards of so many groups each, at most.

    A reward is 0 or 1, so the mean of a group varies no more than a single sample does: by p(1 - p), if the samples
    of a prompt were all alike.
    """
    return math.sqrt(2 * share * (1 - share) / groups)


def test_the_tiny_example_learns_by_reinforcement(tmp_path):
    config = addition()
    bound, groups = config["ledger"]["max_staleness"], config["ledger"]["groups_per_step"]
    steps = config["run"]["steps"]
    metrics, output = run_job(config, tmp_path, limit_s=LIMIT_S)
    assert len(metrics) == steps
    check_books(metrics, bound)
    assert metrics[-1]["tickets/trained"] == metrics[-1]["tickets/issued"] == steps * groups
    assert max(line["staleness/max"] for line in metrics) >= 1, "nothing ran ahead"
    rewards = [line["reward/mean"] for line in metrics]
    first, last = fmean(rewards[:10]), fmean(rewards[-10:])
    assert last >= 1.3 * first, f"{first:.3f} → {last:.3f}"
    assert last - first > 3 * spread_of_difference(first, 10 * groups)
    greedy = accuracies(tmp_path)
    assert greedy["after"] >= greedy["before"] + 0.05, greedy
    for label, accuracy in greedy.items():
        assert f"evaluation {label} training" in output
        assert f"accuracy {accuracy:.3f} on 200 held-out tasks" in output


def test_without_a_learning_rate_the_tiny_example_stays_flat(tmp_path):
    """What the other test sees is learning: neither the warm start nor the order of the tasks."""
    half = 15
    config = addition(run={"steps": 2 * half}, train={"lr": 0.0})
    metrics, _ = run_job(config, tmp_path, limit_s=LIMIT_S)
    rewards = [line["reward/mean"] for line in metrics]
    first, last = fmean(rewards[:half]), fmean(rewards[half:])
    assert first > 0.1, "the warm start taught nothing, so flat would mean nothing"
    band = 3 * spread_of_difference(first, half * config["ledger"]["groups_per_step"])
    assert abs(last - first) <= band, f"{first:.3f} → {last:.3f}, band {band:.3f}"
    greedy = accuracies(tmp_path)
    assert abs(greedy["after"] - greedy["before"]) <= 0.01, greedy
    assert all(line["policy/kl_rollout"] < 1e-6 for line in metrics), "every version has the same weights"


def test_the_chain_sum_example_runs_with_the_real_model(tmp_path):
    model = ROOT / "models" / "SmolLM2-135M-Instruct"
    assert model.is_dir(), f"{model} isn't there: `make model` fetches it"
    config = example(
        "chain-sum-smollm2.yaml",
        run={"steps": 3},
        model={"path": str(model)},
        ledger={"groups_per_step": 2},
        rollout={"group_size": 4, "slots": 8},
        eval={"tasks": 4},
    )
    metrics, _ = run_job(config, tmp_path, limit_s=LIMIT_S)
    assert len(metrics) == 3
    check_books(metrics, config["ledger"]["max_staleness"])
    assert accuracies(tmp_path).keys() == {"before", "after"}
    assert all(line["policy/kl_mismatch"] is None or line["policy/kl_mismatch"] < 0.1 for line in metrics)
    assert metrics[0]["policy/kl_mismatch"] is not None, "the first step is trained by the version that sampled it"
