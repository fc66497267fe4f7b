"""Keeps a job going: starts it, and starts it again when a rank or a node has died.

┌─▶ begin ──▶ ranks at work ──▶ done, asked to stop, a mistake ──▶ told, status
│                  │
│                  ▼ a rank or a node died: at most `launch.relaunches` times
└── nodes that don't answer left out, spare ones taken in, else fewer generators; from the last checkpoint
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.comm.errors import ConfigError, HeadraceError
from headrace.launcher.config import Config
from headrace.launcher.crew import Crew, seating
from headrace.launcher.metrics import MetricsTail
from headrace.launcher.models import make_tiny_model
from headrace.launcher.plots import learning_curve
from headrace.launcher.record import Ended, record_end, record_job, record_launcher
from headrace.launcher.repair import losses
from headrace.launcher.run import STOPPED, Job, Order, Outcome
from headrace.launcher.runfolder import (
    INITIAL_MODEL,
    Attempt,
    begin_again,
    begin_attempt,
    damaged_checkpoints,
    steps_done,
    write_job,
    writing,
)
from headrace.launcher.stop import StopRequest
from headrace.launcher.view import View, make_view

CROWD = 4
"""Ranks per core that go without a warning."""

BARE_RANK = 28 << 20
"""Bytes of memory that a rank takes before it holds any model."""


def supervise(config: Config, crew: Crew, stop: StopRequest, program: Sequence[str], lock: int) -> int:
    """Run a job that has been checked, in a run folder that this process holds, to its end.

    Args:
        lock: the descriptor that holds the folder.

    Returns:
        the exit status.

    Raises:
        Stopped: before the first rank was started.
    """
    if crew.allocation is not None:
        with writing(config.run.folder):
            record_job(config.run.folder, crew.allocation.job)
    died_at = None
    for left in range(config.launch.relaunches, -1, -1):
        ready, attempt, done = begin(config)
        stop.raises = False
        outcome = _run(ready, attempt, done, crew, stop, program, lock, died_at)
        _tell_end(attempt, outcome)
        if not outcome.accident or not left or stop.signum is not None:
            break
        died_at = outcome.failed_at
        found = crew.drop_lost(config)
        if found is None:
            print(f"headrace: too few nodes are left; {told_stop(STOPPED, steps_done(attempt.run))}", file=sys.stderr)
            return STOPPED
        config, changed = found
        print(f"starting again{f' {changed}' if changed else ''}, {left} of {config.launch.relaunches} times left")
    return outcome.status


def begin(config: Config) -> tuple[Config, Attempt, int]:
    """Make the next attempt in a run folder that this process holds.

    Returns:
        the config with the model's folder in it, the attempt, and the step of the checkpoint to go on from; 0 where
        the run begins.
    """
    attempt = begin_attempt(config)
    with writing(attempt.run):
        record_launcher(attempt.folder)
    done = steps_done(attempt.run)
    for folder in damaged_checkpoints(attempt.run):
        print(f"the checkpoint {folder} isn't whole and is passed over: its marker or a file is missing or damaged")
    if attempt.number > 1 and not done:
        print("no checkpoint was written yet: starting from the beginning")
        begin_again(attempt)
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


def check_memory(ranks: int, memory: int) -> None:
    """Refuse what would only wake the kernel's hunt for memory, which may end other programs than this job.

    Raises:
        ConfigError: so many ranks can't fit into the memory of this machine, in bytes.
    """
    if ranks * BARE_RANK > memory:
        raise ConfigError(
            f"{ranks} ranks don't fit into the {memory / 2**30:.0f} GiB of memory here: each takes {BARE_RANK >> 20} "
            "MiB before it holds any model. Choose fewer by -n, ranks.trainers and ranks.generators."
        )


def crowded(ranks: int, cores: int) -> str | None:
    """A warning if so many ranks share so few cores that they may hardly move; None if not."""
    if ranks <= CROWD * cores:
        return None
    return (
        f"warning: {ranks} ranks share {cores} cores. Each is a process with a model of its own: memory may run out, "
        "and waits may reach their limits. Fewer are chosen by -n, ranks.trainers and ranks.generators."
    )


def _run(
    config: Config,
    attempt: Attempt,
    done: int,
    crew: Crew,
    stop: StopRequest,
    program: Sequence[str],
    lock: int,
    died_at: float | None,
) -> Outcome:
    """One attempt; `died_at` is when the one before failed, if it did, by the monotonic clock."""
    starter = crew.starter()
    ranks, cores = config.ranks.trainers + config.ranks.generators, len(os.sched_getaffinity(0))
    options = ["--attempt", str(attempt.number), "--ranks", str(ranks), *(["--resume"] if done else [])]
    options += ["--repair"] if config.launch.repair else []
    order = Order(
        starter=starter,
        ranks=ranks,
        program=[*config.launch.wrap, config.launch.starting_python, *program, str(attempt.job_file), *options],
        environ=os.environ,
        extra=seating(config, crew, ranks) | config.launch.env,
        threads=config.ranks.threads or (max(1, cores // ranks) if starter.one_host else config.launch.cpus_per_rank),
        start_within_s=config.run.wait_limit_s,
        stop_within_s=config.launch.stop_within_s,
        kill_after_s=config.launch.kill_after_s,
        lock=lock,
        repair_within_s=config.run.wait_limit_s if config.launch.repair else None,
    )
    with make_view(attempt.run, config.run.steps, done) as view:
        view.line(f"run folder {attempt.run}, {ranks} ranks by {starter.describe()}")
        if starter.one_host and (warning := crowded(ranks, cores)):
            view.line(warning)
        outcome = Job(order, attempt, stop, view.line, _ticks(view, attempt, done, died_at)).run()
    record_end(attempt.folder, Ended(outcome.status, outcome.failure.cause if outcome.failure else None))
    return outcome


def _ticks(view: View, attempt: Attempt, done: int, died_at: float | None) -> Callable[[], None]:
    """What is done several times a second."""
    return (
        view.tick if died_at is None else Recovery(view, MetricsTail(attempt.run / "metrics.jsonl", done), died_at).tick
    )


@dataclass
class Recovery:
    """Says how long it took from a death to the next trained step."""

    view: View
    tail: MetricsTail
    died_at: float | None

    def tick(self) -> None:
        self.view.tick()
        if self.died_at is not None and (rows := self.tail.new_rows()):
            took = time.monotonic() - self.died_at
            self.died_at = None
            self.view.line(f"step {rows[0]['step']} was trained {took:.0f} s after the failure")


def _tell_end(attempt: Attempt, outcome: Outcome) -> None:
    if outcome.status == 0 or outcome.status == STOPPED:
        draw(attempt.run)
        for line in losses(attempt):
            print(f"headrace: {line}")
    if outcome.failure is not None:
        print(outcome.failure, file=sys.stderr)
    elif outcome.status != 0:
        print(f"headrace: {told_stop(outcome.status, steps_done(attempt.run))}", file=sys.stderr)


def told_stop(status: int, done: int) -> str:
    """What was left by a job that was asked to stop, and what --resume makes of it."""
    if not done:
        return "stopped before the first checkpoint; --resume begins the run again."
    if status == STOPPED:
        return f"stopped after the checkpoint of step {done}; go on by --resume."
    return f"stopped; --resume goes on from the last checkpoint, of step {done}."


def draw(run: Path) -> None:
    """Draw what the job has learned; its status doesn't depend on whether there is space for a picture."""
    try:
        picture = learning_curve(run)
    except HeadraceError as error:
        print(f"headrace: {error}", file=sys.stderr)
        return
    if picture is not None:
        print(f"learning curve: {picture}")
