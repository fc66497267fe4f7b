"""Ledgers, model generators and model trainers on a network whose every order of events is drawn from a seed.

    World.run: as long as the run isn't over, one of the events possible now is drawn and happens:
        a message arrives (in order between one pair of ranks) · a ledger ticks
        a generator asks, starts a group, ends a sample, gives a group up, takes in a newer version, falls silent, dies
        a trainer takes the formed step, pulls its groups (or finds that it can't), ends the step
After every event the invariants are checked: of each ledger by its own `check`, of the whole against what the
generators and trainers here really did. `StuckError` is raised when nothing but rounds happens for long.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from headrace.comm.messages import (
    Ask,
    Failed,
    Finished,
    GeneratorCounters,
    Grants,
    Message,
    Redirect,
    RoundPart,
    SampleMeta,
    Started,
    TicketGrant,
)
from headrace.comm.transport import Received
from headrace.ranks.node import LedgerNode
from headrace.ranks.tickets import FormedStep, LedgerSpec, LedgerState

QUIET_EVENTS = 400
"""So many rounds' events in a row, with nothing else possible, are a deadlock."""


class StuckError(AssertionError):
    """Nothing can happen any more and the run isn't over."""


class BrokenError(AssertionError):
    """A rule was broken."""


@dataclass(frozen=True)
class Setup:
    """One world."""

    spec: LedgerSpec
    ledgers: int = 1
    generators: int = 1
    room: int = 2
    """Groups that a generator runs or waits to run at once."""
    failures: int = 0
    """Groups that may be given up."""
    silences: int = 0
    """How often a generator may be taken for lost though it goes on."""
    deaths: int = 0
    """Generators that may die; at least one lives on."""
    noise: int = 0
    """Senseless reports: repeated, unknown tickets, sample numbers out of range."""
    follow: bool = True
    """A redirected generator makes the other ledger its home."""
    homes: tuple[int, ...] | None = None
    """Index of the home ledger of each generator; None spreads them."""


@dataclass
class Run:
    """A group that a generator samples."""

    grant: TicketGrant
    start: int
    left: list[int]


@dataclass
class Generator:
    """A rank that samples."""

    rank: int
    home: int
    version: int
    asked: int = 0
    waiting: list[TicketGrant] = field(default_factory=list)
    running: list[Run] = field(default_factory=list)


@dataclass
class Taken:
    """The formed step as one trainer has it."""

    formed: FormedStep
    pulled: bool = False


Event = tuple[Callable[..., None], Any]
"""What happens, and to what."""


