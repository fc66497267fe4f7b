"""Rewards that raise, hang or return nothing cost their groups and nothing else."""

from __future__ import annotations

import json

import pytest
from jobs import check_books, metrics_of, run_job
from tiny import tiny_config

REWARD = """
import time

def digits(task, answer):
    match task.fields.get("fault"):
        case "raises":
            raise RuntimeError(f"no verdict on {task.question}")
        case "hangs":
            time.sleep(3600)
        case "returns nothing":
            return None
    return sum(character.isdigit() for character in answer) / 4
"""
FAULTS = {2: "raises", 5: "hangs", 9: "raises", 12: "returns nothing"}
TASKS = 14


def test_groups_whose_reward_fails_are_counted_with_their_errors_and_the_job_goes_on(tmp_path):
    (tmp_path / "reward.py").write_text(REWARD)
    tasks = [{"prompt": f"{20 + i}+{30 + i}=", "fault": FAULTS.get(i)} for i in range(TASKS)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    config = tiny_config(
        run={"steps": 50, "deterministic": False},
        ranks={"trainers": 1, "generators": 1},
        data={
            "environment": None,
            "file": "tasks.jsonl",
            "reward": "reward.py:digits",
            "epochs": 1,
            "reward_timeout_s": 2,
            "reward_retries": 1,
        },
        ledger={"max_staleness": 1, "groups_per_step": 3},
        rollout={"group_size": 2},
        train={"warm_start": None},
    )
    metrics, _ = run_job(config, tmp_path)
    check_books(metrics, 1)
    assert len(metrics) == 4, "10 groups in steps of 3, the last one short"
    last = metrics[-1]
    assert [last[f"tickets/{name}"] for name in ("issued", "trained", "failed", "outstanding")] == [14, 10, 4, 0]
    log = (tmp_path / "runs/job/latest/rank_000.log").read_text()
    told = [line for line in log.splitlines() if line.startswith("ticket ")]
    assert sorted(line.partition("(")[2].partition(")")[0] for line in told) == [
        "reward_invalid",
        "reward_raised",
        "reward_raised",
        "reward_timeout",
    ]
    for index in (2, 9):
        assert f"RuntimeError: no verdict on {20 + index}+{30 + index}=" in log
    assert "the reward returned None" in log


@pytest.mark.parametrize(
    ("run", "ledger", "trainers"),
    [
        ({"deterministic": False}, {"max_staleness": 1, "groups_per_step": 3}, 2),
        ({"deterministic": True}, {"max_staleness": 0, "groups_per_step": 3}, 1),
    ],
)
def test_a_reward_that_always_raises_ends_the_job_with_one_paragraph(tmp_path, run, ledger, trainers):
    (tmp_path / "reward.py").write_text("def broken(task, answer):\n    return task.answer.score\n")
    config = tiny_config(
        run={"steps": 50, **run},
        ranks={"trainers": trainers, "generators": 1},
        data={"reward": "reward.py:broken"},
        ledger=ledger,
        rollout={"group_size": 2},
        train={"warm_start": None},
    )
    _, output = run_job(config, tmp_path, status=1)
    assert metrics_of(tmp_path) == []
    assert "Traceback" not in output
    assert "Abort" not in output
    (paragraph,) = [line for line in output.splitlines() if line.startswith("headrace: ")]
    assert output.count("AttributeError") == 1
    assert "AttributeError: 'str' object has no attribute 'score' (" in paragraph
    assert "reward.py, line 2)" in paragraph
    log = (tmp_path / f"runs/job/latest/rank_{paragraph.split()[2].zfill(3)}.log").read_text()
    assert "Traceback (most recent call last)" in log
