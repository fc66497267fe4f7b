"""What a launcher leaves in the folder of its attempt, for `headrace status` and `headrace cancel`.

attempt_NN/launcher.json   which process on which host starts the ranks, in which job; before they start
attempt_NN/outcome.json    how it ended; missing while it runs, and if it was killed
RUN/slurm_job              number of the job that was submitted for this run, from before its first attempt on
"""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path
from typing import TypeVar

import msgspec

from headrace.comm.errors import DataError
from headrace.comm.files import write_whole

LAUNCHER = "launcher.json"
OUTCOME = "outcome.json"
SLURM_JOB = "slurm_job"


class Launcher(msgspec.Struct, frozen=True):
    """A process that starts ranks, so that no other one that got its pid later is taken for it."""

    host: str
    pid: int
    began: int
    """Clock ticks from the start of the host to the start of the process, as in /proc."""
    slurm_job: int | None
    """The job in which it runs."""

    def is_here(self) -> bool:
        """Whether it ran on this host, so that `is_alive` can tell."""
        return self.host == socket.gethostname()

    def is_alive(self) -> bool:
        """Whether it runs; ask on its own host only."""
        return start_of(self.pid) == self.began


class Ended(msgspec.Struct, frozen=True):
    """How an attempt ended."""

    status: int
    """Exit status of the launcher."""
    failure: str | None
    """What failed first; None where nothing did."""


def record_launcher(attempt: Path) -> None:
    """Write down that this process is the launcher."""
    job = os.environ.get("SLURM_JOB_ID", "")
    began = start_of(os.getpid())
    assert began is not None
    launcher = Launcher(socket.gethostname(), os.getpid(), began, int(job) if job.isdigit() else None)
    _write(attempt / LAUNCHER, launcher)


def record_end(attempt: Path, ended: Ended) -> None:
    """Write down how the attempt ended. A full disk doesn't matter here: the end is told on the terminal, too."""
    with contextlib.suppress(OSError):
        _write(attempt / OUTCOME, ended)


def launcher_of(attempt: Path) -> Launcher | None:
    """Who started this attempt; None if the ranks were started by other means than `headrace run`.

    Raises:
        DataError: the file can't be understood.
    """
    return _read(attempt / LAUNCHER, Launcher)


def end_of(attempt: Path) -> Ended | None:
    """How the attempt ended; None if nobody has written it down.

    Raises:
        DataError: the file can't be understood.
    """
    return _read(attempt / OUTCOME, Ended)


def record_job(run: Path, job: int) -> None:
    """Write down the job that was submitted for a run."""
    run.mkdir(parents=True, exist_ok=True)
    (run / SLURM_JOB).write_text(f"{job}\n", encoding="utf-8")


def job_of(run: Path) -> int | None:
    """The job that was submitted for a run.

    Raises:
        DataError: the file holds something else.
    """
    file = run / SLURM_JOB
    try:
        return int(file.read_text(encoding="utf-8")) if file.is_file() else None
    except ValueError:
        raise DataError(f"{file} holds no number of a job") from None


def start_of(pid: int) -> int | None:
    """When a living process began, in clock ticks from the start of the host; None if there is none, or only its
    zombie."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state == "Z" else int(fields[18])


def _write(file: Path, what: msgspec.Struct) -> None:
    write_whole(file, msgspec.json.encode(what) + b"\n")


Kind = TypeVar("Kind", Launcher, Ended)


def _read(file: Path, kind: type[Kind]) -> Kind | None:
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind) if file.is_file() else None
    except ValueError as error:  # msgspec's own among them
        raise DataError(f"{file} isn't what was written: {error}") from None
