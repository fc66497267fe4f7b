"""What can't work is refused with the remedy, and jobs don't disturb each other."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml
from cluster import Cluster
from jobs import check_books, latency_config
from runs import (
    RANKS,
    STEPS,
    check_whole,
    headrace,
    job_in,
    kill_rank,
    metrics,
    output,
    profile,
    site,
    slow_job,
    submit,
    told_status,
    until_step,
)

STALE = {
    "SLURM_JOB_ID": "999",
    "SLURM_JOB_NODELIST": "gone[1-2]",
    "SLURM_NTASKS": "3",
    "SLURM_NTASKS_PER_NODE": "1",
    "SLURM_CPU_BIND": "map_cpu:0",
    "SLURM_MPI_TYPE": "none",
    "SLURM_DISTRIBUTION": "cyclic",
    "SLURM_EXPORT_ENV": "NONE",
    "SLURM_PROCID": "7",
    "OMPI_COMM_WORLD_SIZE": "3",
    "OMPI_MCA_btl": "nothing",
    "PMI_RANK": "5",
    "PMIX_RANK": "5",
    "MASTER_ADDR": "gone1",
    "MASTER_PORT": "1",
    "WORLD_SIZE": "3",
    "RANK": "2",
}
"""As of an allocation from which the user submits."""


def test_a_submit_that_cant_run_says_why_and_sends_nothing(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("run: {name: job}\nmodel: {path: /not/there}\ndata: {environment: gcd}\n")
    said = headrace(cluster, tmp_path, "submit", "job.yaml")
    assert said.status == 2
    assert "model.path: there is no folder /not/there" in said.text
    assert not (tmp_path / "runs").exists()
    (tmp_path / "job.yaml").write_text("run: {name: job}\nrollout: {engine: latency}\n")
    site = profile(tmp_path, partition="nowhere")
    said = headrace(cluster, tmp_path, "submit", "job.yaml", *site)
    assert said.status == 2
    assert "Slurm doesn't take the job: " in said.text
    assert "invalid partition specified: nowhere" in said.text
    assert not cluster.ask("squeue", "--noheader")


@pytest.mark.parametrize(("mpi", "pmi", "remedy"), [("openmpi", "pmi2", "--mpi=pmix"), ("mpich", "none", "--mpi=pmi2")])
def test_a_world_of_one_under_the_wrong_pmi_is_refused_with_the_remedy(
    cluster: Cluster, tmp_path: Path, mpi: str, pmi: str, remedy: str
) -> None:
    config = latency_config(ranks=RANKS)
    job = submit(cluster, tmp_path, config, *profile(tmp_path, mpi=mpi, pmi=pmi, relaunches=2), "--nodes", "4")
    assert cluster.until_state(job, "COMPLETED", "FAILED", limit_s=60) == "FAILED"
    said = output(tmp_path)
    assert "8 ranks were started, but each of them is a world of its own" in said
    assert remedy in said
    assert "starting again" not in said


def test_a_stale_environment_does_no_harm(cluster: Cluster, tmp_path: Path) -> None:
    config = latency_config(ranks=RANKS, run={"steps": 10})
    job = submit(cluster, tmp_path, config, *profile(tmp_path, mpi="openmpi"), "--nodes", "4", **STALE)
    assert cluster.until_state(job, "COMPLETED", "FAILED") == "COMPLETED", output(tmp_path)
    assert "  node4: generators 6-7" in output(tmp_path)
    check_books(metrics(tmp_path), 1)


def test_two_jobs_share_the_nodes_and_a_failure_of_one_is_none_of_the_other(cluster: Cluster, tmp_path: Path) -> None:
    """Their ports don't collide, and what cleans up after the one ends no process of the other."""
    folders = [tmp_path / name for name in ("one", "two")]
    jobs = []
    for folder, mpi in zip(folders, ("openmpi", "mpich"), strict=True):
        folder.mkdir()
        jobs.append(submit(cluster, folder, slow_job(), *site(folder, mpi, relaunches=1)))
    for folder in folders:
        until_step(cluster, folder, 7)
    kill_rank(folders[0], 5)
    for job, folder in zip(jobs, folders, strict=True):
        assert cluster.until_state(job, "COMPLETED", "FAILED") == "COMPLETED", output(folder)
        check_whole(folder, STEPS)
    assert "starting again" in output(folders[0])
    assert "was ended" not in output(folders[1])


