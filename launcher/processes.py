"""The processes of a job: found by a mark in their environment, ended by pid, watched for the first that dies."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from headrace.launcher.environment import JOB_MARK


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


class DeathWatch:
    """Tells in which order the ranks of an attempt ended.

    mpirun ends the others within a millisecond, so looking at them one after the other would come too late, and MPICH's
    own words name any of the dead. Every rank holds a FIFO open; the kernel closes it while the process dies, before
    mpirun's connection to it, so before anybody else can know. One epoll object keeps the order of these events.
    """

    def __init__(self, folder: Path, ranks: int) -> None:
        """Make the FIFOs `rank_NNN.alive`; before the ranks start."""
        self.deaths: list[int] = []
        """Ranks, first dead first."""
        self._fifos = [folder / f"rank_{rank:03d}.alive" for rank in range(ranks)]
        self._epoll = select.epoll()
        self._ranks: dict[int, int] = {}
        """Rank by file descriptor."""
        for rank, path in enumerate(self._fifos):
            os.mkfifo(path)
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            self._ranks[fd] = rank
            self._epoll.register(fd, 0)  # hang-ups are always told; there is none before a writer has come

    def fileno(self) -> int:
        """Readable when a rank has died."""
        return self._epoll.fileno()

    def poll(self) -> None:
        """Take in deaths."""
        for fd, _ in self._epoll.poll(0, max(1, len(self._ranks))):
            self._epoll.unregister(fd)
            os.close(fd)
            self.deaths.append(self._ranks.pop(fd))

    def close(self) -> None:
        for path in self._fifos:
            path.unlink(missing_ok=True)
        for fd in self._ranks:
            os.close(fd)
        self._epoll.close()
