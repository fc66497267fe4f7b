"""The processes of a job: found by a mark in their environment, ended by pid, watched for the first that dies."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
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


@dataclass
class DeathWatch:
    """Tells in which order the ranks of an attempt ended.

    mpirun ends the others within a millisecond, so looking at them one after the other would come too late; and
    MPICH's own words name any of the dead. The kernel keeps the order: pids are watched by one epoll object, whose
    list of events is filled as they happen.
    """

    folder: Path
    """Where rank_NNN.pid files appear."""
    deaths: list[int] = field(default_factory=list)
    """Ranks, first dead first."""
    _epoll: select.epoll = field(default_factory=select.epoll)
    _ranks: dict[int, int] = field(default_factory=dict)
    """Rank by file descriptor."""
    _known: set[str] = field(default_factory=set)

    def fileno(self) -> int:
        """Readable when a rank has died."""
        return self._epoll.fileno()

    def poll(self) -> None:
        """Take in new pid files and deaths."""
        for fd, _ in self._epoll.poll(0, max(1, len(self._ranks))):
            self._epoll.unregister(fd)
            os.close(fd)
            self.deaths.append(self._ranks.pop(fd))
        for file in self.folder.glob("rank_*.pid"):
            if file.name not in self._known:
                self._watch(file)

    def _watch(self, file: Path) -> None:
        text = file.read_text()
        if not text.strip():
            return
        self._known.add(file.name)
        rank = int(file.stem.removeprefix("rank_"))
        try:
            fd = os.pidfd_open(int(text))
        except ProcessLookupError:
            self.deaths.append(rank)
            return
        except OSError as error:
            if error.errno == errno.ENOSYS:  # before Linux 5.3: mpirun's own words have to do
                return
            raise
        self._ranks[fd] = rank
        self._epoll.register(fd, select.EPOLLIN)

    def close(self) -> None:
        for fd in self._ranks:
            os.close(fd)
        self._epoll.close()
