"""submitit's job on Slurm, for a run: one process that takes the place of the batch script's shell.

    sbatch ──▶ batch script: the profile's setup, then `exec python` ──▶ Run() ──▶ srun or mpirun ──▶ ranks on all nodes
                                     ▲                                    │
              SIGUSR2 to this one ───┘   ◀── scontrol requeue ────────────┘   when the ranks have left a checkpoint

submitit alone would start every rank by an srun without `--cpus-per-task`, and have Slurm signal all ranks and the
daemons of mpirun at once; some of them die of it. So the options are those of `headrace submit`.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import time
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from submitit import SlurmExecutor, SlurmJob
from submitit.core.utils import FailedJobError
from submitit.slurm.slurm import SlurmInfoWatcher

from headrace.comm.errors import ConfigError, HeadraceError
from headrace.launcher.cancel import end_job
from headrace.launcher.profile import Profile
from headrace.launcher.queue import queued, tell
from headrace.launcher.submit import sbatch_environment
from headrace.launcher.submitit_run import Run, RunJob
from headrace.launcher.summary import RunSummary

NO_LIMIT_MIN = 60 * 24 * 365
"""Minutes, for a partition's jobs without a limit."""

OWN = ("output", "open_mode")
"""Options that submitit sets itself, to the same end."""

LIMIT = re.compile(r"(?:(?P<days>\d+)-)?(?P<first>\d+)(?::(?P<second>\d+))?(?::(?P<third>\d+))?")


class Queue(SlurmInfoWatcher):
    """Asks squeue; submitit asks sacct, which needs accounting."""

    def update(self) -> None:
        self._last_status_check = time.time()
        asked = sorted(self._registered - self._finished)
        try:
            found = queued([int(job) for job in asked])
        except HeadraceError as error:  # Slurm is away for a while; whoever waits goes on waiting
            warnings.warn(str(error), stacklevel=2)
            return
        for job in asked:
            known = found.get(int(job))
            state = "ENDED" if known is None else "PENDING" if known.waits else "RUNNING"
            self._info_dict[job] = {"State": state}
        self._finished |= {job for job in asked if int(job) not in found}


class SlurmRunJob(RunJob, SlurmJob[RunSummary]):
    """A run in Slurm's queue."""

    watcher = Queue(delay_s=30)

    def cancel(self, check: bool = True) -> None:
        """Have the run write a checkpoint and leave, or take it out of the queue if it waits there.

        Args:
            check: wait for it.
        """
        for job in queued([int(self.job_id)]).values():
            end_job(job)
        if check:
            self.wait()

    def _interrupt(self, timeout: bool = False) -> None:
        """What a time limit does; submitit's name for it."""
        tell(["scancel", "--batch", "--signal=USR2", self.job_id])


class SlurmRunExecutor(SlurmExecutor):
    """Sends runs to Slurm."""

    job_class = SlurmRunJob

    def _num_tasks(self) -> int:
        """Of submitit's; the ranks are started by it."""
        return 1

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        """Without what is left of other jobs in the environment, which sbatch would hand on to this one."""
        stale = sorted(os.environ.keys() - sbatch_environment(os.environ).keys())
        return ["env", *(f"--unset={name}" for name in stale), "sbatch", str(submission_file_path)]


def send(run: Run, folder: Path, directives: Iterable[str], profile: Profile) -> SlurmRunJob:
    """Send a run to Slurm.

    Args:
        folder: for submitit's files.
        directives: options of sbatch, quoted for bash.

    Raises:
        HeadraceError: Slurm refuses it, with its words.
    """
    executor = SlurmRunExecutor(folder, max_num_timeout=profile.requeues, python=f"exec {shlex.quote(sys.executable)}")
    executor.update_parameters(
        time=minutes(profile.time),
        setup=["trap '' USR2  # until the run listens", *profile.lines()],
        additional_parameters={name: value for name, value in map(_option, directives) if name not in OWN},
        use_srun=False,
    )
    try:
        job = executor.submit(run)
    except FailedJobError as error:
        told = " ".join(str(error).split()).removeprefix("sbatch: error: ")
        raise HeadraceError(f"Slurm doesn't take the job: {told}") from None
    assert isinstance(job, SlurmRunJob)
    return job


def _option(directive: str) -> tuple[str, Any]:
    """`--cpus-per-task=2` → (`cpus_per_task`, `2`), as submitit takes it."""
    (text,) = shlex.split(directive)
    if not text.startswith("--"):
        raise ConfigError(f"`options` of the profile: {directive}. Write options as --name=value.")
    name, equals, value = text.removeprefix("--").partition("=")
    return name.replace("-", "_"), value if equals else True


def minutes(limit: str) -> int:
    """A time limit as sbatch takes it (`90`, `90:00`, `1:30:00`, `1-12`, `1-12:30`, `1-12:30:00`) in whole minutes,
    at least 1; a word such as UNLIMITED is a year."""
    match = LIMIT.fullmatch(limit)
    if match is None:
        return NO_LIMIT_MIN
    parts = [int(match[name] or 0) for name in ("first", "second", "third")]
    if match["days"] is None and match["third"] is None:
        parts = [0, *parts[:2]]
    hours, mins, secs = parts
    return max(1, (24 * int(match["days"] or 0) + hours) * 60 + mins + secs // 60)
