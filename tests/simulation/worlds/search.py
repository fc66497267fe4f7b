"""Every order of events of a small world: depth-first over states, each visited once.

In every state all rules are checked. And from every state the end of the run must be reachable without another fault,
or there is a deadlock, or a circle that can't be left.

Not all orders are needed, as `SmallWorld` says.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from worlds.playing import story
from worlds.setup import Setup, StuckError
from worlds.small import SmallWorld
from worlds.states import freeze, key_of, thaw
from worlds.world import Event, World

FAULT_EVENTS = frozenset(["fails", "hangs", "makes_noise", "falls_silent", "dies", "skips", "stops"])


@dataclass
class Found:
    """What a search has gone through."""

    states: int
    events: int
    ends: int
    """States in which the run is over."""


class Search:
    """All states of one setup."""

    def __init__(self, setup: Setup, most: int = 3_000_000) -> None:
        """`most`: states; with more the search fails, since nothing is proven then."""
        self._setup, self._most = setup, most
        self._seen: dict[bytes, int] = {}
        self._open: list[tuple[int, bytes, list[Event]]] = []
        """(state, the world as it is there, events that haven't been tried yet)."""
        self._from: list[tuple[int, Event]] = []
        """By state: the state and the event by which it was reached first."""
        self._sources, self._targets = array("l"), array("l")
        """Edges between states, without faults."""
        self._ends: list[int] = []
        self._events = 0

    def run(self) -> Found:
        """Go through all states.

        Raises:
            BrokenError, LedgerRuleError: a rule is broken; the text tells by which events.
            StuckError: from some state the end can't be reached.
        """
        world = SmallWorld(self._setup)
        self._enter(world, -1, ())
        self._descend(world, 0)
        while self._open:
            state, frozen, events = self._open[-1]
            event = events.pop()
            if not events:
                self._open.pop()
            world = thaw(frozen)
            reached = self._step(world, state, event)
            if reached is not None:
                self._descend(world, reached)
        self._check_that_all_end()
        return Found(len(self._from), self._events, len(self._ends))

    def _descend(self, world: World, state: int) -> None:
        """From a new state, follow one event after another to new states; their other events are tried later."""
        reached: int | None = state
        while reached is not None and not world.is_over:
            state, events = reached, world.events()
            event = events.pop()
            if events:
                self._open.append((state, freeze(world), events))
            reached = self._step(world, state, event)

    def _step(self, world: World, state: int, event: Event) -> int | None:
        """Let it happen; returns the state reached if it is new."""
        self._events += 1
        try:
            world.do(event)
            if world.is_over:
                world.rules.check_end()
        except AssertionError as error:
            raise type(error)(f"{error}\n{self._setup}\n{self._story(state, event)}") from error
        world.trace.clear()
        return self._enter(world, state, event)

    def _enter(self, world: World, source: int, event: Event) -> int | None:
        key, new = key_of(world), len(self._from)
        state = self._seen.setdefault(key, new)
        if source >= 0 and event[0] not in FAULT_EVENTS:
            self._sources.append(source)
            self._targets.append(state)
        if state < new:
            return None
        if new == self._most:
            raise AssertionError(f"more than {self._most} states: {self._setup}")
        self._from.append((source, event))
        if world.is_over:
            self._ends.append(state)
        return state

    def _check_that_all_end(self) -> None:
        """Backwards from the ends."""
        before: list[list[int]] = [[] for _ in self._from]
        for source, target in zip(self._sources, self._targets, strict=True):
            before[target].append(source)
        ending = set(self._ends)
        todo = list(ending)
        while todo:
            new = [source for source in before[todo.pop()] if source not in ending]
            ending.update(new)
            todo.extend(new)
        for state in range(1, len(self._from)):
            if state not in ending:
                raise StuckError(f"no way to the end\n{self._setup}\n{self._story(*self._from[state])}")

    def _story(self, state: int, event: Event) -> str:
        """How the state was reached, and the event after it."""
        events = [event]
        while state > 0:
            state, event = self._from[state]
            events.append(event)
        world = SmallWorld(self._setup)
        try:
            for event in reversed(events):
                world.do(event)
        except AssertionError:
            pass  # it is told by the caller
        return story(world)
