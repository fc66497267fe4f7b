"""Whether the ranks can use the data that a config names; see `headrace.ranks.preflight`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace.comm.errors import DataError
from headrace.launcher.config import Config, dump
from headrace.launcher.environment import rank_environment
from headrace.launcher.models import write_tiny_tokenizer
from headrace.ranks.config import JobConfig
from headrace.ranks.preflight import check_data

LAST_LINES = 5


def check_data_here(config: Config) -> None:
    """Check in this process, for ranks that will run in it.

    Raises:
        HeadraceError: what is wrong, as a rank would say it.
        Exception: whatever the user's own code raises.
    """
    with _with_tokenizer(config) as job:
        check_data(job)


def check_data_of_ranks(config: Config) -> None:
    """Check in a process with the Python, the environment and the folder of the ranks, so that the same imports work.
    What is in a container is left to the ranks.

    Raises:
        DataError: what is wrong, as a rank would say it; with a traceback if it is the user's own code that failed.
    """
    if config.rollout.engine == "latency" or config.launch.contained:
        return
    python = config.launch.pythons[-1] if config.launch.pythons else sys.executable
    command = [str(python), "-m", "headrace.ranks.preflight"]
    environment = rank_environment(os.environ, 1, "preflight") | config.launch.env
    with _with_tokenizer(config) as job:
        try:
            checked = subprocess.run(
                command,
                input=dump(job),
                env=environment,
                capture_output=True,
                text=True,
                timeout=config.run.wait_limit_s,
            )
        except subprocess.TimeoutExpired:
            raise DataError(
                f"Loading the data takes more than {config.run.wait_limit_s:.0f} s (run.wait_limit_s). Look for what "
                "waits in your environment, or set the limit higher."
            ) from None
    if checked.returncode:
        raise DataError(checked.stdout.strip() or _sudden_end(checked))


def _sudden_end(checked: subprocess.CompletedProcess[str]) -> str:
    """The check died without a word: by a signal, or since this Python has no headrace."""
    number = -checked.returncode
    how = f"by signal {number} ({signal.Signals(number).name})" if number > 0 else f"with status {checked.returncode}"
    last = " ".join(checked.stderr.split("\n")[-LAST_LINES:]).strip()
    return f"Loading the data in {checked.args[0]} ended {how}. Its last words: {last or '(none)'}"


@contextmanager
def _with_tokenizer(config: Config) -> Iterator[JobConfig]:
    """The ranks' config; for a model that is yet to be made, with a folder that has its tokenizer and its config."""
    job = config.job()
    if job.model.tiny is None:
        yield job
        return
    with tempfile.TemporaryDirectory(prefix="headrace-") as folder:
        write_tiny_tokenizer(Path(folder), job.model.tiny)
        model = job.model.model_copy(update={"path": Path(folder), "tiny": None})
        yield job.model_copy(update={"model": model})
