"""Both roles in one process, without MPI: the same loops and services over the simulated network, by turns.

main thread:     trainer's main loop ⇄ generator's main loop      breakpoints work here
courier thread:  trainer's courier ⇄ generator's courier
"""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from headrace.comm.courier import LONGEST_NAP_S
from headrace.comm.simulated import SimulatedNetwork
from headrace.ranks.build import (
    Links,
    Parts,
    build_generator,
    build_trainer,
    launch_of,
    limit_threads,
    load_data,
    start_step_of,
)
from headrace.ranks.config import JobConfig
from headrace.ranks.heartbeat import MainState
from headrace.ranks.run import Rank
from headrace.ranks.topology import plan_roles
from headrace.ranks.trace import traced


def run_debug(config: JobConfig, folder: Path, resume: bool, say: Callable[[str], None] = print) -> bool:
    """Run the job of a config to its end with one trainer and one generator, whatever `ranks` says.

    Returns:
        whether it was asked to stop before.

    Raises:
        HeadraceError: as a rank would.
    """
    run = config.run.model_copy(update={"dir": folder})
    ranks_config = config.ranks.model_copy(update={"generators": 1, "trainers": 1})
    config = config.model_copy(update={"run": run, "ranks": ranks_config})
    network = SimulatedNetwork(2)
    roles = plan_roles([socket.gethostname()] * 2, config.ranks)
    say(roles.describe())
    data = load_data(config)
    start_step = start_step_of(config, resume)
    errors: list[BaseException] = []
    ranks = [
        Rank(
            config,
            folder,
            network.transport(rank),
            roles,
            MainState(),
            start_step,
            launch_of(config, start_step),
            errors.append,
            say,
            heartbeats=False,
        )
        for rank in range(2)
    ]
    if config.rollout.engine != "latency":
        limit_threads(ranks[0])
    generator = build_generator(ranks[1], data, Links())  # first: the trainer waits for what it holds
    parts = [build_trainer(ranks[0], data, Links()), generator]
    attempt = (folder / "latest").resolve().name
    with (
        _stop_on_signals(ranks[0].stop),
        _couriers(parts, errors),
        traced(ranks[0], attempt),
        traced(ranks[1], attempt),
    ):
        _take_turns([part.main() for part in parts], errors)
    return ranks[0].stop.is_set()


@contextmanager
def _stop_on_signals(stop: threading.Event) -> Iterator[None]:
    """Let the first Ctrl-C or SIGTERM ask for an end with a checkpoint; the second interrupts."""

    def ask(number: int, _: FrameType | None) -> None:
        stop.set()
        signal.signal(number, signal.default_int_handler)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _couriers:  # noqa: N801 - reads as a function where it is used
    """Pumps all couriers in one thread while the block runs."""

    def __init__(self, parts: list[Parts], errors: list[BaseException]) -> None:
        self._parts = parts
        self._errors = errors
        self._leaving = False
        self._thread = threading.Thread(target=self._pump, name="couriers", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *exception: object) -> None:
        self._leaving = True
        self._thread.join()

    def _pump(self) -> None:
        try:
            while True:
                if not sum(part.courier.pump() for part in self._parts):
                    if self._leaving:
                        return
                    time.sleep(LONGEST_NAP_S / 10)
        except BaseException as error:
            self._errors.append(error)


def _take_turns(loops: list[Iterator[None]], errors: list[BaseException]) -> None:
    """Let every loop go on until it has nothing to do, again and again, until all have ended."""
    running = list(loops)
    while running:
        for loop in list(running):
            if next(loop, _ENDED) is _ENDED:
                running.remove(loop)
        if errors:
            raise errors[0]
        time.sleep(0.001)


_ENDED = object()
