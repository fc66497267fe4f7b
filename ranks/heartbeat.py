"""Heartbeats: every rank tells the next one in the ring what its main thread is doing, and for how long.

rank r ── Heartbeat(state, age, version) every heartbeat_s ──▶ rank r+1
a generator silent for reissue_after_s → Silence(r) to all trainers: its tickets go to others
                        … heard again  → Silence(r, over): it may have new ones
silent for silence_limit_s             → PeerLostError names rank r: the job ends
rank r is dead, and done without       → the ring closes behind it: its watcher watches the rank before it
own main thread in one state too long  → its stacks are written to the log: the job ends

Time in which the watcher itself stood still counts for nothing: what was sent meanwhile is still to be read.
"""

from __future__ import annotations

import faulthandler
import sys
import time
from collections.abc import Callable
from typing import ClassVar

from headrace.comm.errors import PeerLostError, WaitLimitError
from headrace.comm.messages import Heartbeat, Message, Silence
from headrace.comm.transport import Received, Transport
from headrace.ranks.living import Living
from headrace.ranks.topology import RoleMap

LEAVING = "leaving"
STALL_FACTOR = 2.0
"""A main thread that stays in one state for this many wait limits hangs: its own waits would have ended it before."""


class MainState:
    """What the main thread is doing; written by it, read by the courier."""

    def __init__(self, state: str = "starting") -> None:
        self._entry = (state, time.monotonic())
        self._begun = self._entry[1]
        self.version = -1
        self.on_end: Callable[[str, float, float], None] | None = None
        """Gets every state that has ended, and when it began and ended, by the monotonic clock."""

    def set(self, state: str) -> None:
        """Name what begins now. Naming the same state again says that it goes on well."""
        now = time.monotonic()
        before, self._entry = self._entry[0], (state, now)
        if state != before:
            if self.on_end is not None:
                self.on_end(before, self._begun, now)
            self._begun = now

    def read(self, now: float) -> tuple[str, float]:
        """(state, age in seconds)."""
        state, since = self._entry
        return state, max(0.0, now - since)


class Heartbeats:
    """The heartbeat of one rank, and its watch over the rank before it."""

    handles: ClassVar[tuple[type[Message], ...]] = (Heartbeat,)

    def __init__(
        self,
        transport: Transport,
        roles: RoleMap,
        living: Living,
        main: MainState,
        every_s: float,
        reissue_s: float,
        silence_s: float,
        wait_limit_s: float,
    ) -> None:
        self._transport = transport
        self._roles = roles
        self._main = main
        self._every = every_s
        self._reissue = reissue_s
        self._silence = silence_s
        self._stall = STALL_FACTOR * wait_limit_s
        self._living = living
        self._watched = self._neighbour(-1)
        self._heard: float | None = None
        self._last: Heartbeat | None = None
        self._presumed_lost = False
        self._unsure = False
        """A watcher that has died may have taken the watched one for lost."""
        self._ticked: float | None = None
        self._next = 0.0
        self._left = False
        living.on_loss.append(self._close_ring)

    def receive(self, received: Received, now: float) -> None:
        assert isinstance(received.message, Heartbeat)
        if received.source != self._watched:  # it knows of a death that this rank will hear of
            return
        self._heard, self._last = now, received.message
        if self._presumed_lost or self._unsure:
            self._report(over=True)

    def tick(self, now: float) -> None:
        self._pass_over_own_stop(now)
        if self._left:
            return
        if now >= self._next or self._main.read(now)[0] == LEAVING:
            self._beat(now)
        self._check(now)

    def _pass_over_own_stop(self, now: float) -> None:
        if self._heard is None or self._ticked is None:
            self._heard = now
        elif now - self._ticked > self._every:
            self._heard = min(now, self._heard + now - self._ticked)
        self._ticked = now

    def _beat(self, now: float) -> None:
        state, age = self._main.read(now)
        if age > self._stall:
            faulthandler.dump_traceback(file=sys.stderr)
            name = self._roles.name(self._transport.rank)
            raise WaitLimitError(
                f"The main thread of {name} has been in '{state}' for {age:.0f} s; its stacks are in its log."
            )
        self._transport.send(self._neighbour(1), Heartbeat(state, age, self._main.version))
        self._next = now + self._every
        self._left = state == LEAVING

    def _neighbour(self, direction: int) -> int:
        """The next living rank of the ring."""
        rank = self._transport.rank + direction
        while rank % self._transport.size in self._living.lost:
            rank += direction
        return rank % self._transport.size

    def _close_ring(self, rank: int) -> None:
        """A generator has died: watch whom it has watched."""
        if rank == self._watched:
            self._watched = self._neighbour(-1)
            self._heard, self._last, self._presumed_lost = None, None, False
            self._unsure = self._roles.role(self._watched) == "generator"

    def _check(self, now: float) -> None:
        assert self._heard is not None
        if self._last is not None and self._last.state == LEAVING:
            return
        silent = now - self._heard
        generates = self._roles.role(self._watched) == "generator"
        if silent > self._reissue and generates and not self._presumed_lost:
            self._report(over=False)
        if silent > self._silence:
            self._raise_lost(silent)

    def _report(self, over: bool) -> None:
        """Tell the trainers what to think of the watched generator."""
        self._presumed_lost, self._unsure = not over, False
        for trainer in self._roles.trainers:
            self._transport.send(trainer, Silence(self._watched, over))

    def _raise_lost(self, silent: float) -> None:
        said = f"last said '{self._last.state}'" if self._last else "has never said anything"
        raise PeerLostError(
            f"{self._roles.name(self._watched)} has been silent for {silent:.0f} s and {said}. "
            "It died or its host is unreachable; its log is in the run folder."
        )
