"""Every mode and overdue policy out of one ledger: the example configs over real ranks, and what each promises."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from jobs import run_job

MODES = Path("examples/modes")

BOUNDS = {
    # largest age of a token in the loss, in optimizer steps
    "synchronous": 0,
    "one-step-off": 1,
    "streaming": 3,
    "fully-async": 4,
    "partial-rollout": 4,
    "fractional": 1,
    "stragglers": 1,
    "filtering": 1,
}


def run_mode(name: str, folder: Path, *options: str) -> list[dict[str, Any]]:
    """Run an example to its end and check what every mode promises."""
    config = yaml.safe_load((MODES / f"{name}.yaml").read_text())
    config["run"]["name"] = "job"
    metrics, _ = run_job(config, folder, "run.keep_samples=1000", "run.wait_limit_s=60", *options)
    assert [line["step"] for line in metrics] == list(range(1, config["run"]["steps"] + 1))
    for line in metrics:
        ends = sum(line[f"tickets/{end}"] for end in ("trained", "dropped", "failed", "outstanding", "returned"))
        assert line["tickets/issued"] == ends
        assert line["tickets/dropped"] == line["tickets/dropped_overdue"] + line["tickets/dropped_no_variance"]
        assert line["staleness/max"] <= BOUNDS[name]
    assert metrics[-1]["tickets/trained"] == len(metrics) * config["ledger"]["groups_per_step"]
    return metrics


def samples_of(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "runs" / "job" / "samples.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def oldest(metrics: list[dict[str, Any]]) -> int:
    return max(line["staleness/max"] for line in metrics)


def test_every_example_of_a_mode_is_tested() -> None:
    assert {file.stem for file in MODES.glob("*.yaml")} == set(BOUNDS)


def test_synchronous_trains_only_what_its_own_version_made(tmp_path: Path) -> None:
    metrics = run_mode("synchronous", tmp_path)
    assert metrics[-1]["tickets/dropped"] == 0
    assert all(sample["born"] == sample["newest"] == sample["step"] - 1 for sample in samples_of(tmp_path))


@pytest.mark.parametrize(
    ("name", "mixes"),
    [
        pytest.param("one-step-off", False, marks=pytest.mark.slow),
        ("fully-async", False),
        ("partial-rollout", True),
    ],
)
def test_samples_mix_versions_exactly_with_partial_rollout(tmp_path: Path, name: str, mixes: bool) -> None:
    metrics = run_mode(name, tmp_path)
    assert metrics[-1]["tickets/dropped"] == 0
    assert oldest(metrics) >= 1, "nothing ran ahead"
    assert any(sample["born"] < sample["newest"] for sample in samples_of(tmp_path)) == mixes


@pytest.mark.slow
def test_streaming_takes_several_steps_from_one_published_version(tmp_path: Path) -> None:
    metrics = run_mode("streaming", tmp_path)
    assert [line["staleness/max"] for line in metrics] == [step % 4 for step in range(len(metrics))]
    assert {sample["born"] % 4 for sample in samples_of(tmp_path)} == {0}


@pytest.mark.slow
def test_a_fraction_runs_ahead_and_throws_nothing_away(tmp_path: Path) -> None:
    metrics = run_mode("fractional", tmp_path)
    assert metrics[-1]["tickets/dropped"] == 0
    assert oldest(metrics) == 1
    assert max(line["tickets/outstanding"] for line in metrics) <= 18


def test_stragglers_that_are_cut_are_trained_as_truncated(tmp_path: Path) -> None:
    metrics = run_mode("stragglers", tmp_path)
    assert metrics[-1]["tickets/dropped"] == 0
    assert any(sample["finish"] == "cut" for sample in samples_of(tmp_path))


@pytest.mark.slow
def test_stragglers_that_are_masked_are_trained_late_without_their_old_tokens(tmp_path: Path) -> None:
    metrics = run_mode("stragglers", tmp_path, "ledger.overdue=mask")
    assert metrics[-1]["tickets/dropped"] == 0
    assert any(sample["born"] < sample["step"] - 1 - BOUNDS["stragglers"] for sample in samples_of(tmp_path))


@pytest.mark.slow
def test_stragglers_that_are_dropped_are_counted_with_their_reason(tmp_path: Path) -> None:
    metrics = run_mode("stragglers", tmp_path, "ledger.overdue=drop")
    assert metrics[-1]["tickets/dropped_overdue"] == metrics[-1]["tickets/dropped"] > 0


@pytest.mark.slow
def test_settled_by_sample_a_straggler_leaves_its_group_and_the_others_are_trained(tmp_path: Path) -> None:
    run_mode("stragglers", tmp_path, "ledger.overdue=drop", "ledger.settle_by=sample")
    samples = samples_of(tmp_path)
    groups = {(sample["step"], sample["ticket"]) for sample in samples}
    assert len(samples) < 4 * len(groups)
    assert not any(sample["finish"] == "cut" for sample in samples)


def test_filtering_replaces_groups_without_variance(tmp_path: Path) -> None:
    metrics = run_mode("filtering", tmp_path)
    assert metrics[-1]["tickets/dropped_no_variance"] == metrics[-1]["tickets/dropped"] > 0
    rewards: dict[int, set[float]] = {}
    for sample in samples_of(tmp_path):
        rewards.setdefault(sample["ticket"], set()).add(sample["reward"])
    assert all(len(found) > 1 for found in rewards.values())
