"""What interrupts a job, and what is left: requeue, pre-emption, cancel. The time limit: test_time_limit.py"""

from __future__ import annotations

from pathlib import Path

import pytest
from cluster import Cluster
from jobs import archived, trained
from runs import (
    STEPS,
    both_in_full,
    check_nothing_half,
    check_whole,
    checkpoints,
    headrace,
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
    until_requeued(cluster, job)
    first, rows = archived(tmp_path), metrics(tmp_path)
    assert first, "some groups are finished and not trained"
    cluster.ask("scontrol", "release", job)
    until_step(cluster, tmp_path, len(rows) + 7)
    cluster.ask("scontrol", "requeue", job)
    until_requeued(cluster, job)
    second = archived(tmp_path)
    cluster.ask("scontrol", "release", job)
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
    check_nothing_half(tmp_path, killed=True)


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
