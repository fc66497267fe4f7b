"""Runs whole jobs by the command line, as a user does, and reads what they left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import yaml

from headrace.ranks.segments import Archived, read_share

JOB_LIMIT_S = 240


def latency_config(**sections: dict[str, Any]) -> dict[str, Any]:
    """A quick job of the latency engine; `sections` are laid over it."""
    config: dict[str, Any] = {
        "run": {"name": "job", "steps": 50, "wait_limit_s": 60},
        "ranks": {"generators": 2, "trainers": 1},
        "ledger": {"max_staleness": 1, "groups_per_step": 4},
        "rollout": {
            "engine": "latency",
            "group_size": 2,
            "max_tokens": 64,
            "slots": 8,
            "latency": {"token_ms": 2, "median_tokens": 6, "sigma": 1, "train_s": 0.01, "weight_delay_s": 0.05},
        },
        "checkpoint": {"every": 20},
    }
    return merged(config, sections)


def merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in over.items():
        result[key] = merged(result[key], value) if isinstance(value, dict) and key in result else value
    return result


def start_job(config: dict[str, Any], folder: Path, *options: str, mpi: str = "mpich") -> subprocess.Popen[str]:
    """Start `headrace run` in `folder`."""
    (folder / "job.yaml").write_text(yaml.safe_dump(config))
    command = [str(Path(sys.executable).with_name("headrace")), "run", "job.yaml", f"launch.mpi={mpi}", *options]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, stdout=pipe, stderr=subprocess.STDOUT, text=True, env={**os.environ})


def run_job(
    config: dict[str, Any],
    folder: Path,
    *options: str,
    mpi: str = "mpich",
    status: int = 0,
    limit_s: float = JOB_LIMIT_S,
) -> tuple[list[dict[str, Any]], str]:
    """Run a job to its end; returns its metrics and its output."""
    job = start_job(config, folder, *options, mpi=mpi)
    try:
        output, _ = job.communicate(timeout=limit_s)
    finally:
        job.kill()
    assert job.returncode == status, f"status {job.returncode}\n{output}"
    return metrics_of(folder), output


PROGRAM_DRIVER = """
import sys
from pathlib import Path
from headrace.launcher.config import load
from headrace.launcher.start import run_job
sys.exit(run_job(load(Path("job.yaml")), False, False, (sys.argv[1],)))
"""


def run_program(
    config: dict[str, Any], folder: Path, program: str, fault: str, limit_s: float = 200
) -> tuple[list[dict[str, Any]], str, int]:
    """A job whose ranks are those of `programs/{program}.py`, which reads what is to go wrong from FAULT: its metrics,
    output and status."""
    (folder / "job.yaml").write_text(yaml.safe_dump(merged(config, {"launch": {"env": {"FAULT": fault}}})))
    command = [sys.executable, "-c", PROGRAM_DRIVER, str(Path(__file__).parent / "programs" / f"{program}.py")]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=limit_s, check=False)
    return metrics_of(folder), ended.stdout + ended.stderr, ended.returncode


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    file = folder / "runs" / "job" / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def archived(folder: Path, finished: bool = True) -> dict[tuple[int, int], Archived]:
    """The finished, or unfinished, groups in the archive; nothing is damaged."""
    segments = list(read_share(folder / "runs/job/archive", 99, 0, 1))
    assert [sentence for segment in segments for sentence in segment.damaged] == []
    return {g.key: g for segment in segments for g in segment.groups if g.finished == finished}


def trained(folder: Path) -> dict[int, set[tuple[int, int]]]:
    """(ticket, attempt) of the samples that trainer 0 has trained, by step."""
    steps = defaultdict(set)
    for line in (folder / "runs/job/samples.jsonl").read_text().splitlines():
        sample = json.loads(line)
        steps[sample["step"]].add((sample["ticket"], sample["attempt"]))
    return steps


def check_books(metrics: list[dict[str, Any]], bound: int) -> None:
    """At every step: every ticket has one end or is at work, nothing was dropped, nothing is older than the bound."""
    for line in metrics:
        ends = sum(line[f"tickets/{name}"] for name in ("trained", "dropped", "failed", "outstanding", "returned"))
        assert line["tickets/issued"] == ends, line
        assert line["tickets/dropped"] == 0, line
        assert 0 <= line["staleness/mean"] <= line["staleness/max"] <= bound, line
    assert [line["step"] for line in metrics] == list(range(1, len(metrics) + 1))
