"""Worlds for `search`: without the orders of events that make no difference."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from headrace.comm.messages import Grants, Late, Message, Progress
from headrace.ranks.outstanding import Ticket
from headrace.ranks.pace import SLOWEST_ROUND_S
from worlds.generators import Generator, Key, Run
from worlds.setup import Setup
from worlds.world import World

if TYPE_CHECKING:
    from worlds.world import Event


class SmallWorld(World):
    """What it leaves out, and why that is enough:

    - Rounds begin at any time, so the words that tell when one is worth it aren't sent.
    - A hop of a round arrives only at a ledger that waits for it: earlier, `Rounds` would only put it by.
    - What a generator says arrives at once. A ledger can't tell whether something was said long before it arrived: what
      a generator does could as well be done when the news of it arrives, if only its other doings don't hinder that.
      They could by the weights that it holds, by its room, and by what it has heard meanwhile. So here a token may be
      of any version that its group may have, whatever other tokens were; asks come one by one up to `room`, which
      stands for any generator of half that room; and what ledgers say may come late.
    - Grants arrive at once: a generator may then do nothing for any time.
    - A formed step is taken at once: should it be void later, the trainer may still do nothing about it. Its groups are
      pulled at once when no owner can be lost any more: until then, whether they were pulled makes no difference.
    - A sample has at most two versions, and one where that makes no difference: unless tokens are masked.
    """

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup, generator_type=SmallGenerator)
        for generator in self.alive.values():
            assert isinstance(generator, SmallGenerator)
            generator.versions = self.versions

    def events(self) -> list[Event]:
        """Those that aren't done at once."""
        return [event for event in super().events() if self._matters(event)]

    def do(self, event: Event) -> None:
        super().do(event)
        while (more := self._next_at_once()) is not None:
            super().do(more)
        self.saved.clear()
        for node in self.nodes:
            node.ledger._totals.superseded = 0
            _sort(node.ledger._tickets)  # or the same state has many keys

    def tick(self, i: int) -> None:
        self.now += 2 * SLOWEST_ROUND_S
        super().tick(i)

    def post(self, source: int, target: int, message: Message) -> None:
        if not isinstance(message, Progress | Late):
            super().post(source, target, message)

    def _matters(self, event: Event) -> bool:
        match event[0]:
            case "round_part":
                return not self.nodes[event[2]]._rounds.idle
            case "tick":
                return self.nodes[event[1]].next_tick() is not None
        return event[0] != "switches"

    def _next_at_once(self) -> Event | None:
        for pair, queue in self.channels.items():
            if queue and (isinstance(queue[0], Grants) or pair[0] in self.alive):
                return "arrive", *pair
        at_once = ("takes",) if self._may_lose else ("takes", "pulls")
        return next((e for i in range(len(self.nodes)) for e in self.trainers.events(i) if e[0] in at_once), None)

    @property
    def _may_lose(self) -> bool:
        """Whether a generator was lost or can be."""
        return bool(self.ever_lost or self.budget["silences"] or self.budget["deaths"])


class SmallGenerator(Generator):
    """It samples every token with any version that its group may have, and asks for one group at a time."""

    versions: list[int]
    """All that were published."""

    def events(self) -> Iterator[Event]:
        if self.asked + len(self.held) + len(self.running) < self.setup.room:
            yield ("asks", self.rank, 1)
        for grant in self.held:
            for version in self._versions_from(grant.min_version):
                yield ("starts_with", self.rank, grant.ticket, grant.attempt, version)
        for key, run in self.running.items():
            yield from self._run_events(key, run)

    def _run_events(self, key: Key, run: Run) -> Iterator[Event]:
        for event in super()._run_events(key, run):
            if event[0] == "finishes":
                for version in self._versions_of(run, event[-2]):
                    yield ("ends_with", *event[1:], version)
            elif event[0] != "grows":
                yield event

    def starts_with(self, ticket: int, attempt: int, version: int) -> None:
        self.version = version
        self.starts(ticket, attempt)
        self.version = 0

    def ends_with(self, ticket: int, attempt: int, index: int, reward: int, version: int) -> None:
        self.version = version
        self.finishes(ticket, attempt, index, reward)
        self.version = 0

    def _versions_of(self, run: Run, index: int) -> list[int]:
        """Which versions the rest of a sample may have."""
        first = run.samples[0].spans[0][0]
        masks = self.setup.spec.overdue == "mask"
        return self._versions_from(first) if masks or not run.samples[index].spans else [first]

    def _versions_from(self, oldest: int) -> list[int]:
        return [version for version in self.versions if version >= oldest]


def _sort(tickets: dict[int, Ticket]) -> None:
    in_order = sorted(tickets.items())
    tickets.clear()
    tickets.update(in_order)
