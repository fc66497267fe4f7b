"""What interrupts a job, and what is left: the warning before the time limit, requeue, pre-emption, cancel."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from cluster import Cluster
from jobs import archived, run_job, trained
from runs import (
    STEPS,
    both,
    both_in_full,
    check_nothing_half,
    check_whole,
    checkpoints,
    headrace,
    last_checkpoint,
    metrics,
    output,
    site,
    slow_job,
    submit,
    told_status,
    until_step,
    warn,
)
from tiny import assert_same_bits, tiny_config

PAUSING_REWARD = """
import os
import time


def reward(task, answer):
    time.sleep(float(os.environ.get("PAUSE_S", "0")))
    return len(answer) % 3 / 2
"""
"""So slow that a step, in which one of three generators makes 8 samples, takes 3 s, and the run three starts."""


@both
def test_warning_checkpoint_requeue_resume_to_the_end(cluster: Cluster, tmp_path: Path, mpi: str) -> None:
    """What the warning before the time limit sets going, and what `headrace status` says at every stage."""
    job = submit(cluster, tmp_path, slow_job(), *site(tmp_path, mpi))
    until_step(cluster, tmp_path, 7)
    said = told_status(cluster, tmp_path)
    assert (said["state"], said["restarts"]) == (f"running (job {job})", "0")
    assert re.search(r"limit in \d+:\d\d", said["left"])
    warn(cluster, job)
    cluster.until_state(job, "PENDING", limit_s=30)
    first = metrics(tmp_path)
    said = told_status(cluster, tmp_path)
    assert said["state"].startswith(f"waiting (job {job} is PENDING")
    assert said["step"] == f"{len(first)}/{STEPS}"
    assert checkpoints(tmp_path)[-1] == len(first) < STEPS
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
        run={"steps": 40},
        ranks={"generators": 3, "trainers": 1},
        data={"reward": f"{reward}:reward", "reward_workers": 1},
        checkpoint={"every": 100},
    )
    whole = tmp_path / "whole"
    whole.mkdir()
    options = site(tmp_path, mpi, time="00:02:00", warn_s=60, requeues=20)
    job = submit(cluster, tmp_path, config, *options, "launch.env.PAUSE_S=0.36")
    run_job(config, whole, limit_s=280)
    assert cluster.until_state(job, "COMPLETED", "FAILED", limit_s=500) == "COMPLETED", output(tmp_path)
    assert "headrace: back into the queue, restart 2 of 20" in output(tmp_path)
    assert [line["train/loss"] for line in metrics(tmp_path)] == [line["train/loss"] for line in metrics(whole)]
    assert_same_bits(last_checkpoint(tmp_path), last_checkpoint(whole))


@pytest.mark.timeout(400)
def test_at_s2_every_ticket_is_accounted_for_over_restarts_and_no_finished_group_is_made_again(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Warned once, then queued again by Slurm itself, which kills the ranks."""
    config = slow_job(
        run={"steps": STEPS, "keep_samples": 100},
        ranks={"generators": 7, "trainers": 1},
        ledger={"max_staleness": 2, "groups_per_step": 4},
    )
    job = submit(cluster, tmp_path, config, *site(tmp_path, "openmpi"))
    until_step(cluster, tmp_path, 7)
    warn(cluster, job)
    cluster.until_state(job, "PENDING", limit_s=30)
    first, rows = archived(tmp_path), metrics(tmp_path)
    assert first, "some groups are finished and not trained"
    until_step(cluster, tmp_path, len(rows) + 7)
    cluster.ask("scontrol", "requeue", job)
    cluster.until_state(job, "PENDING", limit_s=30)
    second = archived(tmp_path)
    assert {ticket for ticket, _ in first}.isdisjoint(key[0] for key, group in second.items() if group.launch > 0)
    assert cluster.until_state(job, "COMPLETED", "FAILED") == "COMPLETED", output(tmp_path)
    check_whole(tmp_path, STEPS, staleness=2)
    assert metrics(tmp_path)[: len(rows)] == rows
    ends = [metrics(tmp_path)[-1][f"tickets/{name}"] for name in ("issued", "trained", "outstanding", "returned")]
    assert ends == [STEPS * 4, STEPS * 4, 0, 0]
    keys = [key for step in trained(tmp_path).values() for key in step]
    assert sorted(ticket for ticket, _ in keys) == list(range(STEPS * 4)), "every number once"
    assert {key for key in first.keys() | second.keys() if key not in keys} == set(), "what was finished was trained"


