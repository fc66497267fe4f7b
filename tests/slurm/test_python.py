"""Runs sent to the cluster from Python: warned, queued again, stopped on purpose, failed, refused."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster import Cluster
from jobs import latency_config
from runs import ROOT, checkpoints, until_step

from headrace.comm.errors import HeadraceError
from headrace.launcher import RunError, submit_job
from headrace.launcher.profile import Profile

RANKS = {"generators": 3, "trainers": 1}


def test_a_warned_job_is_queued_again_and_finishes(login: Cluster, tmp_path: Path) -> None:
    config = latency_config(run={"steps": 60}, ranks=RANKS)
    site = Profile(starter="mpirun", mpi="mpich", requeues=1)
    job = submit_job(config, executor="slurm", nodes=2, profile=site)
    until_step(login, tmp_path, 5)
    job._interrupt()
    summary = job.result()
    assert (summary.status, summary.steps, summary.attempts) == ("ended", 60, 2), job.stderr()
    assert "this job is preempted" in (job.stderr() or "")
    login.until_state(job.job_id, "COMPLETED")


def test_a_job_that_slurm_queues_again_by_itself_finishes(login: Cluster, tmp_path: Path) -> None:
    config = latency_config(run={"steps": 60}, ranks=RANKS, checkpoint={"every": 2})
    job = submit_job(config, executor="slurm", nodes=2, profile=Profile(mpi="openmpi"))
    until_step(login, tmp_path, 5)
    login.ask("scontrol", "requeue", job.job_id)
    summary = job.result()
    assert (summary.status, summary.steps, summary.attempts) == ("ended", 60, 2), job.stderr()


def test_cancel_leaves_a_checkpoint_and_no_job(login: Cluster, tmp_path: Path) -> None:
    config = latency_config(run={"steps": 100_000}, ranks=RANKS)
    job = submit_job(config, executor="slurm", nodes=2, profile=Profile(starter="mpirun", mpi="mpich"))
    until_step(login, tmp_path, 5)
    began = time.monotonic()
    job.cancel()
    error = job.exception()
    assert time.monotonic() - began < 60
    step = checkpoints(tmp_path)[-1]
    assert isinstance(error, RunError)
    assert (
        f"The run was stopped before its end. The last checkpoint in {tmp_path / 'runs/job'} is of step {step}"
        in str(error)
    )
    assert login.state(job.job_id) != "PENDING"
    again = submit_job(
        config,
        executor="slurm",
        nodes=2,
        profile=Profile(starter="mpirun", mpi="mpich"),
        resume=True,
        overrides=[f"run.steps={step + 3}"],
    )
    assert again.result().steps == step + 3


def test_a_failed_job_says_why_in_a_paragraph(login: Cluster, tmp_path: Path) -> None:
    job = submit_job(latency_config(launch={"mpi": "site"}), executor="slurm")
    with pytest.raises(RunError, match=r"^launch\.mpi: site, but there is no mpirun on PATH"):
        job.result()
    login.until_state(job.job_id, "FAILED")


def test_a_job_that_slurm_refuses_is_refused_in_its_words(login: Cluster) -> None:
    with pytest.raises(HeadraceError, match=r"Slurm doesn't take the job: .*invalid partition"):
        submit_job(latency_config(), executor="slurm", profile=Profile(partition="none"))


def test_the_documented_example_runs(login: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "my-config.yaml").write_text(yaml.safe_dump(latency_config(run={"steps": 5})))
    section = (ROOT / "docs/python.md").read_text().partition("\n## On a cluster")[2]
    example = section.partition("```python\n")[2].partition("```")[0]
    names: dict[str, Any] = {"submit_job": submit_job}
    exec(example, names)
    job = names["job"]
    assert capsys.readouterr().out == f"{job.job_id} {tmp_path}/runs/job/submitit/{job.job_id}_0_log.out\n"
    assert names["summary"].steps == 5
    assert "#SBATCH --time=30\n" in job.paths.submission_file.read_text()
