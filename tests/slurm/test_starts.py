"""Every way to start the ranks on four nodes gives the run that one machine gives, bit for bit."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster import Cluster
from jobs import run_job
from runs import (
    HEADRACE,
    RANKS,
    ROOT,
    check_nothing_half,
    checkpoints,
    last_checkpoint,
    metrics,
    output,
    profile,
    submit,
)
from tiny import assert_same_bits, tiny_config

from headrace.launcher import submit_job
from headrace.launcher.profile import Profile

STEPS = 4
SAME = ("step", "version", "reward/mean", "response_length/mean", "tickets/trained", "train/loss")


def config() -> dict[str, Any]:
    return tiny_config(run={"steps": STEPS}, ranks=RANKS)


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run on one machine, without Slurm."""
    folder = tmp_path_factory.mktemp("local")
    run_job(config(), folder)
    return folder


def check_same(folder: Path, local: Path) -> None:
    assert len(metrics(folder)) == STEPS, output(folder)
    for mine, other in zip(metrics(folder), metrics(local), strict=True):
        assert {name: mine[name] for name in SAME} == {name: other[name] for name in SAME}
    assert_same_bits(last_checkpoint(folder), last_checkpoint(local))
    check_nothing_half(folder)


@pytest.mark.parametrize(
    ("starter", "mpi", "said"),
    [
        ("srun", "openmpi", "srun (openmpi, --mpi=pmix) on 4 nodes"),
        pytest.param("mpirun", "openmpi", "prterun) on 4 nodes", marks=pytest.mark.slurm_full),
        ("mpirun", "mpich", "mpiexec.hydra) on 4 nodes"),
    ],
)
def test_submit_trains_the_same_weights_as_a_local_run(
    cluster: Cluster, tmp_path: Path, local: Path, starter: str, mpi: str, said: str
) -> None:
    site = profile(tmp_path, starter=starter, mpi=mpi, relaunches=2)
    job = submit(cluster, tmp_path, config(), *site, "--nodes", "4")
    assert cluster.until_state(job, "COMPLETED", "FAILED") == "COMPLETED", output(tmp_path)
    assert said in output(tmp_path)
    for node, trains in (("node1", True), ("node2", True), ("node3", False), ("node4", False)):
        assert f"  {node}: {'trainers' if trains else 'generators'}" in output(tmp_path)
    check_same(tmp_path, local)


def test_mpich_by_srun_trains_the_same_or_names_the_plugin_that_cuts(
    cluster: Cluster, tmp_path: Path, local: Path
) -> None:
    """Which of both happens is chance: see `headrace.launcher.starter.CUTTING`."""
    site = profile(tmp_path, starter="srun", mpi="mpich", relaunches=1)
    job = submit(cluster, tmp_path, config(), *site, "--nodes", "4")
    ended = cluster.until_state(job, "COMPLETED", "FAILED")
    said = output(tmp_path)
    assert "srun (mpich, --mpi=pmi2) on 4 nodes" in said
    if ended == "COMPLETED":
        check_same(tmp_path, local)
    else:
        assert said.count("Slurm's pmi2 plugin cut what they told each other") == 2, said
        assert "use launch.starter=mpirun" in said
        assert not checkpoints(tmp_path)


def test_the_plain_script_does_the_same(cluster: Cluster, tmp_path: Path, local: Path) -> None:
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(config()))
    command = ["sbatch", "--parsable", "--nodes=4", "--ntasks-per-node=2", str(ROOT / "sbatch/headrace.sbatch")]
    sent = subprocess.run(
        [*command, "job.yaml", "launch.mpi=openmpi"],
        cwd=tmp_path,
        env=cluster.environ(HEADRACE=HEADRACE),
        capture_output=True,
        text=True,
        check=True,
    )
    job = sent.stdout.strip()
    printed = tmp_path / f"headrace-{job}.out"
    assert cluster.until_state(job, "COMPLETED", "FAILED") == "COMPLETED", printed.read_text()
    assert "srun (openmpi, --mpi=pmix) on 4 nodes" in printed.read_text()
    check_same(tmp_path, local)


def test_a_job_from_python_does_the_same(login: Cluster, tmp_path: Path, local: Path) -> None:
    job = submit_job(config(), executor="slurm", nodes=4, profile=Profile(mpi="openmpi"), timeout_min=5)
    summary = job.result()
    assert (summary.status, summary.steps, summary.attempts, summary.run) == ("ended", STEPS, 1, tmp_path / "runs/job")
    assert "srun (openmpi, --mpi=pmix) on 4 nodes" in (job.stdout() or "")
    check_same(tmp_path, local)
    script = job.paths.submission_file.read_text()
    assert "#SBATCH --cpus-per-task=1\n" in script
    assert "#SBATCH --signal=B:USR2@120\n" in script
