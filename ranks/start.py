"""The start of a rank under MPI, from the command line to its main loop, and its end.

    python -m headrace.ranks CONFIG --attempt K [--resume] --ranks N      (what the launcher has mpirun start)

1. Config read; reward server forked, before MPI is initialised; log, pid file; MPI checked: thread level, size of the
   world.
2. Data and tokenizer loaded; `startup.meet`: hosts and facts compared, roles planned, role map printed.
3. Process groups from stores with ports of their own; services; courier started; engine made; main loop.
4. The cascade of `ranks.shutdown`; last barrier; MPI finalized.

With `--repair` the job goes on without a generator that has died (see `ranks.living`). MPI can't be finalized after
that, and mpirun's status says nothing: the last barrier is one of messages, trainer 0 leaves the status in a file of
the attempt, and every rank ends at once.

The main thread calls MPI only before the courier has started and after it has ended.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import yaml
from pydantic import ValidationError

from headrace.comm.errors import ConfigError, HeadraceError, PeerLostError, WaitLimitError
from headrace.comm.messages import Hello
from headrace.comm.mpi import MpiTransport, check_survival, check_threads, check_world
from headrace.ranks.build import build_generator, build_trainer, launch_of, link, load_data, start_step_of
from headrace.ranks.config import JobConfig
from headrace.ranks.failure import Failure, announce, arrive, open_log
from headrace.ranks.farewell import LOSSES, add_line, leave_without_mpi
from headrace.ranks.heartbeat import LEAVING, MainState
from headrace.ranks.lifeline import Lifeline
from headrace.ranks.run import Rank, run_main
from headrace.ranks.seat import ROLE
from headrace.ranks.startup import meet
from headrace.ranks.topology import RoleMap, number_ranges, plan_roles
from headrace.ranks.trace import traced

if TYPE_CHECKING:
    from mpi4py import MPI

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)
STOPPED = 75
"""Exit status of a job that was asked to stop and left a checkpoint (EX_TEMPFAIL: try again later)."""

POLL_S = 0.002
LEAVE_LIMIT_S = 60.0
"""Longest time for the last messages and the last barrier."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one rank to its end. Never returns normally when something failed: the whole job is aborted then."""
    options = _options(arguments)
    try:
        config = read_config(options.config)
    except ConfigError as error:
        sys.exit(str(error))
    attempt = config.run.folder / f"attempt_{options.attempt:02d}"
    arrive(attempt, os.environ)
    if config.rollout.engine != "latency":
        from headrace.rollout.rewards import start_reward_server

        start_reward_server()
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    fail = Failure(attempt, world.Get_rank(), world.Abort)
    try:
        attempt.mkdir(parents=True, exist_ok=True)
        fail.terminal = terminal = open_log(attempt, world.Get_rank())
        fail.quoted = announce(attempt, world.Get_rank(), os.environ)
        fail.lifeline = Lifeline(attempt, world.Get_rank())
        fail.watch_threads()
        check_threads()
        check_world(world, options.ranks)
        if options.repair:
            check_survival()
        stop = _stop_on_signals()
        comm, request = world.Idup()
        _complete(request, config.run.wait_limit_s, "Other ranks haven't started MPI")
        transport = MpiTransport(comm, survives=options.repair)
        _run(comm, transport, config, options.resume, fail, terminal.write, stop)
        if options.repair:
            leave_without_mpi(comm, transport, attempt, STOPPED if stop.is_set() else 0, LEAVE_LIMIT_S)
        _leave(comm)
    except BaseException as error:
        fail(error)
    if stop.is_set():
        sys.exit(STOPPED)


def _stop_on_signals() -> threading.Event:
    """Let the signals of schedulers and launchers ask for an end of the run instead of killing the rank."""
    stop = threading.Event()
    for number in STOP_SIGNALS:
        signal.signal(number, lambda *_: stop.set())
    return stop


