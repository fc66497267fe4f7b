"""The network between ledgers, generators and trainers, and everything that may happen next.

    a message arrives (in order between one pair of ranks) · a ledger ticks
    a generator asks, starts a group, goes on with a sample, ends it, fails, takes in a version, falls silent, dies
    a trainer takes the formed step, pulls its groups (or finds that it can't), ends the step

An event is the name of a method and plain numbers, so a run is replayed by its events.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from headrace.comm.messages import Message, RoundPart, Silence
from headrace.comm.transport import Received
from headrace.ranks.node import LedgerNode
from headrace.ranks.tickets import FormedStep, LedgerState
from worlds.generators import Generator, Group, Key
from worlds.rules import Rules
from worlds.setup import Setup
from worlds.trainers import Data, Trainers

Event = tuple[Any, ...]
"""(name of a method, numbers), of the world, of one of its generators, or of its trainers."""
Happening = tuple[Event, Message | None]
"""An event, and the message that came with it."""

GENERATOR_EVENTS = frozenset(
    ["asks", "starts", "grows", "finishes", "fails", "times_out", "hangs", "makes_noise", "starts_with", "ends_with"]
)
TRAINER_EVENTS = frozenset(["takes", "pulls", "cannot_pull", "ends"])
FAULTS = ("failures", "hangs", "silences", "deaths", "noise", "skips", "stops")
ROUND_EVENTS = frozenset(["tick", "round_part"])
"""Always possible; nothing but them means that everybody waits."""


WATCH = -1
"""Source of the news of a generator: WATCH - its rank."""


class Outbox:
    """What the ledgers have sent in the present event. Copies of a world share it."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, int, Message]] = []

    def sender(self, source: int) -> Callable[[int, Message], None]:
        return lambda target, message: self.sent.append((source, target, message))


@dataclass
class Start:
    """Where a world begins."""

    step: int = 0
    """Steps trained."""
    state: LedgerState | None = None
    """Of the run that goes on."""
    trained: list[list[int]] = field(default_factory=list)
    """Tickets by step."""
    ends: set[int] = field(default_factory=set)
    """Tickets that had failed or been dropped."""
    held: list[tuple[int, Key, Group]] = field(default_factory=list)
    """Finished groups whose data are still there: rank that has them, under which key, the data."""


