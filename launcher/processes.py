"""The processes of a job: found by a mark in their environment, ended by pid."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from headrace.ranks.failure import JOB_MARK


def processes_of(job: str) -> list[int]:
    """Pids of the living processes whose environment names the job; never by their program's name."""
    mark = f"{JOB_MARK}={job}".encode()
    return [pid for pid in _pids() if pid != os.getpid() and mark in _environ(pid)]


def kill_job(job: str, limit_s: float = 5.0) -> None:
    """End every process of the job at once, those started meanwhile too."""
    end = time.monotonic() + limit_s
    while (pids := processes_of(job)) and time.monotonic() < end:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _pids() -> Iterator[int]:
    return (int(entry) for entry in os.listdir("/proc") if entry.isdigit())


def _environ(pid: int) -> list[bytes]:
    """The environment a process started with; empty for zombies and for other users' processes."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []
