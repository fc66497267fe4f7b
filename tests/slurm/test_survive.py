"""What ends or interrupts a job, and what is left: signals, time limit, dead ranks and nodes, requeue, cancel."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster
from jobs import check_books, latency_config, run_job
from runs import (
    RANKS,
    check_nothing_half,
    checkpoints,
    headrace,
    last_checkpoint,
    metrics,
    output,
    profile,
    submit,
    until_step,
)
from tiny import assert_same_bits, tiny_config

STEPS = 40

PAUSING_REWARD = """
import os
import time


def reward(task, answer):
    time.sleep(float(os.environ.get("PAUSE_S", "0")))
    return len(answer) % 3 / 2
"""
"""So slow that a step of 16 samples takes longer than a second."""

both = pytest.mark.parametrize("mpi", ["openmpi", "mpich"])


def slow_job(steps: int = STEPS, **sections: dict[str, Any]) -> dict[str, Any]:
    """A run of about `steps` / 4 seconds."""
    latency = {"token_ms": 2, "median_tokens": 6, "sigma": 1, "train_s": 0.2, "weight_delay_s": 0.02}
    base: dict[str, Any] = {"run": {"steps": steps}, "ranks": RANKS, "rollout": {"latency": latency}}
    return latency_config(**base | {"checkpoint": {"every": 5}} | sections)


def site(folder: Path, mpi: str, **keys: Any) -> tuple[str, ...]:
    starter = "srun" if mpi == "openmpi" else "mpirun"
    return (*profile(folder, mpi=mpi, starter=starter, **keys), "--nodes", "4")


def check_whole(folder: Path, steps: int) -> None:
    """Every step was trained once, in the end, and the books are right over all restarts."""
    check_books(metrics(folder), 1)
    assert len(metrics(folder)) == steps
    assert checkpoints(folder)[-1] == steps
    check_nothing_half(folder)


@both
def test_warning_checkpoint_requeue_resume_to_the_end(cluster: Cluster, tmp_path: Path, mpi: str) -> None:
    job = submit(cluster, tmp_path, slow_job(), *site(tmp_path, mpi))
    until_step(cluster, tmp_path, 7)
    cluster.ask("scancel", "--batch", "--signal=USR2", job)
    cluster.until_state(job, "PENDING", limit_s=30)
    first = metrics(tmp_path)
    assert checkpoints(tmp_path)[-1] == len(first) < STEPS
    assert cluster.until_state(job, "COMPLETED", "FAILED") == "COMPLETED", output(tmp_path)
    assert "headrace: back into the queue, restart 1 of 5" in output(tmp_path)
    assert metrics(tmp_path)[: len(first)] == first, "steps that were done are not done again"
    check_whole(tmp_path, STEPS)


@pytest.mark.timeout(600)
def test_two_minutes_limit_with_the_warning_in_time_gives_the_weights_of_an_uninterrupted_run(
    cluster: Cluster, tmp_path: Path
) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text(PAUSING_REWARD)
    config = tiny_config(
        run={"steps": 60},
        ranks={"generators": 3, "trainers": 1},
        data={"reward": f"{reward}:reward", "reward_workers": 1},
        checkpoint={"every": 100},
    )
    whole = tmp_path / "whole"
    whole.mkdir()
    options = (*profile(tmp_path, mpi="openmpi", time="00:02:00", warn_s=60, requeues=20), "--nodes", "4")
    job = submit(cluster, tmp_path, config, *options, "launch.env.PAUSE_S=0.08")
    run_job(config, whole, limit_s=280)
    assert cluster.until_state(job, "COMPLETED", "FAILED", limit_s=500) == "COMPLETED", output(tmp_path)
    assert "headrace: back into the queue, restart 1 of 20" in output(tmp_path)
    assert [line["train/loss"] for line in metrics(tmp_path)] == [line["train/loss"] for line in metrics(whole)]
    assert_same_bits(last_checkpoint(tmp_path), last_checkpoint(whole))


@both
def test_a_killed_rank_is_named_and_ends_the_job(cluster: Cluster, tmp_path: Path, mpi: str) -> None:
    job = submit(cluster, tmp_path, slow_job(), *site(tmp_path, mpi))
    until_step(cluster, tmp_path, 3)
    _kill_rank(tmp_path, 5)
    assert cluster.until_state(job, "COMPLETED", "FAILED", limit_s=30) == "FAILED"
    # Open MPI's other ranks end so soon after the first that srun may tell of another node first.
    rank = r"(4 or )?5 (\(on node3\) )?" if mpi == "mpich" else r"\d( or \d)? (\(on node\d\) )?"
    named = rf"^headrace: Rank {rank}was ended by signal 9 \(SIGKILL\)"
    assert re.search(named, output(tmp_path), re.MULTILINE), output(tmp_path)
    assert not cluster.processes()
    check_nothing_half(tmp_path)


@both
def test_a_killed_rank_is_replaced_within_the_allocation(cluster: Cluster, tmp_path: Path, mpi: str) -> None:
    job = submit(cluster, tmp_path, slow_job(), *site(tmp_path, mpi, relaunches=1))
    until_step(cluster, tmp_path, 12)
    _kill_rank(tmp_path, 5)
    assert cluster.until_state(job, "COMPLETED", "FAILED") == "COMPLETED", output(tmp_path)
    assert "starting again, 1 of 1 times left" in output(tmp_path)
    assert re.search(r"step (6|11) was trained \d+ s after the failure", output(tmp_path)), output(tmp_path)
    check_whole(tmp_path, STEPS)


def test_a_mistake_is_not_tried_again(cluster: Cluster, tmp_path: Path) -> None:
    reward = tmp_path / "reward.py"
    reward.write_text("import os\ndef reward(task, answer):\n    return float(os.environ['NOT_THERE'])\n")
    config = tiny_config(data={"reward": f"{reward}:reward"}, ranks={"generators": 3, "trainers": 1})
    job = submit(cluster, tmp_path, config, *site(tmp_path, "openmpi", relaunches=2))
    assert cluster.until_state(job, "COMPLETED", "FAILED") == "FAILED"
    assert "NOT_THERE" in output(tmp_path)
    assert "starting again" not in output(tmp_path)


@both
def test_a_node_that_is_cut_off_is_replaced_by_the_spare_one(cluster: Cluster, tmp_path: Path, mpi: str) -> None:
    options = [*site(tmp_path, mpi, relaunches=2)[:-1], "3", "--spare-nodes", "1"]
    config = slow_job(run={"steps": STEPS, "silence_limit_s": 10, "heartbeat_s": 1})
    job = submit(cluster, tmp_path, config, *options)
    until_step(cluster, tmp_path, 12)
    cluster.cut("node3")
    try:
        assert cluster.until_state(job, "COMPLETED", "FAILED") == "COMPLETED", output(tmp_path)
    finally:
        cluster.mend("node3")
    assert "starting again without node3, with node4 instead" in output(tmp_path)
    check_whole(tmp_path, STEPS)


def test_without_a_spare_node_the_run_goes_on_with_fewer_generators(cluster: Cluster, tmp_path: Path) -> None:
    config = slow_job(run={"steps": STEPS, "silence_limit_s": 10, "heartbeat_s": 1})
    job = submit(cluster, tmp_path, config, *site(tmp_path, "openmpi", relaunches=2))
    until_step(cluster, tmp_path, 12)
    cluster.cut("node3")
    try:
        assert cluster.until_state(job, "COMPLETED", "FAILED") == "COMPLETED", output(tmp_path)
    finally:
        cluster.mend("node3")
    assert "starting again without node3, on 6 ranks" in output(tmp_path)
    check_whole(tmp_path, STEPS)


def test_scontrol_requeue_goes_on_from_the_last_checkpoint(cluster: Cluster, tmp_path: Path) -> None:
    job = submit(cluster, tmp_path, slow_job(), *site(tmp_path, "openmpi"))
    until_step(cluster, tmp_path, 7)
    cluster.ask("scontrol", "requeue", job)
    cluster.until_state(job, "PENDING", "RUNNING", limit_s=30)
    assert cluster.until_state(job, "COMPLETED", "FAILED") == "COMPLETED", output(tmp_path)
    assert "back into the queue" not in output(tmp_path), "Slurm has done that by itself"
    check_whole(tmp_path, STEPS)


def test_scancel_leaves_no_process_and_no_half_checkpoint(cluster: Cluster, tmp_path: Path) -> None:
    job = submit(cluster, tmp_path, slow_job(), *site(tmp_path, "openmpi"))
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
    assert "stopped after the checkpoint of step" in said.text
    assert cluster.state(job) == "FAILED"
    assert checkpoints(tmp_path)[-1] == len(metrics(tmp_path))


def test_preemption_by_a_higher_partition_checkpoints_and_goes_on(cluster: Cluster, tmp_path: Path) -> None:
    job = submit(cluster, tmp_path, slow_job(), *site(tmp_path, "openmpi", exclusive=True))
    until_step(cluster, tmp_path, 7)
    cluster.ask("srun", "--partition=high", "--nodes=4", "--exclusive", "true", limit_s=90)
    assert cluster.until_state(job, "COMPLETED", "FAILED") == "COMPLETED", output(tmp_path)
    assert (tmp_path / "runs/job/attempt_02").exists()
    check_whole(tmp_path, STEPS)


def test_a_warning_during_start_up_is_requeued(cluster: Cluster, tmp_path: Path) -> None:
    job = submit(cluster, tmp_path, slow_job(steps=10), *site(tmp_path, "openmpi"))
    assert cluster.wait(lambda: len(cluster.processes("node1")) > 1, 30), "the shell and the launcher"
    cluster.ask("scancel", "--batch", "--signal=USR2", job)
    assert cluster.until_state(job, "COMPLETED", "FAILED") == "COMPLETED", output(tmp_path)
    assert "back into the queue, restart 1 of 5" in output(tmp_path)
    check_whole(tmp_path, 10)


def test_a_second_warning_kills_and_the_last_whole_checkpoint_counts(cluster: Cluster, tmp_path: Path) -> None:
    config = slow_job(rollout={"latency": {"train_s": 3.0, "token_ms": 2, "median_tokens": 6}}, checkpoint={"every": 1})
    job = submit(cluster, tmp_path, config, *site(tmp_path, "openmpi", requeues=0))
    until_step(cluster, tmp_path, 2)
    for _ in range(2):
        cluster.ask("scancel", "--batch", "--signal=USR2", job)
        cluster.wait(lambda: False, 0.7)
    cluster.until_state(job, "FAILED", limit_s=30)
    assert "all 0 restarts are used up" in output(tmp_path)
    assert not cluster.processes()
    check_nothing_half(tmp_path)


def _kill_rank(folder: Path, rank: int) -> None:
    os.kill(int((folder / f"runs/job/latest/rank_{rank:03d}.pid").read_text()), signal.SIGKILL)


def test_loss_of_the_batch_host_brings_the_job_back_on_other_nodes(cluster: Cluster, tmp_path: Path) -> None:
    job = submit(cluster, tmp_path, slow_job(), *site(tmp_path, "openmpi")[:-1], "3")
    until_step(cluster, tmp_path, 12)
    cluster.cut("node1")
    cluster.power_off("node1")
    try:
        assert cluster.until_state(job, "COMPLETED", "FAILED", limit_s=200) == "COMPLETED", output(tmp_path)
    finally:
        cluster.mend("node1")
    assert "  node4: " in output(tmp_path)
    check_whole(tmp_path, STEPS)
