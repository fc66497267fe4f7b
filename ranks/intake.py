"""What a generator knows of its tickets: how many it asks for, holds and works on. No I/O, no clock, no threads.

    ask() ─▶ ASKED ── granted() ─▶ HELD ── start(version) ─▶ RUNNING ── sampled() per sample ── ended() ─▶ gone
               │ ▲                  │ the weights it needs aren't here yet
               │ └ ask() ◀┐         └── withdraw() ─▶ gone: dropped, or handed back
               └ forgotten() the ledger took this generator for lost

                                       (an earlier launch) ── resumed() ─▶ RUNNING

An ask that is redirected stays ASKED: it only waits at another ledger. Every ask has one end, a grant or `forgotten`,
so the numbers never fall below zero.

Two limits, and the memory for finished groups (`memory.py`), say how much is asked for:

- the engine's slots: enough groups that none stands idle, the last of them waiting in part for slots to get free;
- the window: a number of groups. It is as wide as the slots, so that it changes nothing, until over three quarters of
  the groups of a round come too late; then it is halved. After every other round it grows by one (additive increase,
  multiplicative decrease: Chiu and Jain, 1989). A round is as many groups as are held at its end, and at least `ROUND`:
  each group is judged once, and a few long samples don't make a generator slow.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable

from headrace.comm.messages import TicketGrant

Key = tuple[int, int]
"""(ticket, attempt)."""

ROUND = 4
"""Fewest groups by which the speed of a generator is judged."""
SLOW = 0.75
"""Share of late groups above which a generator counts as slow. Any generator has some, those with long samples."""


class Intake:
    """See the module's docstring. `slots`: samples that the engine decodes at a time."""

    def __init__(self, slots: int, group_size: int) -> None:
        self.window = slots
        """Most groups asked for, held and running; it limits nothing when it is as wide as the slots."""
        self.asked = 0
        """Groups asked for and not granted yet."""
        self.held: deque[TicketGrant] = deque()
        """Granted groups that haven't been started, in the order of their grants."""
        self.running = 0
        """Groups that were started and haven't ended; their rewards may still be missing."""
        self.generating = 0
        """Samples of running groups that lack their last token, those that wait for a slot included."""
        self._slots, self._group_size = slots, group_size
        self._ended = self._late = 0

    @property
    def groups(self) -> int:
        """Groups that this generator is answerable for: held and running."""
        return len(self.held) + self.running

    def ask(self, most: float = math.inf) -> int:
        """For how many more groups to ask now (0: for none); they count as asked from here on. `most`: so many may be
        asked for, held and running in all."""
        coming = (self.asked + len(self.held)) * self._group_size
        room = max(0, math.ceil((self._slots - self.generating - coming) / self._group_size))
        limit = min(most, self.window if self.window < self._slots else math.inf)
        if limit < math.inf:
            room = max(0, min(room, int(limit) - self.asked - self.groups))
        self.asked += room
        return room

    def granted(self, grants: Collection[TicketGrant]) -> None:
        """Grants have come in."""
        assert len(grants) <= self.asked, f"{len(grants)} grants for {self.asked} asks"
        self.asked -= len(grants)
        self.held.extend(grants)

    def forgotten(self, room: int) -> None:
        """A ledger has forgotten so many asks: `ask` asks for them again."""
        assert room <= self.asked, f"{room} forgotten of {self.asked} asks"
        self.asked -= room

    def start(self, version: int) -> list[TicketGrant]:
        """Start every held group that may be sampled with this version; the others wait for newer weights."""
        ready = [grant for grant in self.held if grant.min_version <= version]
        self.held = deque(grant for grant in self.held if grant.min_version > version)
        self.running += len(ready)
        self.generating += len(ready) * self._group_size
        return ready

    def resumed(self, growing: int) -> None:
        """A group of an earlier launch goes on without having been asked for; `growing` samples lack tokens."""
        self.running += 1
        self.generating += growing

    def withdraw(self, keys: Iterable[Key]) -> list[Key]:
        """Take held groups out again; returns those that were held."""
        gone = set(keys)
        found = [key for key in map(_key, self.held) if key in gone]
        self.held = deque(grant for grant in self.held if _key(grant) not in gone)
        return found

    def sampled(self, samples: int = 1) -> None:
        """So many samples of running groups have their last token, or were aborted."""
        self.generating -= samples
        assert self.generating >= 0, "more samples ended than were begun"

    def ended(self, late: bool) -> None:
        """A running group is over: handed over, failed, dropped or handed back. `late`: it held up the trainers."""
        assert self.running > 0, "a group ended that wasn't running"
        held = self.groups
        self.running -= 1
        self._ended += 1
        self._late += late
        if self._ended >= max(ROUND, held):
            self._adapt(held)

    def clear(self) -> None:
        """Forget everything held and running: the run is over."""
        self.held.clear()
        self.running = self.generating = 0

    def _adapt(self, held: int) -> None:
        """End a round."""
        if self._late > SLOW * self._ended:
            self.window = max(1, min(self.window, held) // 2)
        else:
            self.window = min(self._slots, self.window + 1)
        self._ended = self._late = 0


def _key(grant: TicketGrant) -> Key:
    return grant.ticket, grant.attempt
