"""Ranks that wait leave the cores alone."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from jobs import latency_config, metrics_of, start_job

RANKS = 8
WINDOW_S = 5.0
WAITING_S = 25.0

LATENCIES: dict[str, dict[str, Any]] = {
    # all groups that there are credits for are finished, and every trainer's main thread is inside its step
    "generators wait for trainers": {"token_ms": 1, "train_s": WAITING_S},
    # a token takes that long, and every trainer waits for a batch
    "trainers wait for generators": {"token_ms": 1000 * WAITING_S, "train_s": 0},
}


def cpu_seconds(folder: Path) -> float:
    """CPU time, user and system, of all ranks of the running attempt, all their threads together."""
    pids = [int(file.read_text() or 0) for file in (folder / "runs/job/latest").glob("rank_*.pid")]
    if len(pids) < RANKS or 0 in pids:
        return 0.0
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def cores_used(folder: Path, seconds: float) -> float:
    began, before = time.monotonic(), cpu_seconds(folder)
    time.sleep(seconds)
    return (cpu_seconds(folder) - before) / (time.monotonic() - began)


def await_start(folder: Path, alive: Callable[[], bool]) -> None:
    """Return once all ranks have been started and have stopped importing."""
    while cpu_seconds(folder) < RANKS * 0.2 or cores_used(folder, 1.0) > 0.3:
        assert alive(), "the job has ended"
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.parametrize("case", LATENCIES)
def test_eight_waiting_ranks_use_less_than_a_tenth_of_a_core(tmp_path: Path, case: str) -> None:
    config = latency_config(
        run={"steps": 1},
        ranks={"generators": 6, "trainers": 2},
        rollout={"latency": {"median_tokens": 1, "sigma": 0, "weight_delay_s": 0, **LATENCIES[case]}},
    )
    job = start_job(config, tmp_path)
    try:
        await_start(tmp_path, lambda: job.poll() is None)
        cores = min(cores_used(tmp_path, WINDOW_S) for _ in range(2))  # a busy machine makes every wake-up dearer
        assert job.poll() is None
        assert not metrics_of(tmp_path), "the wait was over before the measurement"
        output, _ = job.communicate(timeout=120)
    finally:
        job.kill()
    assert job.returncode == 0, output
    assert len(metrics_of(tmp_path)) == 1
    assert cores < 0.10, f"{cores:.3f} cores"
