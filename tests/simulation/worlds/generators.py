"""A rank that samples: it asks, holds grants until their weights are there, makes groups, and reports their ends.

held ── starts: the first token ──▶ running ── every sample ends and has a reward ──▶ stored until pulled and trained
 │ ▲                                  │  │
 │ grants                             │  └── the reward raises, or hangs up to its limit: Failed
 └── Returned (cut before it began)   └───── Dropped: forgotten
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from headrace.comm.messages import (
    Ask,
    Cut,
    Dropped,
    Failed,
    Finished,
    Forgotten,
    GeneratorCounters,
    Grants,
    Late,
    Message,
    Redirect,
    Returned,
    SampleMeta,
    Started,
    TicketGrant,
)
from headrace.ranks.memory import MemoryBound
from worlds.setup import Setup

if TYPE_CHECKING:
    from worlds.world import Event

Key = tuple[int, int]
"""(ticket, attempt)."""
Spans = tuple[tuple[int, int], ...]
"""(version, tokens) of a response, in order."""
Group = dict[int, Spans]
"""The data of a finished group: by sample, without those that were left out, the true versions of its tokens."""

PROMPT_TOKENS = 3


@dataclass
class Sample:
    """One response: how many tokens of which version, and how far it is."""

    spans: list[tuple[int, int]] = field(default_factory=list)
    ended: bool = False
    left_out: bool = False
    reward: float = 0.0

    def end(self, reward: float, left_out: bool = False) -> None:
        self.ended, self.reward, self.left_out = True, reward, left_out

    def grow(self, version: int, tokens: int) -> None:
        if self.spans and self.spans[-1][0] == version:
            self.spans[-1] = (version, self.spans[-1][1] + tokens)
        else:
            self.spans.append((version, tokens))


@dataclass
class Run:
    """A group that is being sampled."""

    grant: TicketGrant
    samples: list[Sample]
    hung: bool = False
    """Its reward doesn't come."""
    told: set[int] = field(default_factory=set)
    """Samples that its ledger knows of."""

    @property
    def key(self) -> Key:
        return self.grant.ticket, self.grant.attempt

    @property
    def done(self) -> bool:
        return all(sample.ended for sample in self.samples)


