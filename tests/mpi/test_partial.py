"""`rollout.partial` over real ranks: whether the tokens of a group may be of several versions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from jobs import check_books, latency_config, run_job


def versions_by_group(folder: Path) -> list[set[int]]:
    """Oldest and newest version of all samples of each group that was trained."""
    groups: dict[int, set[int]] = {}
    for line in (folder / "runs/job/samples.jsonl").read_text().splitlines():
        sample = json.loads(line)
        groups.setdefault(sample["ticket"], set()).update((sample["born"], sample["newest"]))
    return list(groups.values())


@pytest.mark.parametrize(
    ("partial", "transport", "delay"),
    [(False, "mpi", 0.0), (False, "mpi", 0.1), (False, "collective", 0.02), (True, "mpi", 0.0)],
)
def test_a_group_is_of_one_version_exactly_without_partial_rollout(
    tmp_path: Path, partial: bool, transport: str, delay: float
) -> None:
    config = latency_config(
        run={"keep_samples": 1000, "steps": 40},
        ledger={"max_staleness": 3},
        rollout={"partial": partial, "latency": {"token_ms": 4, "train_s": 0.02, "weight_delay_s": delay}},
        weights={"transport": transport},
    )
    metrics, _ = run_job(config, tmp_path)
    check_books(metrics, 3)
    groups = versions_by_group(tmp_path)
    assert len(groups) == 40 * 4
    assert any(len(versions) > 1 for versions in groups) == partial
    assert len(set.union(*groups)) > 10, "new versions were taken in all the time"
