"""Runs as users send them to the cluster, and what they leave."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster import Cluster
from jobs import check_books, latency_config

ROOT = Path(__file__).parents[2]
HEADRACE = str(Path(sys.executable).with_name("headrace"))
RANKS = {"generators": 6, "trainers": 2}
STEPS = 40


both = pytest.mark.parametrize("mpi", ["openmpi", "mpich"])
both_in_full = pytest.mark.parametrize("mpi", ["openmpi", pytest.param("mpich", marks=pytest.mark.slurm_full)])


@dataclass(frozen=True)
class Said:
    """What a command said."""

    status: int
    text: str


def headrace(cluster: Cluster, folder: Path, *words: str, limit_s: float = 120, **environ: str) -> Said:
    """The command line, on the login node."""
    run = subprocess.run(
        [HEADRACE, *words],
        cwd=folder,
        env=cluster.environ(**environ),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=limit_s,
        check=False,
    )
    return Said(run.returncode, run.stdout)


def shell(cluster: Cluster, folder: Path, lines: str, **environ: str) -> str:
    """What lines say that a user types on the login node; all of them work."""
    said = subprocess.run(
        ["bash", "-ec", lines],
        cwd=folder,
        env=cluster.environ(PATH=f"{Path(HEADRACE).parent}:/usr/sbin:/usr/bin:/bin", **environ),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    assert said.returncode == 0, said.stdout
    return said.stdout


def job_in(said: str) -> str:
    """The id of the job that `headrace submit` tells."""
    (job,) = re.findall(r"\bjob (\d+):", said)
    return str(job)


def submit(cluster: Cluster, folder: Path, config: dict[str, Any], *words: str, **environ: str) -> str:
    """Write the config and send it; returns the id of the job."""
    (folder / "job.yaml").write_text(yaml.safe_dump(config))
    said = headrace(cluster, folder, "submit", "job.yaml", *words, **environ)
    assert said.status == 0, said.text
    return job_in(said.text)


def profile(folder: Path, **keys: Any) -> tuple[str, str]:
    """A site's own profile, as options for `submit`. By srun MPICH starts only by chance."""
    starter = "mpirun" if keys.get("mpi") == "mpich" and "pmi" not in keys else "srun"
    base = {"starter": starter, "warn_s": 1, "requeues": 5, "relaunches": 0}
    (folder / "site.yaml").write_text(yaml.safe_dump(base | keys))
    return "--profile", "site.yaml"


def told_status(cluster: Cluster, folder: Path) -> dict[str, str]:
    """What `headrace status` says of the run: text by title."""
    said = headrace(cluster, folder, "status", "job")
    assert said.status == 0, said.text
    return {line[2:14].strip(): line[14:] for line in said.text.splitlines()[1:]}


def output(folder: Path) -> str:
    """What the jobs of the run printed."""
    return "".join(file.read_text() for file in sorted(folder.glob("runs/job/slurm-*.out")))


def metrics(folder: Path) -> list[dict[str, Any]]:
    file = folder / "runs/job/metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def until_step(cluster: Cluster, folder: Path, step: int, limit_s: float = 120) -> None:
    assert cluster.wait(lambda: len(metrics(folder)) >= step, limit_s), output(folder)


def checkpoints(folder: Path) -> list[int]:
    """Steps of the whole checkpoints."""
    return sorted(
        int(marker.parent.name.removeprefix("step_")) for marker in folder.glob("runs/job/checkpoints/*/COMPLETE")
    )


def last_checkpoint(folder: Path) -> Path:
    return folder / f"runs/job/checkpoints/step_{checkpoints(folder)[-1]:06d}"


def check_nothing_half(folder: Path, killed: bool = False) -> None:
    """No temporary file or folder is left by writes that were cut. What ranks that were `killed` were writing keeps the
    name that no checkpoint has, and goes with the next one (`tests/train/test_checkpoint.py`)."""
    checkpoint = folder / "runs/job/checkpoints"
    half = [path for path in checkpoint.glob("*") if path.is_dir() and not (path / "COMPLETE").exists()]
    assert not [path for path in half if not (killed and path.suffix == ".writing")], half


def slow_job(steps: int = STEPS, **sections: dict[str, Any]) -> dict[str, Any]:
    """A run of about `steps` / 4 seconds."""
    latency = {"token_ms": 2, "median_tokens": 6, "sigma": 1, "train_s": 0.2, "weight_delay_s": 0.02}
    base: dict[str, Any] = {"run": {"steps": steps}, "ranks": RANKS, "rollout": {"latency": latency}}
    return latency_config(**base | {"checkpoint": {"every": 5}} | sections)


def site(folder: Path, mpi: str, **keys: Any) -> tuple[str, ...]:
    return (*profile(folder, mpi=mpi, **keys), "--nodes", "4")


def warn(cluster: Cluster, job: str) -> None:
    """What Slurm does before the time limit."""
    cluster.ask("scancel", "--batch", "--signal=USR2", job)


def until_requeued(cluster: Cluster, job: str) -> None:
    """Wait until the job is back in the queue, and have it stay there until `scontrol release`."""
    cluster.until_state(job, "PENDING", limit_s=30)
    cluster.ask("scontrol", "hold", job)


def check_whole(folder: Path, steps: int, staleness: int = 1) -> None:
    """Every step was trained once, in the end, and the books are right over all restarts."""
    check_books(metrics(folder), staleness)
    assert len(metrics(folder)) == steps
    assert checkpoints(folder)[-1] == steps
    check_nothing_half(folder)


def kill_rank(folder: Path, rank: int) -> None:
    os.kill(int((folder / f"runs/job/latest/rank_{rank:03d}.pid").read_text()), signal.SIGKILL)
