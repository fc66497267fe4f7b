"""`headrace run` and `headrace debug`: from a config to a job that has ended."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from headrace.comm.errors import ConfigError, DataError
from headrace.launcher.check_data import check_data_here, check_data_of_ranks
from headrace.launcher.check_model import check_model_folder
from headrace.launcher.config import Config
from headrace.launcher.crew import Crew
from headrace.launcher.lock import held
from headrace.launcher.metrics import read_rows
from headrace.launcher.record import Ended, record_end
from headrace.launcher.run import STOPPED
from headrace.launcher.runfolder import check_new, check_resume, claim_fresh, steps_done
from headrace.launcher.stop import Stopped, StopRequest
from headrace.launcher.supervise import begin, check_memory, draw, supervise, told_stop
from headrace.launcher.view import PlainView, ticking

RANK_PROGRAM = ("-m", "headrace.ranks")


def run_job(config: Config, resume: bool, fresh: bool, program: Sequence[str] = RANK_PROGRAM) -> int:
    """Start the ranks, show what they do, and return the exit status.

    Args:
        program: what the ranks' Python runs; it gets the job file and the options of `headrace.ranks`.
    """
    with StopRequest() as stop:
        return run_until(stop, config, resume, fresh, program)


def run_until(
    stop: StopRequest, config: Config, resume: bool, fresh: bool, program: Sequence[str] = RANK_PROGRAM
) -> int:
    """`run_job` for a caller that listens for signals itself and wants to know afterwards which one came."""
    with ExitStack() as stack:
        try:
            if resume and is_finished(config):
                print(f"The run in {config.run.folder} is finished: its {config.run.steps} steps are done.")
                print("Set run.steps higher to go on with it.")
                return 0
            crew = Crew(config.launch, os.environ)
            if crew.allocation is None:
                check_memory(config.ranks.trainers + config.ranks.generators, memory_here())
            config, lock = prepare(config, resume, fresh, check_data_of_ranks, stack)
            return supervise(config, crew, stop, program, lock)
        except Stopped:
            return _stopped_early(stop, 0 if fresh else steps_done(config.run.folder))


def memory_here() -> int:
    """Memory of this machine, in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _stopped_early(stop: StopRequest, done: int) -> int:
    assert stop.signum is not None
    status = 128 + stop.signum
    print(f"headrace: {told_stop(status, done)}", file=sys.stderr)
    return status


def debug_job(config: Config, resume: bool, fresh: bool) -> int:
    """Run one generator and one trainer by turns in this process, without MPI; returns the exit status."""
    from headrace.ranks.debug import run_debug

    sys.path.insert(0, os.getcwd())  # as in ranks, which `python -m` starts
    with ExitStack() as stack:
        config, _ = prepare(config, resume, fresh, check_data_here, stack)
        config, attempt, done = begin(config)
        view = stack.enter_context(PlainView(attempt.run, config.run.steps, done))
        stack.enter_context(ticking(view))
        view.line(f"run folder {attempt.run}, both roles in this process")
        stopped = run_debug(config.job(), attempt.run, done > 0, view.line)
    record_end(attempt.folder, Ended(STOPPED if stopped else 0, None))
    draw(attempt.run)
    return STOPPED if stopped else 0


def check_inputs(config: Config) -> None:
    """
    Raises:
        HeadraceError: a file or folder that the config names isn't there or can't be used.
    """
    if config.model.path is not None:
        check_model_folder(config.model.path)
    warm_start = config.train.warm_start
    files = {"data.file": config.data.file, "train.warm_start.file": warm_start.file if warm_start else None}
    for key, file in files.items():
        if file is not None and not file.is_file():
            raise DataError(f"{key}: there is no file {file} (seen from {Path.cwd()}).")
    for python in [] if config.launch.contained else config.launch.pythons:
        if not os.access(python, os.X_OK):
            raise ConfigError(f"launch.python: {python} isn't a program that can be started.")


def is_finished(config: Config) -> bool:
    """Whether nothing is left to train, nor to evaluate."""
    evaluations = read_rows(config.run.folder / "evaluations.jsonl")
    evaluated = {row["version"] for row in evaluations if row["label"] == "after"}
    steps = config.run.steps
    return steps_done(config.run.folder) == steps and (not config.eval.tasks or steps in evaluated)


def prepare(
    config: Config, resume: bool, fresh: bool, check_data: Callable[[Config], None], stack: ExitStack
) -> tuple[Config, int]:
    """Everything before the first attempt: inputs checked, run folder chosen and held by `stack`.

    Returns:
        the config with that folder in it, and the descriptor that holds the lock.
    """
    if resume and fresh:
        raise ConfigError("--resume goes on with a run, --fresh begins another one: give one of them.")
    check_inputs(config)
    check_folder = _check_none if fresh else check_resume if resume else check_new
    check_folder(config)  # at once, since the data may take long
    check_data(config)
    config = claim_fresh(config) if fresh else config
    lock = stack.enter_context(held(config.run.folder, config.launch.stop_within_s))
    for change in check_folder(config) or ():  # again: until now another job may have run there
        print(f"changed since the last attempt: {change}")
    return config, lock


def _check_none(config: Config) -> None:
    """What `--fresh` takes is new."""
