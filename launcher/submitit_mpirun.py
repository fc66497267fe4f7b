"""submitit's executor `mpirun`: a run on this machine, as one process that starts its ranks.

submitit finds it by the entry points of this package, so `submitit.AutoExecutor(FOLDER, cluster="mpirun")` works. Its
own executor `local` is no help: each of its tasks would be a world of one, and it kills within a second.

The process outlives the Python that has submitted it. A job's id is its pid and its time of start, so nobody takes
another process for it. To be queued again, it becomes the same program anew (`exec`), with the same id.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from submitit.core.core import InfoWatcher, PicklingExecutor
from submitit.core.job_environment import JobEnvironment
from submitit.core.utils import DelayedSubmission, JobPaths

from headrace.comm.errors import ConfigError
from headrace.launcher.record import start_of
from headrace.launcher.submitit_run import RunJob, require_run

NO_LIMIT_MIN = 60 * 24 * 365
"""Minutes that no run lasts."""

REPEATS = 3
"""How often a run goes on after its time limit, unless `max_num_timeout` says otherwise; as submitit's executors do."""

SCRIPT = """\
#!/bin/bash
# A run on this machine, by submitit's executor `mpirun`. It prints the id of the job and leaves the process behind.
export SUBMITIT_EXECUTOR=mpirun
trap '' USR2  # until the process listens
{{
    read -ra stat < /proc/$BASHPID/stat
    log={log}/$BASHPID-${{stat[21]}}_0_log
    echo "$BASHPID-${{stat[21]}}"
    exec setsid {command} < /dev/null > "$log.out" 2> "$log.err"
}} &
"""
"""`setsid` starts no further process, since the one that it runs in leads no group: pid and time of start stay."""


class Processes(InfoWatcher):
    """Looks whether processes live."""

    def get_state(self, job_id: str, mode: str = "standard") -> str:
        pid, _, began = job_id.partition("-")
        return "RUNNING" if start_of(int(pid)) == int(began) else "ENDED"

    def update(self) -> None:
        """Nothing is kept from call to call."""


class MpirunJob(RunJob):
    """A run on this machine."""

    watcher = Processes()
    _results_timeout_s = 0  # the process has written its result before it ends

    @property
    def pid(self) -> int:
        return int(self.job_id.partition("-")[0])

    def cancel(self, check: bool = True) -> None:
        """Have the run write a checkpoint and leave.

        Args:
            check: wait for it.
        """
        self._signal(signal.SIGTERM)
        if check:
            self.wait()

    def _interrupt(self) -> None:
        """What a time limit does; submitit's name for it."""
        self._signal(signal.SIGUSR2)

    def _signal(self, number: signal.Signals) -> None:
        if self.state == "RUNNING":
            os.kill(self.pid, number)


class MpirunJobEnvironment(JobEnvironment):
    """Where a run on this machine finds itself."""

    @property
    def job_id(self) -> str:
        return f"{os.getpid()}-{start_of(os.getpid())}"

    @property
    def num_tasks(self) -> int:
        return 1

    num_nodes = num_tasks

    @property
    def global_rank(self) -> int:
        return 0

    node = local_rank = global_rank

    def _handle_signals(self, paths: JobPaths, submission: DelayedSubmission) -> None:
        """submitit would swallow SIGTERM as long as there is no launcher."""
        super()._handle_signals(paths, submission)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGALRM, _warn)
        signal.setitimer(signal.ITIMER_REAL, 60 * submission._timeout_min)

    def _requeue(self, countdown: int) -> None:
        """Begin again. SIGUSR2 is ignored until the new program listens."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        sys.stdout.flush()
        sys.stderr.flush()
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _warn(number: int, frame: FrameType | None) -> None:
    signal.raise_signal(signal.SIGUSR2)


class MpirunExecutor(PicklingExecutor):
    """Submits runs to this machine; they begin at once."""

    job_class = MpirunJob

    def __init__(self, folder: str | Path, max_num_timeout: int = REPEATS, max_pickle_size_gb: float = 1.0) -> None:
        super().__init__(folder, max_num_timeout, max_pickle_size_gb)
        self.parameters = {"timeout_min": NO_LIMIT_MIN}

    @classmethod
    def affinity(cls) -> int:
        """There, but taken only if asked for."""
        return 0

    def _internal_update_parameters(self, **kwargs: Any) -> None:
        """`timeout_min`: the run writes a checkpoint and goes on in a new attempt when so many minutes have passed."""
        fixed = {"nodes": 1, "tasks_per_node": 1}
        others = [name for name, value in kwargs.items() if name != "timeout_min" and fixed.get(name) != value]
        if others:
            raise ConfigError(
                "The executor `mpirun` runs on this machine, as one process that starts the ranks; it can do nothing "
                f"with {', '.join(others)}. Ranks are chosen by the config, or by ranks=N of prepare_run; what is for "
                "Slurm only gets the prefix slurm_."
            )
        self.parameters |= {name: value for name, value in kwargs.items() if name == "timeout_min"}

    def _internal_process_submissions(self, delayed_submissions: list[DelayedSubmission]) -> list[Any]:
        for submission in delayed_submissions:
            require_run(submission)
        return super()._internal_process_submissions(delayed_submissions)

    @property
    def _submitit_command_str(self) -> str:
        return shlex.join([sys.executable, "-u", "-m", "submitit.core._submit", str(self.folder)])

    def _num_tasks(self) -> int:
        return 1

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        return SCRIPT.format(command=command, log=shlex.quote(str(self.folder)))

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        return ["bash", str(submission_file_path)]

    @staticmethod
    def _get_job_id_from_submission_command(string: bytes | str) -> str:
        return (string if isinstance(string, str) else string.decode()).strip()
