"""`headrace run` and `headrace debug`: from a config to a job that has ended."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from headrace.comm.errors import ConfigError, DataError, HeadraceError
from headrace.launcher.check_data import check_data_here, check_data_of_ranks
from headrace.launcher.check_model import check_model_folder
from headrace.launcher.config import Config
from headrace.launcher.environment import clean
from headrace.launcher.metrics import read_rows
from headrace.launcher.models import make_tiny_model
from headrace.launcher.mpi import choose_mpi
from headrace.launcher.plots import learning_curve
from headrace.launcher.record import Ended, record_end, record_launcher
from headrace.launcher.run import STOPPED, Job, Order, Outcome
from headrace.launcher.runfolder import (
    INITIAL_MODEL,
    Attempt,
    begin_again,
    begin_attempt,
    check_new,
    check_resume,
    fresh_config,
    held,
    steps_done,
    write_job,
    writing,
)
from headrace.launcher.view import PlainView, make_view, ticking

CROWD = 4
"""Ranks per core that go without a warning."""

RANK_PROGRAM = ("-m", "headrace.ranks")


def with_ranks(config: Config, ranks: int | None) -> Config:
    """The config for a job of `ranks` ranks: trainers as configured, the rest generates.

    Raises:
        ConfigError: nobody would be left to generate.
    """
    if ranks is None:
        return config
    trainers = config.ranks.trainers
    if ranks <= trainers:
        raise ConfigError(
            f"-n {ranks} leaves no rank to generate: ranks.trainers is {trainers}, and the rest generates. "
            f"Give -n {trainers + 1} or more, or set ranks.trainers lower."
        )
    return config.model_copy(update={"ranks": config.ranks.model_copy(update={"generators": ranks - trainers})})


def crowded(ranks: int, cores: int) -> str | None:
    """A warning if so many ranks share so few cores that they may hardly move; None if not."""
    if ranks <= CROWD * cores:
        return None
    return (
        f"warning: {ranks} ranks share {cores} cores. Each is a process with a model of its own: memory may run out, "
        "and waits may reach their limits. Fewer are chosen by -n, ranks.trainers and ranks.generators."
    )


def run_job(config: Config, resume: bool, fresh: bool, program: Sequence[str] = RANK_PROGRAM) -> int:
    """Start the ranks, show what they do, and return the exit status.

    Args:
        program: what the ranks' Python runs; it gets the job file and the options of `headrace.ranks`.
    """
    installation = choose_mpi(config.launch.mpi, clean(os.environ))
    if resume and is_finished(config):
        print(
            f"The run in {config.run.folder} is finished: its {config.run.steps} steps are done. Set run.steps higher."
        )
        return 0
    with ExitStack() as stack:
        config, attempt, done = _prepare(config, resume, fresh, check_data_of_ranks, stack)
        view = stack.enter_context(make_view(attempt.run, config.run.steps, done))
        ranks = config.ranks.trainers + config.ranks.generators
        python = config.launch.python or Path(sys.executable)
        options = ["--attempt", str(attempt.number), "--ranks", str(ranks), *(["--resume"] if done else [])]
        order = Order(
            installation=installation,
            ranks=ranks,
            program=[str(python), *program, str(attempt.job_file), *options],
            environ=os.environ,
            extra=config.launch.env,
            threads=config.ranks.threads or max(1, len(os.sched_getaffinity(0)) // ranks),
            stop_within_s=config.launch.stop_within_s,
            kill_after_s=config.launch.kill_after_s,
        )
        view.line(f"run folder {attempt.run}, {ranks} ranks by {installation.describe()}")
        if warning := crowded(ranks, len(os.sched_getaffinity(0))):
            view.line(warning)
        outcome = Job(order, attempt, view.line, view.tick).run()
        record_end(attempt.folder, Ended(outcome.status, outcome.failure.cause if outcome.failure else None))
    _tell_end(attempt, outcome)
    return outcome.status


def debug_job(config: Config, resume: bool, fresh: bool) -> int:
    """Run one generator and one trainer by turns in this process, without MPI; returns the exit status."""
    from headrace.ranks.debug import run_debug

    sys.path.insert(0, os.getcwd())  # as in ranks, which `python -m` starts
    with ExitStack() as stack:
        config, attempt, done = _prepare(config, resume, fresh, check_data_here, stack)
        view = stack.enter_context(PlainView(attempt.run, config.run.steps, done))
        stack.enter_context(ticking(view))
        view.line(f"run folder {attempt.run}, both roles in this process")
        stopped = run_debug(config.job(), attempt.run, done > 0, view.line)
    record_end(attempt.folder, Ended(STOPPED if stopped else 0, None))
    _draw(attempt.run)
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
    python = config.launch.python
    if python is not None and not os.access(python, os.X_OK):
        raise ConfigError(f"launch.python: {python} isn't a program that can be started.")


def is_finished(config: Config) -> bool:
    """Whether nothing is left to train, nor to evaluate."""
    evaluations = read_rows(config.run.folder / "evaluations.jsonl")
    evaluated = {row["version"] for row in evaluations if row["label"] == "after"}
    steps = config.run.steps
    return steps_done(config.run.folder) == steps and (not config.eval.tasks or steps in evaluated)


def _prepare(
    config: Config, resume: bool, fresh: bool, check_data: Callable[[Config], None], stack: ExitStack
) -> tuple[Config, Attempt, int]:
    """Everything before the first rank: inputs checked, run folder made and held by `stack`, the initial model there.

    Returns the config with the model's folder in it, the attempt, and the step of the checkpoint to go on from; 0 where
    the run begins.
    """
    if resume and fresh:
        raise ConfigError("--resume goes on with a run, --fresh begins another one: give one of them.")
    check_inputs(config)
    config = fresh_config(config) if fresh else config
    changes = []
    if resume:
        changes = check_resume(config)
    else:
        check_new(config)
    check_data(config)
    stack.enter_context(held(config.run.folder))
    attempt = begin_attempt(config)
    with writing(attempt.run):
        record_launcher(attempt.folder)
    done = steps_done(attempt.run)
    if attempt.number > 1 and not done:
        print("no checkpoint was written yet: starting from the beginning")
        begin_again(attempt)
    for change in changes:
        print(f"changed since the last attempt: {change}")
    config = _with_initial_model(config, attempt.run)
    write_job(attempt, config)
    return config, attempt, done


def _with_initial_model(config: Config, run: Path) -> Config:
    """`model.tiny` made and put into `model.path`, so that ranks only ever load a folder."""
    if config.model.tiny is None:
        return config
    folder = run / INITIAL_MODEL
    make_tiny_model(folder, config.model.tiny, config.run.seed)
    return config.model_copy(update={"model": config.model.model_copy(update={"path": folder, "tiny": None})})


def _tell_end(attempt: Attempt, outcome: Outcome) -> None:
    if outcome.status == 0 or outcome.status == STOPPED:
        _draw(attempt.run)
    if outcome.failure is not None:
        print(outcome.failure, file=sys.stderr)
    elif outcome.status != 0:
        print(f"headrace: {_stopped(outcome.status, steps_done(attempt.run))}", file=sys.stderr)


def _stopped(status: int, done: int) -> str:
    """What was left by a job that was asked to stop, and what --resume makes of it."""
    if not done:
        return "stopped before the first checkpoint; --resume begins the run again."
    if status == STOPPED:
        return f"stopped after the checkpoint of step {done}; go on by --resume."
    return f"stopped; --resume goes on from the last checkpoint, of step {done}."


def _draw(run: Path) -> None:
    """Draw what the job has learned; its status doesn't depend on whether there is space for a picture."""
    try:
        picture = learning_curve(run)
    except HeadraceError as error:
        print(f"headrace: {error}", file=sys.stderr)
        return
    if picture is not None:
        print(f"learning curve: {picture}")