class Generator:
    """`budget`: how often each fault may still happen; `send(source, target, message)` puts a message on its way."""

    def __init__(
        self,
        setup: Setup,
        rank: int,
        home: int,
        version: int,
        budget: dict[str, int],
        send: Callable[[int, int, Message], None],
    ) -> None:
        self.setup, self.rank, self.home, self.version = setup, rank, home, version
        self.asked = 0
        """Asks that weren't answered yet."""
        self.held: list[TicketGrant] = []
        self.running: dict[Key, Run] = {}
        self.stored: dict[Key, Group] = {}
        """Finished groups that may still be pulled."""
        self._budget, self._send = budget, send
        self._memory = MemoryBound(1, setup.spec.groups_per_step)
        self._memory.finished(1)

    # What may happen next

    def events(self) -> Iterator[Event]:
        at_work = self.asked + len(self.held) + len(self.running)
        room = self.setup.room - at_work
        if self.setup.little:
            room = min(room, int(self._memory.at_work(len(self.stored), len(self.stored))) - at_work)
        if room > 0:
            yield ("asks", self.rank, room)
        for grant in self.held:
            if self.version >= grant.min_version:
                yield ("starts", self.rank, grant.ticket, grant.attempt)
        for key, run in self.running.items():
            yield from self._run_events(key, run)

    def _run_events(self, key: Key, run: Run) -> Iterator[Event]:
        if run.hung:
            yield ("times_out", self.rank, *key)
            return
        if self._budget["failures"]:
            yield ("fails", self.rank, *key)
        if self._budget["hangs"]:
            yield ("hangs", self.rank, *key)
        if self._budget["noise"]:
            yield ("makes_noise", self.rank, *key)
        for index, sample in enumerate(run.samples):
            if sample.ended:
                continue
            if not sample.spans or sample.spans[-1][0] < self.version:
                yield ("grows", self.rank, *key, index)
            if not self.setup.endless or key[0] % self.setup.endless:
                yield from (("finishes", self.rank, *key, index, r) for r in range(len(self.setup.rewards)))

    # Events

    def asks(self, room: int) -> None:
        self.asked += room
        self._send(self.rank, self.home, Ask(room))

    def starts(self, ticket: int, attempt: int) -> None:
        grant = next(grant for grant in self.held if (grant.ticket, grant.attempt) == (ticket, attempt))
        self.held.remove(grant)
        run = self.running[ticket, attempt] = Run(grant, [Sample() for _ in range(self.setup.spec.group_size)])
        run.samples[0].grow(self.version, 1)
        self._tell(ticket, Started([(ticket, attempt, self.version)]))

    def grows(self, ticket: int, attempt: int, index: int) -> None:
        self.running[ticket, attempt].samples[index].grow(self.version, 1)

    def finishes(self, ticket: int, attempt: int, index: int, reward: int) -> None:
        run = self.running[ticket, attempt]
        run.samples[index].grow(self.version, 1 + index)
        run.samples[index].end(self.setup.rewards[reward])
        self._report(run)

    def fails(self, ticket: int, attempt: int) -> None:
        """Its reward raises."""
        self._budget["failures"] -= 1
        del self.running[ticket, attempt]
        self._tell(ticket, Failed(ticket, attempt, "raised", "no"))

    def times_out(self, ticket: int, attempt: int) -> None:
        """Its reward, which hung, is given up."""
        del self.running[ticket, attempt]
        self._tell(ticket, Failed(ticket, attempt, "hung", "no"))

    def hangs(self, ticket: int, attempt: int) -> None:
        self._budget["hangs"] -= 1
        self.running[ticket, attempt].hung = True

    def makes_noise(self, ticket: int, attempt: int) -> None:
        """Reports that count for nothing: a sample of a ticket that nobody has, a second start."""
        self._budget["noise"] -= 1
        born = self.running[ticket, attempt].samples[0].spans[0][0]
        unknown = SampleMeta(ticket + 1000 * self.setup.ledgers, 0, 0, born, 1, 1, 0.0)
        self._tell(ticket, Finished([unknown], self._counters()))
        self._tell(ticket, Started([(ticket, attempt, born)]))

    # Messages

    def receive(self, message: Message) -> None:
        match message:
            case Grants(grants):
                self.asked -= len(grants)
                self.held.extend(grants)
            case Redirect(ledger, room):
                if self.setup.follow:
                    self.home = ledger
                self._send(self.rank, ledger, Ask(room))
            case Forgotten(room):
                self.asked -= room
            case Cut(tickets, keep):
                for key in tickets:
                    self._cut(key, keep)
            case Late():
                """Only a measure of speed, which this generator doesn't have."""
            case Dropped(tickets):
                for key in tickets:
                    self._forget(key)

    def _cut(self, key: Key, keep: bool) -> None:
        """End the group now. A response that has ended and waits for its reward isn't touched."""
        if self._unhold(key):
            self._tell(key[0], Returned([key]))
        run = self.running.get(key)
        if run is None or run.hung:
            return
        for sample in run.samples:
            if not sample.ended:
                sample.end(self.setup.rewards[0], left_out=not keep or not sample.spans)
        self._report(run)

    def _forget(self, key: Key) -> None:
        self._unhold(key)
        self.running.pop(key, None)
        self.stored.pop(key, None)

    def _unhold(self, key: Key) -> bool:
        held = [grant for grant in self.held if (grant.ticket, grant.attempt) != key]
        found = len(held) < len(self.held)
        self.held = held
        return found

    # Reports

    def _report(self, run: Run) -> None:
        """Tell the ledger which samples have ended; a whole group's data is stored before that."""
        if run.done:
            del self.running[run.key]
            self.stored[run.key] = {i: tuple(s.spans) for i, s in enumerate(run.samples) if not s.left_out}
        elif self.setup.together:
            return
        new = [index for index, sample in enumerate(run.samples) if sample.ended and index not in run.told]
        run.told.update(new)
        samples = [self._meta(run, index) for index in new if not run.samples[index].left_out]
        left_out = [(run.grant.ticket, i, run.grant.attempt) for i in new if run.samples[i].left_out]
        self._tell(run.grant.ticket, Finished(samples, self._counters(), left_out))

    def _meta(self, run: Run, index: int) -> SampleMeta:
        sample = run.samples[index]
        born = min(version for version, _ in sample.spans)
        tokens = sum(tokens for _, tokens in sample.spans)
        spans = tuple(sample.spans) if len(sample.spans) > 1 else ()
        return SampleMeta(run.grant.ticket, index, run.grant.attempt, born, PROMPT_TOKENS, tokens, sample.reward, spans)

    def _counters(self) -> GeneratorCounters:
        return GeneratorCounters(1, 1, 0.5, 1.0, 1.0, self.version)

    def _tell(self, ticket: int, message: Message) -> None:
        self._send(self.rank, ticket % self.setup.ledgers, message)
