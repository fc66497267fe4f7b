"""What Slurm says about jobs, and what it is told to do with them. Every question has a limit."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headrace.comm.errors import HeadraceError

ANSWER_LIMIT_S = 20
GONE = "Invalid job id"
FORMAT = "%A|%T|%r|%L"
"""Job id (a number for the tasks of an array, too), state, reason, time left."""

DAYS = re.compile(r"^(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)$")

WAITING = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT", "CONFIGURING")
RUNNING = ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING")


@dataclass(frozen=True, slots=True)
class QueuedJob:
    """A job that Slurm knows."""

    job: int
    state: str
    """As squeue names it, for instance PENDING."""
    reason: str
    """Why it waits."""
    left_s: float | None
    """To its time limit; None if there is none or it isn't running."""

    @property
    def waits(self) -> bool:
        return self.state in WAITING

    @property
    def runs(self) -> bool:
        return self.state in RUNNING


def has_slurm() -> bool:
    """Whether this host can speak to a Slurm."""
    return shutil.which("squeue") is not None


def queued(jobs: Sequence[int]) -> dict[int, QueuedJob]:
    """Those of the jobs that wait or run; nothing where there is no Slurm.

    Raises:
        HeadraceError: squeue fails or doesn't answer.
    """
    found: dict[int, QueuedJob] = {}
    if not has_slurm():
        return found
    for job in jobs:  # one by one: squeue fails as a whole for a single job that it has forgotten
        code, text, error = ask(["squeue", "--noheader", f"--jobs={job}", f"--format={FORMAT}"])
        if code and GONE not in error:
            raise HeadraceError(f"squeue failed: {error or f'status {code}'}. Ask again once Slurm answers.")
        found |= {entry.job: entry for entry in map(_parse, text.splitlines()) if entry.waits or entry.runs}
    return found


def tell(command: Sequence[str]) -> None:
    """Run a command of Slurm.

    Raises:
        HeadraceError: it fails or doesn't answer.
    """
    code, _, error = ask(command)
    if code:
        raise HeadraceError(f"`{' '.join(command)}` failed: {error or f'status {code}'}.")


def ask(command: Sequence[str], environ: Mapping[str, str] | None = None) -> tuple[int, str, str]:
    """Exit status, output and errors of a command, in this process's environment or another.

    Raises:
        HeadraceError: there is no such command, or it didn't answer in time.
    """
    try:
        run = subprocess.run(
            command, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=ANSWER_LIMIT_S
        )
    except subprocess.TimeoutExpired:
        raise HeadraceError(f"`{' '.join(command)}` didn't answer within {ANSWER_LIMIT_S} s.") from None
    except OSError as error:
        raise HeadraceError(f"{command[0]} can't be started: {error.strerror}.") from None
    return run.returncode, run.stdout.strip(), run.stderr.strip()


def _parse(line: str) -> QueuedJob:
    job, state, reason, left = line.split("|", 3)
    return QueuedJob(int(job), state, reason, seconds(left) if state == "RUNNING" else None)


def seconds(text: str) -> float | None:
    """`1-02:03:04`, `02:03:04` or `03:04` in seconds; None for words such as UNLIMITED."""
    match = DAYS.match(text)
    if match is None:
        return None
    days, hours, minutes, rest = (int(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + rest