class World:
    """Everything that runs, and what must be true of it."""

    def __init__(
        self,
        setup: Setup,
        choose: Callable[[int], int],
        whole: LedgerState | None = None,
        trained: list[list[int]] | None = None,
        failed: set[int] | None = None,
        node_type: type[LedgerNode] = LedgerNode,
    ) -> None:
        self.setup, self.spec, self._choose = setup, setup.spec, choose
        self.step = 0 if whole is None else whole.step
        """Steps trained."""
        self.version = self.step
        """The newest version that generators can have."""
        self.trained: list[list[int]] = trained or []
        self.failed: list[set[int]] = [set() for _ in range(setup.ledgers)]
        self.failed[0] |= failed or set()
        self.saved: dict[int, dict[int, tuple[bytes, set[int]]]] = {}
        self.trace: list[tuple[Callable[..., None], Any]] = []
        self.over: set[int] = set()
        self.ages: list[int] = []
        self.formations: list[int] = []
        """How often each trained step had been undone before."""
        self._quiet = 0
        self._now = 0.0
        self._channels: dict[tuple[int, int], deque[Message]] = {}
        self._budget = {"fail": setup.failures, "silence": setup.silences, "death": setup.deaths, "noise": setup.noise}
        ranks = list(range(setup.ledgers))
        generators = [setup.ledgers + g for g in range(setup.generators)]
        self.nodes = [
            node_type(self.spec, i, ranks, generators, partial(self._send, i), whole) for i in range(setup.ledgers)
        ]
        homes = setup.homes or tuple(g % setup.ledgers for g in range(setup.generators))
        self.generators = {
            rank: Generator(rank, home, self.version) for rank, home in zip(generators, homes, strict=True)
        }
        self._taken: dict[int, Taken] = {}
        self._done: tuple[int, int] | None = None
        self._ended: set[int] = set()
        self._pending_loss: set[tuple[int, int]] = set()
        self._losses = 0
        self._born: dict[tuple[int, int, int], int] = {}
        self._save_all()

    # Driving

    def run(self, events: int = 200_000) -> bool:
        """Let events happen until the run is over (True) or so many have happened (False)."""
        for _ in range(events):
            if len(self.over) == self.setup.ledgers:
                self._check_end()
                return True
            possible = self._possible()
            act, what = possible[self._choose(len(possible))]
            self.trace.append((act, what))
            act(*what)
            self._check()
            self._quiet = self._quiet + 1 if all(other in ROUND_EVENTS for other, _ in possible) else 0
            if self._quiet > QUIET_EVENTS:
                raise StuckError("; ".join(node.describe() for node in self.nodes))
        return False

    def _possible(self) -> list[Event]:
        events: list[Event] = [(World.tick, (self, i)) for i in range(self.setup.ledgers)]
        for pair, queue in self._channels.items():
            if queue:
                act = World.round_part if isinstance(queue[0], RoundPart) else World.arrive
                events.append((act, (self, *pair, queue[0])))
        for generator in self.generators.values():
            self._generator_events(generator, events)
        for i in range(self.setup.ledgers):
            self._trainer_events(i, events)
        events += [(World.hear_loss, (self, *pair)) for pair in self._pending_loss]
        return events

    def story(self) -> str:
        """What has happened, one event per line, without the rounds."""
        told = [(act, what) for act, what in self.trace if act not in ROUND_EVENTS]
        return "\n".join(f"{act.__name__} {' '.join(str(w) for w in what[1:])}"[:160] for act, what in told)

    def _send(self, source: int, target: int, message: Message) -> None:
        if target < self.setup.ledgers or target in self.generators:
            self._channels.setdefault((source, target), deque()).append(message)

    def tick(self, index: int) -> None:
        self._now += 1.0
        self.nodes[index].tick(self._now)

    def round_part(self, source: int, target: int, message: Message) -> None:
        self._channels[source, target].popleft()
        self.nodes[target].receive(Received(source, message), self._now)

    def arrive(self, source: int, target: int, message: Message) -> None:
        self._channels[source, target].popleft()
        if target < self.setup.ledgers:
            before = self.nodes[target].counts().failed
            self.nodes[target].receive(Received(source, message), self._now)
            if isinstance(message, Failed) and self.nodes[target].counts().failed > before:
                self.failed[target].add(message.ticket)
        elif isinstance(message, Grants):
            generator = self.generators[target]
            generator.asked -= len(message.grants)
            generator.waiting.extend(message.grants)
        elif isinstance(message, Redirect):
            if self.setup.follow:
                self.generators[target].home = message.ledger
            self._send(target, message.ledger, Ask(message.room))

    # Generators

    def _generator_events(self, g: Generator, events: list[Event]) -> None:
        room = self.setup.room - g.asked - len(g.waiting) - len(g.running)
        if room > 0:
            events.append(
                (
                    World.asks,
                    (
                        self,
                        g,
                        room,
                    ),
                )
            )
        if g.version < self.version:
            events.append(
                (
                    World.switches,
                    (
                        self,
                        g,
                        self.version,
                    ),
                )
            )
        for grant in g.waiting:
            if g.version >= grant.min_version:
                events.append(
                    (
                        World.starts,
                        (
                            self,
                            g,
                            grant,
                        ),
                    )
                )
        for run in g.running:
            events.append(
                (
                    World.finishes,
                    (
                        self,
                        g,
                        run,
                    ),
                )
            )
            if self._budget["fail"]:
                events.append(
                    (
                        World.fails,
                        (
                            self,
                            g,
                            run,
                        ),
                    )
                )
            if self._budget["noise"]:
                events.append(
                    (
                        World.makes_noise,
                        (
                            self,
                            g,
                            run,
                        ),
                    )
                )
        if self._losses <= 2 * self.step and (g.running or g.waiting or self._holds(g)):
            if self._budget["silence"]:
                events.append((World.loses, (self, g, False)))
            if self._budget["death"] and len(self.generators) > 1:
                events.append((World.loses, (self, g, True)))

    def _holds(self, g: Generator) -> bool:
        """Whether the generator has groups of the batch that somebody trains or is about to."""
        return any(group.owner == g.rank for taken in self._taken.values() for group in taken.formed.groups)

    def asks(self, g: Generator, room: int) -> None:
        g.asked += room
        self._send(g.rank, g.home, Ask(room))

    def switches(self, g: Generator, version: int) -> None:
        g.version = version

    def starts(self, g: Generator, grant: TicketGrant) -> None:
        g.waiting.remove(grant)
        g.running.append(Run(grant, g.version, list(range(self.spec.group_size))))
        self._send(g.rank, self._ledger_of(grant), Started([(grant.ticket, grant.attempt, g.version)]))

    def finishes(self, g: Generator, run: Run) -> None:
        sample = run.left.pop()
        born = run.start if sample == self.spec.group_size - 1 else g.version
        self._born[(run.grant.ticket, sample, run.grant.attempt)] = born
        self._report(g, run.grant, [SampleMeta(run.grant.ticket, sample, run.grant.attempt, born, 3, 1 + sample, 0.5)])
        if not run.left:
            g.running.remove(run)

    def fails(self, g: Generator, run: Run) -> None:
        self._budget["fail"] -= 1
        g.running.remove(run)
        self._send(g.rank, self._ledger_of(run.grant), Failed(run.grant.ticket, run.grant.attempt, "raised", "no"))

    def makes_noise(self, g: Generator, run: Run) -> None:
        self._budget["noise"] -= 1
        grant = run.grant
        done = [s for s in range(self.spec.group_size) if s not in run.left]
        samples = [SampleMeta(grant.ticket, s, grant.attempt, run.start, 3, 1 + s, 0.5) for s in done]
        samples.append(SampleMeta(grant.ticket, self.spec.group_size, grant.attempt, run.start, 1, 1, 0.0))
        samples.append(SampleMeta(grant.ticket + 1000 * self.setup.ledgers, 0, 0, run.start, 1, 1, 0.0))
        self._report(g, grant, samples)
        self._send(g.rank, self._ledger_of(grant), Started([(grant.ticket, grant.attempt, run.start)]))

    def _report(self, g: Generator, grant: TicketGrant, samples: list[SampleMeta]) -> None:
        self._send(g.rank, self._ledger_of(grant), Finished(samples, GeneratorCounters(1, 1, 0.5, 1.0, 1.0, g.version)))

    def loses(self, g: Generator, dead: bool) -> None:
        """The ledgers hear of it one by one. A silent generator goes on with what it has; when all have heard, it asks
        anew, since its asks are forgotten."""
        self._budget["death" if dead else "silence"] -= 1
        self._losses += 1
        self._pending_loss |= {(i, g.rank) for i in range(self.setup.ledgers)}
        if dead:
            del self.generators[g.rank]
            for pair in [pair for pair in self._channels if g.rank in pair]:
                del self._channels[pair]

    def hear_loss(self, ledger: int, rank: int) -> None:
        self._pending_loss.remove((ledger, rank))
        self.nodes[ledger].lost(rank)
        if rank in self.generators and all(other != rank for _, other in self._pending_loss):
            self.generators[rank].asked = 0

    def _ledger_of(self, grant: TicketGrant) -> int:
        return grant.ticket % self.setup.ledgers

    # Trainers

    def _trainer_events(self, i: int, events: list[Event]) -> None:
        if self.nodes[i]._formed is not None:
            events.append(
                (
                    World.takes,
                    (
                        self,
                        i,
                    ),
                )
            )
        elif i in self._taken and not self._taken[i].pulled:
            events.append(
                (
                    World.pulls,
                    (
                        self,
                        i,
                    ),
                )
            )
        elif self._is_done() and i not in self._ended:
            events.append(
                (
                    World.ends,
                    (
                        self,
                        i,
                    ),
                )
            )

    def takes(self, i: int) -> None:
        formed = self.nodes[i].take_formed()
        assert formed is not None
        if formed.finished:
            self.over.add(i)
        else:
            self._taken[i] = Taken(formed)

    def pulls(self, i: int) -> None:
        taken = self._taken[i]
        own = [group for group in taken.formed.groups if group.replica == i]
        gone = [group.ticket for group in own if group.owner not in self.generators]
        if gone:
            del self._taken[i]
            self.nodes[i].unform(gone)
        else:
            taken.pulled = True

    def _is_done(self) -> bool:
        """Whether the optimizer step is done: all have pulled the same batch. The first time, it is checked."""
        keys = {(t.formed.step, t.formed.formation) for t in self._taken.values()}
        if len(self._taken) < self.setup.ledgers or len(keys) > 1 or not all(t.pulled for t in self._taken.values()):
            return False
        if self._done != (key := keys.pop()):
            self._done = key
            self._train()
        return True

    def _train(self) -> None:
        formed = self._taken[0].formed
        _expect(all(t.formed == formed for t in self._taken.values()), "the ledgers formed different batches")
        _expect(formed.step == self.step, f"formed step {formed.step} after {self.step} steps")
        before = {ticket for step in self.trained for ticket in step}
        settled = len(before) + len(set().union(*self.failed))
        full = len(formed.groups) == self.spec.groups_per_step
        _expect(full or settled + len(formed.groups) == self.spec.tickets, "a short batch before the end of the data")
        for group in formed.groups:
            _expect(group.ticket not in before, f"ticket {group.ticket} is trained twice")
            _expect(all(group.ticket not in failed for failed in self.failed), f"ticket {group.ticket} had failed")
            _expect([s.sample for s in group.samples] == list(range(self.spec.group_size)), "samples are missing")
            true = {self._born.get((s.ticket, s.sample, s.attempt), s.born) for s in group.samples}
            _expect(group.born == min(true) == min(s.born for s in group.samples), "born isn't the oldest version")
            _expect(group.deadline >= self.step, f"ticket {group.ticket} was due at {group.deadline}")
            _expect(
                self.step - group.born <= self.spec.oldest, f"ticket {group.ticket} has age {self.step - group.born}"
            )
            self.ages.append(self.step - group.born)
        replicas = {group.replica for group in formed.groups}
        _expect(len(replicas) == min(self.setup.ledgers, len(formed.groups)), "a replica goes without")
        self.trained.append([group.ticket for group in formed.groups])
        self.formations.append(formed.formation)
        self.step += 1
        if self._published(self.step):
            self.version = self.step

    def _published(self, version: int) -> bool:
        return version % self.spec.publish_every == 0

    def ends(self, i: int) -> None:
        step = self._taken[i].formed.step
        self.nodes[i].end_step(step, self._published(step + 1))
        self._ended.add(i)
        self._save(i)
        if len(self._ended) == self.setup.ledgers:
            self._taken, self._ended, self._done = {}, set(), None

    # Killing and going on

    def _save_all(self) -> None:
        for i in range(self.setup.ledgers):
            self._save(i)

    def _save(self, i: int) -> None:
        state = self.nodes[i].state()
        self.saved.setdefault(state.step, {})[i] = (msgspec.json.encode(state), set(self.failed[i]))

    def resumed(self, setup: Setup, choose: Callable[[int], int], hold: bool = True, **more: Any) -> World:
        """The world that goes on from the newest step that every ledger has saved. With `hold`, some of the finished
        groups' data have survived and are found at generators of the new world."""
        step = max(step for step, parts in self.saved.items() if len(parts) == self.setup.ledgers)
        parts = [msgspec.json.decode(text, type=LedgerState) for text, _ in self.saved[step].values()]
        finished = [group.ticket for part in parts for group in part.finished]
        owners = {t: setup.ledgers + choose(setup.generators) for t in finished if hold and choose(3)}
        failed = {ticket for _, tickets in self.saved[step].values() for ticket in tickets}
        whole = LedgerState.merge(parts, owners)
        return World(setup, choose, whole, self.trained[:step], failed, **more)

    # Checking

    def _check(self) -> None:
        for node in self.nodes:
            node.check()
        held = 0
        for i, node in enumerate(self.nodes):
            settled = self._done is not None and i not in self._ended
            chosen = sum(group.ledger == i for group in self._taken[i].formed.groups) if settled else 0
            held += node.counts().outstanding - chosen
        _expect(held <= self.spec.credits, f"{held} outstanding with C = {self.spec.credits}")

    def _check_end(self) -> None:
        trained = [ticket for step in self.trained for ticket in step]
        failed = set().union(*self.failed)
        total = self.nodes[0].counts()
        for node in self.nodes[1:]:
            total = total + node.counts()
        _expect(total.trained == len(trained) and total.failed == len(failed), "counts differ from what happened")
        _expect(total.outstanding == 0, "work is left over")
        if self.step < self.spec.steps:
            _expect(sorted([*trained, *failed]) == list(range(self.spec.tickets or 0)), "not every ticket had its end")
            _expect(total.returned == 0, "a ticket was left")