def read_config(path: Path) -> JobConfig:
    """The resolved config that the launcher wrote, or one of a user who starts the ranks by hand.

    Raises:
        ConfigError: it isn't there, or no config; `headrace config` tells more kindly what is wrong with its keys.
    """
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
        if not isinstance(tree, dict):
            raise ConfigError(f"{path} holds no config, which has sections such as `run:` and `model:`.")
        return JobConfig.model_validate({key: value for key, value in tree.items() if key != "launch"})
    except OSError as error:
        raise ConfigError(f"The config {path} can't be read: {error.strerror} (seen from {Path.cwd()}).") from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} isn't YAML: {' '.join(str(error).split())}.") from None
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        raise ConfigError(f"{path}: {wrong}. `headrace config {path}` says more.") from None


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m headrace.ranks")
    parser.add_argument("config", type=Path)
    parser.add_argument("--attempt", type=int, default=0)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--ranks", type=int, default=None)
    parser.add_argument("--repair", action="store_true")
    return parser.parse_args(arguments)


def _run(
    comm: MPI.Comm,
    transport: MpiTransport,
    config: JobConfig,
    resume: bool,
    fail: Failure,
    write: Callable[[str], int],
    stop: threading.Event,
) -> None:
    rank = comm.Get_rank()
    data = load_data(config)
    cores = number_ranges(sorted(os.sched_getaffinity(0)))
    hello = Hello(socket.gethostname(), _facts(config) | data.facts, cores)
    start_step = start_step_of(config, resume)
    welcome, early = meet(transport, hello, start_step, launch_of(config, start_step), config.run.wait_limit_s)
    roles = plan_roles(welcome.hosts, config.ranks)
    _check_seat(roles, rank)

    def say(text: str) -> None:
        write(text + "\n")

    if rank == 0:
        say(roles.describe(welcome.cores))
    shared = Rank(
        config=config,
        folder=config.run.folder,
        transport=transport,
        roles=roles,
        main=MainState(),
        start_step=welcome.start_step,
        launch=welcome.launch,
        on_error=fail,
        say=say,
        early=early,
        stop=stop,
        repairs=transport.survives,
        record_loss=lambda line: add_line(fail.folder / LOSSES, line),
    )
    build = build_trainer if roles.role(rank) == "trainer" else build_generator
    parts = build(shared, data, link(shared, comm))
    transport.on_lost = shared.living.lose
    parts.courier.start()
    with traced(shared, fail.folder.name):
        run_main(parts.main(), parts.wait)
        shared.main.set(LEAVING)
    parts.courier.stop(LEAVE_LIMIT_S)


def _facts(config: JobConfig) -> dict[str, str]:
    """What must be the same on every rank; of the software just headrace where every role has a Python of its own."""
    names = ["headrace"] if ROLE in os.environ else ["headrace", "numpy", "mpi4py"]
    facts = {"config": config.model_dump_json()} | {name: importlib.metadata.version(name) for name in names}
    return facts if ROLE in os.environ else facts | {"python": platform.python_version()}


def _check_seat(roles: RoleMap, rank: int) -> None:
    """
    Raises:
        HeadraceError: the ranks aren't placed as the launcher thought, so that this one runs in the wrong Python.
    """
    seat = os.environ.get(ROLE)
    if seat not in (None, roles.role(rank)):
        raise HeadraceError(
            f"{roles.name(rank)} runs in the Python of a {seat}: the hosts got other ranks than the launcher expected. "
            "With launch.python by role, leave the placement of ranks to it (no such options in launch.srun_options)."
        )


def _leave(comm: MPI.Comm) -> None:
    """Meet all ranks once more, so that nobody closes MPI while another still sends; then leave."""
    _complete(comm.Ibarrier(), LEAVE_LIMIT_S, "Other ranks haven't reached the end of the job")
    from mpi4py import MPI

    MPI.Finalize()


def _complete(request: MPI.Request, limit_s: float, complaint: str) -> None:
    """Wait for a collective of all ranks, within a limit."""
    deadline = time.monotonic() + limit_s
    while not _test(request):
        if time.monotonic() > deadline:
            raise WaitLimitError(f"{complaint} within {limit_s:.0f} s; look at the ends of their logs.")
        time.sleep(POLL_S)


def _test(request: MPI.Request) -> bool:
    from mpi4py import MPI

    try:
        return request.Test()
    except MPI.Exception as error:
        if error.Get_error_class() != MPI.ERR_PROC_FAILED:
            raise
        raise PeerLostError("A rank has died at the start of the job; the end of its log may say why.") from error
