"""A generator that falls silent: its tickets go to others, and it goes on when it is back."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jobs import check_books, latency_config, metrics_of, start_job
from tiny import await_steps

STALENESS = 2
SILENT = 2
"""World rank of the generator that is stopped."""


def config(trainers: int = 1, **run: Any) -> dict[str, Any]:
    return latency_config(
        run={"steps": 80, "heartbeat_s": 0.1, **run},
        ranks={"generators": 3, "trainers": trainers},
        ledger={"max_staleness": STALENESS, "reissue_after_s": 0.5},
        rollout={"latency": {"train_s": 0.03}},
    )


@contextlib.contextmanager
def stopped(folder: Path, rank: int) -> Iterator[None]:
    """One rank does nothing inside the block."""
    pid = int((folder / f"runs/job/latest/rank_{rank:03d}.pid").read_text())
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):  # its job may have been ended meanwhile
            os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("trainers", [1, 2])
def test_the_tickets_of_a_silent_generator_go_to_others_and_nothing_is_lost(tmp_path: Path, trainers: int) -> None:
    job = start_job(config(trainers, silence_limit_s=60), tmp_path)
    try:
        await_steps(job, tmp_path, 10)
        with stopped(tmp_path, SILENT):
            before = len(metrics_of(tmp_path))
            # what it holds is due after so many steps, and can only be trained if others make it
            await_steps(job, tmp_path, before + STALENESS + 10)
        during = len(metrics_of(tmp_path))
        output, _ = job.communicate(timeout=120)
    finally:
        job.kill()
    assert job.returncode == 0, output
    metrics = metrics_of(tmp_path)
    assert during < len(metrics) == 80, "it came back in time"
    check_books(metrics, STALENESS)
    last = metrics[-1]
    assert [last[f"tickets/{name}"] for name in ("issued", "trained", "outstanding", "returned")] == [320, 320, 0, 0]


@pytest.mark.slow
def test_a_generator_that_stays_silent_ends_the_job_and_is_named(tmp_path: Path) -> None:
    job = start_job(config(steps=10_000, silence_limit_s=4), tmp_path)
    try:
        await_steps(job, tmp_path, 10)
        with stopped(tmp_path, SILENT):
            output, _ = job.communicate(timeout=120)
    finally:
        job.kill()
    assert job.returncode != 0
    assert f"rank {SILENT} (generator 1 on" in output
    assert "has been silent for" in output
    check_books(metrics_of(tmp_path), STALENESS)
