"""The courier: the one thread of a rank that talks to the network.

    main thread ── submit(command) / call(command) ──▶ courier ── service.receive / service.tick ──▶ transport.send
         ▲                                                │
         └──── queues of the services, and `news` ◀───────┘

The main thread owns torch and the device; the courier owns MPI, the ledger, the exchange and the background weight
channel. So a trainer grants tickets in the middle of a long optimizer step, and a generator serves pulls during an
engine step. Between polls the courier sleeps, 20 µs at first and up to 20 ms when nothing happens for long, so that
idle ranks leave the cores alone: what an idle rank costs is the number of times it wakes.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from enum import IntEnum
from typing import TypeVar

from headrace.comm.errors import WaitLimitError
from headrace.comm.messages import Message
from headrace.comm.service import Service
from headrace.comm.transport import Received, Transport

SHORTEST_NAP_S = 20e-6
LONGEST_NAP_S = 20e-3
NAP_SHARE = 0.25
"""Of the time that nothing has happened for: an answer is noticed a quarter later than it could be, at most."""

T = TypeVar("T")


class Turn(IntEnum):
    """What happened in a turn."""

    IDLE = 0
    PENDING = 1
    """Nothing, but messages are on their way."""
    BUSY = 2


class Courier:
    """Runs the services of one rank over its transport."""

    def __init__(
        self,
        transport: Transport,
        services: Sequence[Service],
        on_error: Callable[[BaseException], None],
        early: Sequence[Received] = (),
    ) -> None:
        """`early` are messages that came in before there was a courier."""
        self.transport = transport
        self.news = threading.Event()
        """Set whenever messages have come in and were dealt with; a main thread that has nothing to do waits for it."""
        self._early = list(early)
        self._services = list(services)
        self._routes: dict[type[Message], Service] = {}
        for service in services:
            for kind in service.handles:
                if kind in self._routes:
                    raise ValueError(f"two services handle {kind.__name__}")
                self._routes[kind] = service
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake = threading.Event()  # SimpleQueue.get with a time-out may wait for ever in Python 3.11
        self._leaving = threading.Event()
        self._on_error = on_error
        transport.wake = self._wake.set
        self._thread = threading.Thread(target=self._run, name="courier", daemon=True)

    def submit(self, command: Callable[[], None]) -> None:
        """Have the courier run a command soon; from any thread."""
        self._commands.put(command)
        self._wake.set()

    def call(self, command: Callable[[], T], limit_s: float) -> T:
        """Have the courier run a command and wait for its result.

        Raises:
            WaitLimitError: it didn't come within the limit.
        """
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(command())
            except BaseException as error:
                future.set_exception(error)

        self.submit(run)
        try:
            return future.result(limit_s)
        except TimeoutError:
            raise WaitLimitError(
                f"The courier of rank {self.transport.rank} didn't answer for {limit_s:.0f} s."
            ) from None

    def start(self) -> None:
        self._thread.start()

    def stop(self, limit_s: float) -> None:
        """End the thread once all that was submitted is done and all messages have left.

        Raises:
            WaitLimitError: that took longer than the limit.
        """
        self._leaving.set()
        self._wake.set()
        self._thread.join(limit_s)
        if self._thread.is_alive():
            raise WaitLimitError(f"The courier of rank {self.transport.rank} didn't finish within {limit_s:.0f} s.")

    def pump(self) -> Turn:
        """One turn: commands, messages, ticks."""
        busy = self._run_commands()
        now = time.monotonic()
        arrived, self._early = self._early + self.transport.poll(), []
        for received in arrived:
            self._routes[type(received.message)].receive(received, now)
            busy = True
        for service in self._services:
            service.tick(now)
        if arrived:
            self.news.set()
        if busy:
            return Turn.BUSY
        return Turn.PENDING if self.transport.pending else Turn.IDLE

    def _run_commands(self) -> bool:
        ran = False
        while not self._commands.empty():
            self._commands.get()()
            ran = True
        return ran

    def _run(self) -> None:
        busy_at = time.monotonic()
        try:
            while True:
                leaving = self._leaving.is_set()  # read first: what was submitted before it was set is done then
                turn = self.pump()
                if leaving and turn is Turn.IDLE:
                    return
                now = time.monotonic()
                if turn is not Turn.IDLE:
                    busy_at = now
                if turn is Turn.BUSY:
                    continue  # what a transfer waits for may have arrived while the last one was dealt with
                nap = (now - busy_at) * NAP_SHARE
                if self._wake.wait(min(max(nap, SHORTEST_NAP_S), LONGEST_NAP_S)):
                    self._wake.clear()
        except BaseException as error:
            self._on_error(error)