@both_in_full
def test_scontrol_requeue_goes_on_from_the_last_checkpoint(cluster: Cluster, tmp_path: Path, mpi: str) -> None:
    job = submit(cluster, tmp_path, slow_job(), *site(tmp_path, mpi))
    until_step(cluster, tmp_path, 7)
    cluster.ask("scontrol", "requeue", job)
    cluster.until_state(job, "PENDING", "RUNNING", limit_s=30)
    assert cluster.until_state(job, "COMPLETED", "FAILED") == "COMPLETED", output(tmp_path)
    assert "back into the queue" not in output(tmp_path), "Slurm has done that by itself"
    check_whole(tmp_path, STEPS)


@both_in_full
def test_scancel_leaves_no_process_and_no_half_checkpoint(cluster: Cluster, tmp_path: Path, mpi: str) -> None:
    job = submit(cluster, tmp_path, slow_job(), *site(tmp_path, mpi))
    until_step(cluster, tmp_path, 7)
    cluster.ask("scancel", job)
    cluster.until_state(job, "CANCELLED", limit_s=30)
    assert cluster.wait(lambda: not cluster.processes(), 20)
    assert checkpoints(tmp_path)
    check_nothing_half(tmp_path)


def test_headrace_cancel_leaves_a_checkpoint_and_isnt_requeued(cluster: Cluster, tmp_path: Path) -> None:
    job = submit(cluster, tmp_path, slow_job(), *site(tmp_path, "openmpi"))
    until_step(cluster, tmp_path, 7)
    said = headrace(cluster, tmp_path, "cancel", "job")
    assert said.status == 0, said.text
    asked, told = said.text.splitlines()
    assert asked.startswith(f"asked job {job} to write a checkpoint and leave, within ")
    assert told == f"stopped after the checkpoint of step {len(metrics(tmp_path))}; go on by --resume"
    assert cluster.state(job) == "FAILED"
    assert checkpoints(tmp_path)[-1] == len(metrics(tmp_path))
    check_nothing_half(tmp_path)
    assert told_status(cluster, tmp_path)["state"].startswith("stopped (status 75")
    assert headrace(cluster, tmp_path, "cancel", "job").text.startswith("runs/job isn't running: stopped")


@both_in_full
def test_preemption_by_a_higher_partition_checkpoints_and_goes_on(cluster: Cluster, tmp_path: Path, mpi: str) -> None:
    job = submit(cluster, tmp_path, slow_job(), *site(tmp_path, mpi, exclusive=True))
    until_step(cluster, tmp_path, 7)
    cluster.ask("srun", "--partition=high", "--nodes=4", "--exclusive", "true", limit_s=90)
    assert cluster.until_state(job, "COMPLETED", "FAILED") == "COMPLETED", output(tmp_path)
    assert (tmp_path / "runs/job/attempt_02").exists()
    check_whole(tmp_path, STEPS)


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
    check_nothing_half(tmp_path)
    until_step(cluster, tmp_path, 3)
    for _ in range(2):
        warn(cluster, job)
        cluster.wait(lambda: False, 0.3)
    cluster.until_state(job, "FAILED", limit_s=30)
    assert "all 1 restarts are used up; `sbatch runs/job/job.sbatch` goes on" in output(tmp_path)
    assert not cluster.processes()
    check_nothing_half(tmp_path)
