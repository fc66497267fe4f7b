"""Ranks and nodes that die: who is named, and how the run goes on."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from cluster import Cluster
from runs import (
    STEPS,
    both,
    check_nothing_half,
    check_whole,
    kill_rank,
    output,
    profile,
    site,
    slow_job,
    submit,
    until_step,
)
from tiny import tiny_config


def rank_is_killed(cluster: Cluster, folder: Path, step: int, *options: str, limit_s: float) -> str:
    """The end of a job whose rank 5 is killed after a step; it comes within a limit, in seconds."""
    job = submit(cluster, folder, slow_job(), *options)
    until_step(cluster, folder, step)
    kill_rank(folder, 5)
    return cluster.until_state(job, "COMPLETED", "FAILED", limit_s=limit_s)


def node_is_lost(
    cluster: Cluster, folder: Path, node: str, *options: str, with_power: bool = True, limit_s: float = 120
) -> None:
    """A job goes on to its end though a node is cut off, or powered off, within a limit in seconds."""
    config = slow_job(run={"steps": STEPS, "silence_limit_s": 10, "heartbeat_s": 1})
    job = submit(cluster, folder, config, *options)
    until_step(cluster, folder, 12)
    cluster.cut(node)
    if not with_power:
        cluster.power_off(node)
    try:
        assert cluster.until_state(job, "COMPLETED", "FAILED", limit_s=limit_s) == "COMPLETED", output(folder)
    finally:
        cluster.mend(node)
    check_whole(folder, STEPS)


@both
def test_a_killed_rank_is_named_and_ends_the_job(cluster: Cluster, tmp_path: Path, mpi: str) -> None:
    assert rank_is_killed(cluster, tmp_path, 3, *site(tmp_path, mpi), limit_s=30) == "FAILED"
    name = "Rank 5 (on node3)" if mpi == "openmpi" else "Rank 5"
    assert f"\nheadrace: {name} was ended by signal 9 (SIGKILL)" in output(tmp_path)
    assert not cluster.processes()
    check_nothing_half(tmp_path, killed=True)


@both
def test_a_killed_rank_is_replaced_within_the_allocation(cluster: Cluster, tmp_path: Path, mpi: str) -> None:
    options = site(tmp_path, mpi, relaunches=1)
    assert rank_is_killed(cluster, tmp_path, 12, *options, limit_s=120) == "COMPLETED", output(tmp_path)
    assert "starting again, 1 of 1 times left" in output(tmp_path)
    assert re.search(r"step (6|11) was trained \d+ s after the failure", output(tmp_path)), output(tmp_path)
    check_whole(tmp_path, STEPS)


def test_a_mistake_is_not_tried_again_and_quoted_at_the_end_of_the_jobs_output(
    cluster: Cluster, tmp_path: Path
) -> None:
    """The allocation isn't held any longer, and what else ranks write is in a log of each."""
    reward = tmp_path / "reward.py"
    reward.write_text("import os\ndef reward(task, answer):\n    return float(os.environ['NOT_THERE'])\n")
    config = tiny_config(data={"reward": f"{reward}:reward"}, ranks={"generators": 1, "trainers": 1})
    job = submit(cluster, tmp_path, config, *profile(tmp_path, mpi="openmpi", relaunches=2), "--nodes", "2")
    assert cluster.until_state(job, "COMPLETED", "FAILED") == "FAILED"
    *_, error, last = output(tmp_path).splitlines()
    assert "NOT_THERE" in error
    assert last == "More is in runs/job/latest/rank_000.log."
    assert "starting again" not in output(tmp_path)
    assert len(list(tmp_path.glob("runs/job/latest/rank_*.log"))) == 2
    assert not cluster.processes()


def test_a_rank_that_doesnt_come_is_named_with_its_node(cluster: Cluster, tmp_path: Path) -> None:
    """MPI itself would wait for it for ever, and so would all other ranks."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\n[ "$SLURM_PROCID" = 6 ] && exec sleep 100\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    config = slow_job(run={"wait_limit_s": 25}, launch={"python": str(python)})
    job = submit(cluster, tmp_path, config, *site(tmp_path, "openmpi"))
    assert cluster.until_state(job, "COMPLETED", "FAILED") == "FAILED"
    assert "headrace: Ranks [6] of 8 (on node4) haven't started MPI within 25 s (run.wait_limit_s)" in output(tmp_path)
    assert not cluster.processes()


@both
def test_a_node_that_is_cut_off_is_replaced_by_the_spare_one(cluster: Cluster, tmp_path: Path, mpi: str) -> None:
    options = profile(tmp_path, mpi=mpi, relaunches=2)
    node_is_lost(cluster, tmp_path, "node3", *options, "--nodes", "3", "--spare-nodes", "1")
    assert "starting again without node3, with node4 instead" in output(tmp_path)


def test_without_a_spare_node_the_run_goes_on_with_fewer_generators(cluster: Cluster, tmp_path: Path) -> None:
    node_is_lost(cluster, tmp_path, "node3", *site(tmp_path, "openmpi", relaunches=2))
    assert "starting again without node3, on 6 ranks" in output(tmp_path)


def test_loss_of_the_batch_host_brings_the_job_back_on_other_nodes(cluster: Cluster, tmp_path: Path) -> None:
    options = profile(tmp_path, mpi="openmpi")
    node_is_lost(cluster, tmp_path, "node1", *options, "--nodes", "3", with_power=False, limit_s=200)
    assert "  node4: " in output(tmp_path)
