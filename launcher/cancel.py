"""`headrace cancel`: ask a run to write a checkpoint and leave, wait for it, and say what happened.

    started by `headrace run` here   SIGTERM ──▶ launcher ──▶ ranks: checkpoint, status 75; a second one kills
    a job of Slurm that waits        scancel
    a job of Slurm that runs         no more requeues, then SIGUSR2 ──▶ batch script ──▶ ranks: checkpoint
    on another host                  refused: only there can the process be asked

The 30 s that Slurm waits between SIGTERM and SIGKILL are too short for a checkpoint; here the run's own
`launch.stop_within_s` counts.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from headrace.comm.errors import HeadraceError
from headrace.launcher.config import LaunchConfig, read_yaml
from headrace.launcher.processes import kill_job
from headrace.launcher.queue import QueuedJob, queued, tell
from headrace.launcher.record import Launcher, end_of, launcher_of
from headrace.launcher.run import STOPPED
from headrace.launcher.runfolder import steps_done
from headrace.launcher.status import attempts, read_status
from headrace.ranks.failure import JOB_MARK

POLL_S = 0.1
QUEUE_POLL_S = 2.0

MARGIN_S = 15.0
"""Beyond `launch.stop_within_s`, for what comes after the ranks."""

QUEUE_MARGIN_S = 60.0
"""The same for a batch script and Slurm."""

KILL_S = 10.0
"""How long a launcher that is told to kill may take."""

STILL_THERE = 1
"""Exit status if the run hasn't ended in time."""

Say = Callable[[str], None]


def cancel(run: Path, now: bool, say: Say) -> int:
    """Stop a run.

    Args:
        now: kill it, without a checkpoint.
        say: told what happens, a line at a time.

    Returns:
        0 if the run has ended, 1 if it goes on still.

    Raises:
        HeadraceError: the run can't be stopped from here.
    """
    status = read_status(run)
    if status.state not in ("running", "waiting"):
        say(f"{run} isn't running: {status.state}{f' ({status.detail})' if status.detail else ''}")
        return 0
    tried = attempts(run)
    launcher = launcher_of(tried[-1]) if tried else None
    if status.job is not None and (status.job.waits or not _runs_here(launcher, status.job)):
        return _cancel_job(run, status.job, now, say)
    if launcher is None:
        raise HeadraceError(f"{run} was started without `headrace run`: stop its mpirun, by Ctrl-C or SIGTERM.")
    if not launcher.is_here():
        raise HeadraceError(f"{run} is run by process {launcher.pid} on {launcher.host}: cancel it there.")
    return _cancel_launcher(run, tried[-1], launcher, now, say)


def _runs_here(launcher: Launcher | None, job: QueuedJob) -> bool:
    """Whether the launcher was started by hand in an interactive job, where no batch script takes a signal."""
    return launcher is not None and launcher.slurm_job == job.job and launcher.is_here() and launcher.is_alive()


def _cancel_launcher(run: Path, attempt: Path, launcher: Launcher, now: bool, say: Say) -> int:
    limit = _stop_within(run) + MARGIN_S
    _signal(launcher, signal.SIGTERM)
    if now:
        _kill(attempt, launcher)
    else:
        say(f"asked process {launcher.pid} to write a checkpoint and leave, within {limit:.0f} s; again kills it")
        _wait(lambda: not launcher.is_alive(), limit, POLL_S)
    if launcher.is_alive():
        say(f"{run} is still running after {limit:.0f} s; `headrace cancel {run} --now` kills it")
        return STILL_THERE
    say(_told(run, attempt))
    return 0


def _kill(attempt: Path, launcher: Launcher) -> None:
    """A second signal has the launcher kill its ranks; should it not, all are ended from here."""
    marks = _marks(attempt)
    time.sleep(POLL_S)
    if end_of(attempt) is None:
        _signal(launcher, signal.SIGTERM)
    if not _wait(lambda: not launcher.is_alive(), KILL_S, POLL_S):
        _signal(launcher, signal.SIGKILL)
        for mark in marks:
            kill_job(mark)
        _wait(lambda: not launcher.is_alive(), KILL_S, POLL_S)


def _signal(launcher: Launcher, number: signal.Signals) -> None:
    if launcher.is_alive():
        os.kill(launcher.pid, number)


def _marks(attempt: Path) -> set[str]:
    """The names by which the processes of this attempt know their job."""
    prefix = f"{JOB_MARK}=".encode()
    found = set()
    for file in attempt.glob("rank_*.pid"):
        environ = Path(f"/proc/{file.read_text().strip()}/environ")
        entries = environ.read_bytes().split(b"\0") if environ.exists() else []
        found |= {entry.removeprefix(prefix).decode() for entry in entries if entry.startswith(prefix)}
    return found


def _cancel_job(run: Path, job: QueuedJob, now: bool, say: Say) -> int:
    number = str(job.job)
    end_job(job, now)
    if job.waits or now:
        limit = QUEUE_MARGIN_S
        say(f"took job {number} out of the queue" if job.waits else f"killed job {number}")
    else:
        limit = _stop_within(run) + QUEUE_MARGIN_S
        say(f"asked job {number} to write a checkpoint and leave, within {limit:.0f} s; again kills it")
    if not _wait(lambda: not queued([job.job]), limit, QUEUE_POLL_S):
        say(f"job {number} is still there after {limit:.0f} s; `headrace cancel {run} --now` kills it")
        return STILL_THERE
    tried = attempts(run)
    say(_told(run, tried[-1]) if tried else "it had never been started")
    return 0


def end_job(job: QueuedJob, now: bool = False) -> None:
    """Take a job that waits out of the queue, ask one that runs to write a checkpoint and leave, or kill it `now`.

    Raises:
        HeadraceError: Slurm refuses, or doesn't answer.
    """
    number = str(job.job)
    if job.waits or now:
        tell(["scancel", number])
    else:
        tell(["scontrol", "update", f"JobId={number}", "Requeue=0"])
        tell(["scancel", "--batch", "--signal=USR2", number])


def _told(run: Path, attempt: Path) -> str:
    """What is left of a run that has ended."""
    ended, done = end_of(attempt), steps_done(run)
    left = f"its last checkpoint is of step {done}" if done else "it had no checkpoint yet"
    if ended is None:
        return f"killed; {left}"
    if ended.status == 0:
        return "it had finished already"
    if ended.failure is not None:
        return f"it failed while it was stopping: {ended.failure}"
    if ended.status == STOPPED:
        return f"stopped after the checkpoint of step {done}; go on by --resume"
    return f"stopped with status {ended.status} before it could leave by itself; {left}"


def _stop_within(run: Path) -> float:
    launch = read_yaml(run / "config.yaml").get("launch") or {}
    return LaunchConfig.model_validate(launch).stop_within_s


def _wait(done: Callable[[], bool], limit_s: float, poll_s: float) -> bool:
    end = time.monotonic() + limit_s
    while not done():
        if time.monotonic() > end:
            return False
        time.sleep(poll_s)
    return True
