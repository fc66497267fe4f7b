"""A run as submitit sees it: a callable that may be called again, and a job with a result.

    submit ──▶ RUN/config.yaml, RUN/submitit/ID_submitted.pkl ──▶ process: Run() ──▶ launcher ──▶ ranks
                                                                    │
      done ◀── RunSummary in ID_0_result.pkl ◀── status 0 ──────────┤
    failed ◀── RunError in ID_0_result.pkl ◀──── a rank failed ─────┤
     again ◀── submitit queues it again ◀─────── SIGUSR2 ───────────┤   the ranks write a checkpoint first; the next
      gone ◀── nothing ◀──────────────────────── SIGTERM, cancel ───┘   call of Run goes on from there

While the ranks run the launcher has the signals, and submitit gets SIGUSR2 from it once they have left. The pickles are
submitit's own protocol, between processes of one user; headrace itself reads none.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from submitit import Job, JobEnvironment
from submitit.core.utils import DelayedSubmission, FailedJobError, UncompletedJobError

from headrace.comm.errors import ConfigError, HeadraceError
from headrace.launcher.stop import Stopped, StopRequest

if TYPE_CHECKING:  # loaded in the job only once it listens for signals
    from headrace.launcher.summary import RunSummary

STOPPED = 75
"""As in `headrace.launcher.run`."""

WARNED = 128 + signal.SIGUSR2
"""Status of a run that was warned and couldn't leave in time, or had no ranks yet."""


class RunError(HeadraceError, FailedJobError):
    """A run that has no result: it failed or was stopped. The message is the paragraph that `headrace run` prints."""


@dataclass(frozen=True, slots=True)
class Run:
    """What submitit calls: the run in a folder, begun or gone on with. Made by `prepare_run` or `submit_job`."""

    folder: Path
    """The run folder, from the root; its `config.yaml` says the rest."""

    def __call__(self) -> RunSummary:
        """Run to the end, in a job of `submit_job` or of submitit's executor `mpirun`.

        Raises:
            RunError: it failed.
            SystemExit: it was stopped, or is queued again.
        """
        check_place(os.environ)
        with StopRequest() as stop:
            status = self._run(stop)
        if goes_back(status, stop.signum):
            self._hand_over()
        if stop.signum is not None and status in (STOPPED, 128 + stop.signum):
            sys.exit(status)
        if status != 0:
            raise RunError(why(self.folder))
        from headrace.launcher.summary import RunSummary

        return replace(RunSummary.read(self.folder), status="ended")  # to Slurm the job runs until this process ends

    def checkpoint(self) -> DelayedSubmission:
        """Called by submitit before it queues the job again: the same, since it goes on by what lies in the folder."""
        return DelayedSubmission(self)

    def _run(self, stop: StopRequest) -> int:
        try:
            from headrace.launcher.config import load
            from headrace.launcher.runfolder import has_begun
            from headrace.launcher.start import run_until

            return run_until(stop, load(self.folder / "config.yaml"), has_begun(self.folder), False)
        except Stopped:
            assert stop.signum is not None
            return 128 + stop.signum
        except HeadraceError as error:
            raise RunError(str(error)) from None

    def _hand_over(self) -> None:
        """Have submitit queue the job again; doesn't return."""
        try:
            signal.raise_signal(JobEnvironment._usr_sig())
        except UncompletedJobError as error:
            raise RunError(f"{error} {left(self.folder)}") from None
        except subprocess.CalledProcessError:  # Slurm doesn't queue it: it was cancelled
            sys.exit(STOPPED)


def goes_back(status: int, signum: int | None) -> bool:
    """Whether a run is to be queued again, as the script of `headrace submit` has it: asked to stop by SIGUSR2, or left
    with too few nodes; `signum` is the signal that asked it to stop, if one did."""
    return (signum in (None, signal.SIGUSR2) and status == STOPPED) or (signum == signal.SIGUSR2 and status == WARNED)


def check_place(environ: Mapping[str, str]) -> None:
    """
    Raises:
        RunError: submitit has started this process in a way in which the ranks can't be started, or not be stopped.
    """
    executor = environ.get("SUBMITIT_EXECUTOR")
    if executor == "mpirun" or (executor == "slurm" and "SLURM_STEP_ID" not in environ):
        return
    if executor == "slurm":
        raise RunError(
            "submitit's own executor for Slurm starts a task per rank, each a world of one. One process starts all "
            'ranks of a run: use headrace.launcher.submit_job(..., executor="slurm").'
        )
    raise RunError(
        f"submitit's executor `{executor}` makes every task a world of one and kills without a checkpoint. On one "
        'machine use cluster="mpirun" of submitit.AutoExecutor, or headrace.launcher.submit_job(...).'
    )


def why(run: Path) -> str:
    """Why a run is over that hasn't done all its steps, in one paragraph."""
    from headrace.launcher.record import end_of
    from headrace.launcher.status import attempts

    tried = attempts(run)
    ended = end_of(tried[-1]) if tried else None
    if ended is not None and ended.failure is not None:
        return f"{ended.failure} More is in {run / 'latest'}."
    return f"The run was {'killed' if ended is None else 'stopped'} before its end. {left(run)}"


def left(run: Path) -> str:
    """What a run that is over has left behind."""
    from headrace.launcher.runfolder import steps_done

    step = steps_done(run)
    if not step:
        return f"No checkpoint was written yet; submit_job(..., resume=True) begins the run in {run} again."
    return f"The last checkpoint in {run} is of step {step}; submit_job(..., resume=True) goes on from there."


class RunJob(Job["RunSummary"]):
    """A job that is a run: `result()` gives a RunSummary or raises one paragraph."""

    @property
    def run(self) -> Path:
        """The run folder."""
        function = self.submission().function
        assert isinstance(function, Run)
        return function.folder

    def results(self) -> list[RunSummary]:
        """Wait for the end.

        Raises:
            RunError: the run failed or was stopped.
        """
        error = self.exception()
        if error is not None:
            raise error
        return [self._get_outcome_and_result()[1]]

    def exception(self) -> RunError | None:
        """Wait for the end; what `result()` would raise."""
        self.wait()
        try:
            outcome, trace = self._get_outcome_and_result()
        except UncompletedJobError:
            return RunError(why(self.run))
        return None if outcome == "success" else RunError(paragraph(trace))


def paragraph(trace: str) -> str:
    """The message of a RunError in a traceback, or all of it if it is a defect."""
    _, marker, message = trace.partition(f"\n{RunError.__module__}.{RunError.__qualname__}: ")
    return message.strip() if marker else f"The run ended by a defect:\n{trace}"


def require_run(submission: DelayedSubmission) -> None:
    """
    Raises:
        ConfigError: something else than a run was submitted.
    """
    if not isinstance(submission.function, Run):
        raise ConfigError(
            "The executor `mpirun` starts the ranks of a run: submit what headrace.launcher.prepare_run(CONFIG) "
            "returns, or use headrace.launcher.submit_job(CONFIG)."
        )