class World:
    """Everything that runs."""

    def __init__(self, setup: Setup, start: Start | None = None, generator_type: type[Generator] = Generator) -> None:
        start = self.begin = start or Start()
        self.setup, self.spec = setup, setup.spec
        self.step = start.step
        """Steps trained."""
        self.versions = [start.step]
        """That were published."""
        self.trained = list(start.trained)
        self.formations: list[int] = []
        """How often each trained step had been undone before."""
        self.saved: dict[int, dict[int, tuple[bytes, set[int]]]] = {}
        """Step → ledger → (its state, tickets that had failed or been dropped there)."""
        self.trace: list[Happening] = []
        """What has happened so far."""
        self.budget = {name: getattr(setup, name) for name in FAULTS}
        """How often each may still happen."""
        self.now = 0.0
        self.losses = 0
        self.ever_lost: set[int] = set()
        self.silent: set[int] = set()
        self.stopped = False
        self.touched: int | None = None
        """The ledger that the present event changes."""
        self.outbox = Outbox()
        self.channels: dict[tuple[int, int], deque[Message]] = {}
        ranks = range(setup.ledgers, setup.ledgers + setup.generators)
        self.nodes = [
            LedgerNode(self.spec, i, range(setup.ledgers), ranks, self.outbox.sender(i), start.state)
            for i in range(setup.ledgers)
        ]
        self.alive = self._generators(ranks, start, generator_type)
        self.deaf, self.slow = set(ranks[: setup.deaf]), set(ranks[setup.generators - setup.slow :])
        self.skipped = dict.fromkeys(ranks, -1)
        """Generator → the version that never arrives there."""
        self.trainers = Trainers(self)
        self.rules = Rules(self, start.ends)
        self._flush()
        for i in range(setup.ledgers):
            self.save(i)

    def _generators(self, ranks: Sequence[int], start: Start, kind: type[Generator]) -> dict[int, Generator]:
        homes = self.setup.homes or [g % self.setup.ledgers for g in range(len(ranks))]
        generators = {
            rank: kind(self.setup, rank, home, self.version, self.budget, self.post)
            for rank, home in zip(ranks, homes, strict=True)
        }
        for owner, key, data in start.held:
            generators[owner].stored[key] = data
        return generators

    @property
    def version(self) -> int:
        """The newest version that generators can have."""
        return self.versions[-1]

    @property
    def is_over(self) -> bool:
        return len(self.trainers.over) == len(self.nodes)

    # What may happen, and that it happens

    def events(self) -> list[Event]:
        """What may happen next."""
        events: list[Event] = [("tick", i) for i in range(len(self.nodes))]
        for pair, queue in self.channels.items():
            if queue:
                events.append(("round_part" if isinstance(queue[0], RoundPart) else "arrive", *pair))
        for generator in self.alive.values():
            events.extend(generator.events())
            events.extend(self._weights_events(generator))
            events.extend(self._loss_events(generator))
        for i in range(len(self.nodes)):
            events.extend(self.trainers.events(i))
        if self.budget["stops"] and self.step:
            events.append(("stops", 0))
        return events

    def do(self, event: Event) -> None:
        """Let it happen, then check the rules."""
        self.trace.append((event, self.next_message(event)))
        self.touched = None
        self._act(*event)
        self._flush()
        self.rules.check()

    def _act(self, name: str, *args: int) -> None:
        if name in GENERATOR_EVENTS:
            getattr(self.alive[args[0]], name)(*args[1:])
        elif name in TRAINER_EVENTS:
            self.touched = args[0]
            getattr(self.trainers, name)(*args)
        else:
            getattr(self, name)(*args)

    def next_message(self, event: Event) -> Message | None:
        """The message that arrives with this event."""
        return self.channels[event[1], event[2]][0] if event[0] in ("arrive", "round_part") else None

    def post(self, source: int, target: int, message: Message) -> None:
        """Put a message on its way; to a dead rank it is lost."""
        if target < len(self.nodes) or target in self.alive:
            self.channels.setdefault((source, target), deque()).append(message)

    def _flush(self) -> None:
        sent, self.outbox.sent = self.outbox.sent, []
        for source, target, message in sent:
            self.rules.check_sent(source, target, message)
            self.post(source, target, message)

    # Ledgers

    def tick(self, i: int) -> None:
        """The next round of this ledger is due: here it may begin at any time."""
        self.touched = i
        self.now = max(self.now + 1.0, self.nodes[i].next_tick() or 0.0)
        self.nodes[i].tick(self.now)

    def arrive(self, source: int, target: int) -> None:
        message = self.channels[source, target].popleft()
        if target in self.alive:
            self.alive[target].receive(message)
        else:
            self.touched = target
            self.nodes[target].receive(Received(source, message), self.now)

    round_part = arrive

    def stops(self, i: int) -> None:
        """The run is asked to stop."""
        self.budget["stops"] -= 1
        self.stopped = True
        self.nodes[i].end_run()

    # Generators

    def _weights_events(self, g: Generator) -> Iterator[Event]:
        """Versions may be late, and skipped."""
        if g.version == self.version or self._is_deaf(g.rank):
            return
        yield from (("switches", g.rank, version) for version in self.versions if version > g.version)
        if self.budget["skips"] and self._others_hear(g.rank):
            yield ("skips", g.rank)

    def _loss_events(self, g: Generator) -> Iterator[Event]:
        """Losses are spread over the run, and strike generators that have something to lose."""
        if g.rank in self.silent:
            yield ("returns", g.rank)
        if self._is_deaf(g.rank) and any(grant.min_version > g.version for grant in g.held):
            yield ("dies_deaf", g.rank)
        if self.losses > 2 * self.step or not (g.running or g.held or self.trainers.wants_from(g.rank)):
            return
        if self.budget["silences"] and g.rank not in self.silent:
            yield ("falls_silent", g.rank)
        if self.budget["deaths"] and self._others_hear(g.rank):
            yield ("dies", g.rank)

    def _is_deaf(self, rank: int) -> bool:
        """The newest version never arrives there."""
        return rank in self.deaf or self.skipped[rank] == self.version

    def _others_hear(self, rank: int) -> bool:
        return any(other != rank and not self._is_deaf(other) for other in self.alive)

    def switches(self, rank: int, version: int) -> None:
        self.alive[rank].version = version

    def skips(self, rank: int) -> None:
        """The newest version never arrives there."""
        self.budget["skips"] -= 1
        self.skipped[rank] = self.version

    def falls_silent(self, rank: int) -> None:
        """It is taken for lost, though it goes on."""
        self.budget["silences"] -= 1
        self.silent.add(rank)
        self._lose(rank)

    def returns(self, rank: int) -> None:
        self.silent.remove(rank)
        self._announce(rank, over=True)

    def dies(self, rank: int) -> None:
        self.budget["deaths"] -= 1
        self.dies_deaf(rank)

    def dies_deaf(self, rank: int) -> None:
        """It has waited for weights up to its limit, and ends."""
        del self.alive[rank]
        for pair in [pair for pair in self.channels if rank in pair]:
            del self.channels[pair]
        if rank not in self.silent:
            self._lose(rank)
        self.silent.discard(rank)

    def _lose(self, rank: int) -> None:
        self.losses += 1
        self.ever_lost.add(rank)
        self._announce(rank, over=False)

    def _announce(self, rank: int, over: bool) -> None:
        """Whoever watches the rank tells every trainer; the news arrive one by one."""
        for i in range(len(self.nodes)):
            self.post(WATCH - rank, i, Silence(rank, over))

    # Trainers

    def is_published(self, version: int) -> bool:
        return version % self.spec.publish_every == 0

    def train(self, formed: FormedStep, data: Data) -> None:
        """The optimizer step that all replicas do together."""
        self.rules.check_batch(formed, data)
        self.trained.append([group.ticket for group in formed.groups])
        self.formations.append(formed.formation)
        for group in formed.groups:
            if group.owner in self.alive:
                self.alive[group.owner].stored.pop((group.ticket, group.attempt), None)
        self.step += 1
        if self.is_published(self.step):
            self.versions.append(self.step)

    # Saving

    def save(self, i: int) -> None:
        state = self.nodes[i].state()
        self.saved.setdefault(state.step, {})[i] = (msgspec.json.encode(state), set(self.rules.given_up[i]))