def test_ten_submits_at_once_are_ten_runs(cluster: Cluster, tmp_path: Path) -> None:
    config = latency_config(ranks={"generators": 1, "trainers": 1}, run={"steps": 3})
    site = profile(tmp_path, mpi="mpich")
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(config))
    with ThreadPoolExecutor() as pool:
        words = [("submit", "job.yaml", *site, f"run.name=run{number}") for number in range(10)]
        said = list(pool.map(lambda each: headrace(cluster, tmp_path, *each), words))
    jobs = [job_in(one.text) for one in said]
    assert len(set(jobs)) == 10, said
    for number, job in enumerate(jobs):
        assert cluster.until_state(job, "COMPLETED", "FAILED") == "COMPLETED"
        assert len((tmp_path / f"runs/run{number}/metrics.jsonl").read_text().splitlines()) == 3


def test_a_run_that_waits_in_the_queue_isnt_sent_again_and_can_be_cancelled(cluster: Cluster, tmp_path: Path) -> None:
    config = latency_config(ranks={"generators": 1, "trainers": 1})
    job = submit(cluster, tmp_path, config, *profile(tmp_path, options=["--hold"]))
    said = headrace(cluster, tmp_path, "submit", "job.yaml")
    assert said.status == 2
    assert f"Job {job} waits or runs for runs/job already" in said.text
    assert told_status(cluster, tmp_path)["state"] == f"waiting (job {job} is PENDING (JobHeldUser))"
    assert submit(cluster, tmp_path, config, *profile(tmp_path, options=["--hold"]), "--fresh") != job
    assert (tmp_path / "runs/job-2/job.sbatch").exists()
    said = headrace(cluster, tmp_path, "cancel", "job")
    assert (said.status, said.text) == (0, f"took job {job} out of the queue\nit had never been started\n")
    assert cluster.state(job) == "CANCELLED"


def test_a_sweep_is_an_array_of_runs(cluster: Cluster, tmp_path: Path) -> None:
    config = latency_config(ranks={"generators": 1, "trainers": 1}, run={"steps": 5})
    job = submit(cluster, tmp_path, config, *profile(tmp_path, mpi="mpich"), "--sweep", "run.seed=1,2")
    cluster.until_state(f"{job}_0", "COMPLETED", "FAILED")
    assert cluster.until_state(f"{job}_1", "COMPLETED", "FAILED") == "COMPLETED"
    for seed in (1, 2):
        assert len((tmp_path / f"runs/job-run.seed-{seed}/metrics.jsonl").read_text().splitlines()) == 5


def test_ranks_get_the_npus_and_the_cores_of_their_job(cluster: Cluster, tmp_path: Path) -> None:
    """srun itself gives every task one core, whatever sbatch was told."""
    keys = {"gres": "npu:2", "visible": {"npu": "ASCEND_RT_VISIBLE_DEVICES"}, "cpus_per_rank": 2}
    site = profile(tmp_path, mpi="openmpi", **keys)
    config = latency_config(ranks={"generators": 3, "trainers": 1, "threads": 0}, run={"steps": 2000})
    jobs = []
    for name in ("one", "two"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "site.yaml").write_text((tmp_path / "site.yaml").read_text())
        jobs.append(submit(cluster, folder, config, *site, "--nodes", "2"))
    seen = []
    for name in ("one", "two"):
        pid = tmp_path / name / "runs/job/latest/rank_003.pid"
        assert cluster.wait(pid.exists, 60), output(tmp_path / name)
        environ = Path(f"/proc/{pid.read_text().strip()}/environ").read_bytes().split(b"\0")
        seen.append(next(entry for entry in environ if entry.startswith(b"HEADRACE_SEATS=")))
        assert {b"SLURM_CPUS_PER_TASK=2", b"OMP_NUM_THREADS=2"} <= set(environ)
    cluster.ask("scancel", *jobs)
    assert b'"node2":"0-1"' in seen[0]
    assert b'"node2":"2-3"' in seen[1]
