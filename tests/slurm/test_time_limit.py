"""The warning before the time limit: checkpoint, requeue, resume; too early, too late, too often."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from cluster import Cluster
from jobs import run_job
from runs import (
    STEPS,
    both,
    both_in_full,
    check_nothing_half,
    check_whole,
    checkpoints,
    last_checkpoint,
    metrics,
    output,
    site,
    slow_job,
    submit,
    told_status,
    until_requeued,
    until_step,
    warn,
)
from tiny import assert_same_bits, tiny_config

PAUSING_REWARD = """
import os
import time
from pathlib import Path

CHECKPOINTS = Path(os.environ.get("CHECKPOINTS", "/not/there"))


def reward(task, answer):
    if CHECKPOINTS.parent.exists() and len(list(CHECKPOINTS.glob("*/COMPLETE"))) < 2:
        time.sleep(0.4)
    return len(answer) % 3 / 2
"""
"""A step, for which one of three generators makes 8 samples, takes more than 3 s until two warnings have come."""


@both
def test_warning_checkpoint_requeue_resume_to_the_end(cluster: Cluster, tmp_path: Path, mpi: str) -> None:
    """What the warning before the time limit sets going, and what `headrace status` says at every stage."""
    job = submit(cluster, tmp_path, slow_job(), *site(tmp_path, mpi))
    until_step(cluster, tmp_path, 7)
    said = told_status(cluster, tmp_path)
    assert (said["state"], said["restarts"]) == (f"running (job {job})", "0")
    assert re.search(r"limit in \d+:\d\d", said["left"])
    warn(cluster, job)
    until_requeued(cluster, job)
    first = metrics(tmp_path)
    said = told_status(cluster, tmp_path)
    assert said["state"].startswith(f"waiting (job {job} is PENDING")
    assert said["step"] == f"{len(first)}/{STEPS}"
    assert checkpoints(tmp_path)[-1] == len(first) < STEPS
    cluster.ask("scontrol", "release", job)
    assert cluster.until_state(job, "COMPLETED", "FAILED") == "COMPLETED", output(tmp_path)
    said = told_status(cluster, tmp_path)
    assert (said["state"], said["restarts"]) == ("ended", "1")
    assert "headrace: back into the queue, restart 1 of 5" in output(tmp_path)
    assert metrics(tmp_path)[: len(first)] == first, "steps that were done are not done again"
    check_whole(tmp_path, STEPS)


@pytest.mark.timeout(600)
@both_in_full
def test_two_minutes_limit_with_the_warning_in_time_gives_the_weights_of_an_uninterrupted_run(
    cluster: Cluster, tmp_path: Path, mpi: str
) -> None:
    """The process that computes rewards gets the signals, too, and has to go on until the checkpoint is there."""
    reward = tmp_path / "reward.py"
    reward.write_text(PAUSING_REWARD)
    config = tiny_config(
        run={"steps": 36},
        ranks={"generators": 3, "trainers": 1},
        data={"reward": f"{reward}:reward", "reward_workers": 1},
        checkpoint={"every": 100},
    )
    whole = tmp_path / "whole"
    whole.mkdir()
    options = site(tmp_path, mpi, time="00:02:00", warn_s=60, requeues=20)
    job = submit(cluster, tmp_path, config, *options, f"launch.env.CHECKPOINTS={tmp_path}/runs/job/checkpoints")
    run_job(config, whole, limit_s=280)
    assert cluster.until_state(job, "COMPLETED", "FAILED", limit_s=400) == "COMPLETED", output(tmp_path)
    assert "headrace: back into the queue, restart 2 of 20" in output(tmp_path)
    assert [line["train/loss"] for line in metrics(tmp_path)] == [line["train/loss"] for line in metrics(whole)]
    assert_same_bits(last_checkpoint(tmp_path), last_checkpoint(whole))


def test_a_warning_during_start_up_is_requeued(cluster: Cluster, tmp_path: Path) -> None:
    job = submit(cluster, tmp_path, slow_job(steps=10), *site(tmp_path, "openmpi"))
    assert cluster.wait(lambda: len(cluster.processes("node1")) > 1, 30), "the shell and the launcher"
    warn(cluster, job)
    assert cluster.until_state(job, "COMPLETED", "FAILED") == "COMPLETED", output(tmp_path)
    assert "back into the queue, restart 1 of 5" in output(tmp_path)
    check_whole(tmp_path, 10)


def test_ranks_that_are_too_slow_for_a_checkpoint_are_killed_and_the_job_goes_back_so_often_and_no_more(
    cluster: Cluster, tmp_path: Path
) -> None:
    """First they are killed at `launch.stop_within_s`, then by a second warning. The last whole checkpoint counts."""
    config = slow_job(
        rollout={"latency": {"train_s": 3.0, "token_ms": 2, "median_tokens": 6}},
        checkpoint={"every": 1},
        launch={"stop_within_s": 1},
    )
    job = submit(cluster, tmp_path, config, *site(tmp_path, "openmpi", requeues=1))
    until_step(cluster, tmp_path, 2)
    warn(cluster, job)
    cluster.until_state(job, "PENDING", limit_s=30)
    assert "back into the queue, restart 1 of 1" in output(tmp_path)
    check_nothing_half(tmp_path, killed=True)
    until_step(cluster, tmp_path, 3)
    for _ in range(2):
        warn(cluster, job)
        cluster.wait(lambda: False, 0.3)
    cluster.until_state(job, "FAILED", limit_s=30)
    assert "all 1 restarts are used up; `sbatch runs/job/job.sbatch` goes on" in output(tmp_path)
    assert not cluster.processes()
    check_nothing_half(tmp_path, killed=True)