ROUND_EVENTS = (World.tick, World.round_part)


def _expect(condition: bool, text: str) -> None:
    if not condition:
        raise BrokenError(text)


@dataclass
class Choices:
    """Draws from a seed, and remembers; or repeats what was drawn, as far as it goes."""

    seed: int
    script: list[int] | None = None
    drawn: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)

    def __call__(self, count: int) -> int:
        if self.script is None:
            pick = self._rng.randrange(1 << 30)
        elif len(self.drawn) < len(self.script):
            pick = self.script[len(self.drawn)]
        else:
            raise EndOfScriptError
        self.drawn.append(pick)
        return pick % count


class EndOfScriptError(Exception):
    """Every remembered choice was made."""


Scenario = Callable[[Choices, list[World]], None]
"""Makes worlds, appends them to the list, and runs them."""


def play(scenario: Scenario, seed: int) -> list[World]:
    """Run a scenario. A failure is raised again with the shortest story found that leads to one."""
    choices, worlds = Choices(seed), list[World]()
    try:
        scenario(choices, worlds)
    except AssertionError as error:
        story = shortest_story(scenario, choices.drawn)
        raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}\n{worlds[-1].setup}\n{story}") from error
    return worlds


def shortest_story(scenario: Scenario, drawn: list[int], tries: int = 300) -> str:
    """The events of a shortened failing run: pieces of its choices are left out as long as it still fails."""
    best, story = drawn, "not reproduced"
    piece = len(drawn)
    while piece and tries:
        start = 0
        while start < len(best) and tries:
            tries -= 1
            script = best[:start] + (best[start + piece :] if piece < len(drawn) else best)
            failure = _failure(scenario, script)
            if failure is None:
                start += piece
            else:
                best, story = failure
                start += piece if piece == len(drawn) else 0
        piece //= 2
    return story


def _failure(scenario: Scenario, script: list[int]) -> tuple[list[int], str] | None:
    choices, worlds = Choices(0, script), list[World]()
    try:
        scenario(choices, worlds)
    except EndOfScriptError:
        return None
    except AssertionError as error:
        return choices.drawn, f"{worlds[-1].story()}\n{type(error).__name__}: {error}"
    return None
