"""One ledger: the state machine that issues tickets and settles them. No I/O, no clock, no threads.

    number ──grant──▶ GRANTED ──started──▶ STARTED ──all samples──▶ FINISHED ──chosen──▶ CHOSEN ──end of step──▶ trained
       ▲                 │  │                 │  │                     │  ▲                │
       │                 │  └──── failed ─────┴──│──▶ failed           │  └─── undone ─────┤
       └──── lost ───────┴───────────────────────┴─────────────────────┴───────────────────┘ (only if undone)

A lost ticket goes back first in line, to be granted again as a new attempt.

A ledger owns the ticket numbers k ≡ index (mod number of ledgers). Each grant spends a credit; there are C in all
(`LedgerSpec.credits`), dealt round-robin over the ledgers at the start and, as groups are trained, at publications.
A ticket's deadline is `reserved + D`: `reserved` is the newest version published when it was granted and, once its
start is reported, the version that really began it.

Why staleness stays within the bound and nothing is dropped for age: let N(d) be the outstanding tickets with a deadline
≤ d. Before step v, N(d) ≤ (d - v + 1)·B is needed for every d. The newest class is bounded by C ≤ (D + 1)·B. An older
class only shrinks, since nobody grants with so old a version any more once every ledger has ended that step, and
`forming.choose` takes a batch only if what it leaves keeps the inequality. What several ledgers decide together is in
`forming.py`, how they talk in `node.py`.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum

from headrace.comm.messages import SampleMeta, TicketGrant
from headrace.ranks import forming
from headrace.ranks.forming import Standing
from headrace.ranks.tickets import FormedGroup, LedgerSpec, LedgerState, SavedGroup, TicketCounts, add_counts, require


class Stage(Enum):
    """Where an outstanding ticket is."""

    GRANTED = "granted"
    STARTED = "started"
    FINISHED = "finished"
    CHOSEN = "chosen"


@dataclass(slots=True)
class Work:
    """What one attempt has brought so far."""

    generator: int
    samples: dict[int, SampleMeta] = field(default_factory=dict)


@dataclass(slots=True)
class Ticket:
    """An outstanding ticket."""

    number: int
    attempt: int
    """The newest attempt."""
    live: int
    """The attempt that counts: the newest, or an older one whose late result finished the group."""
    reserved: int
    works: dict[int, Work]
    stage: Stage = Stage.GRANTED

    @property
    def generator(self) -> int:
        """Who works on it or holds it."""
        return self.works[self.live].generator

    @property
    def samples(self) -> list[SampleMeta]:
        found = self.works[self.live].samples
        return [found[index] for index in sorted(found)]

    @property
    def open(self) -> bool:
        return self.stage in (Stage.GRANTED, Stage.STARTED)


class Ledger:
    """The ledger number `index` of `ledgers`. `state`: that of the whole run that goes on, see `LedgerState.merge`."""

    def __init__(self, spec: LedgerSpec, index: int, ledgers: int, state: LedgerState | None = None) -> None:
        self.spec, self.index, self.ledgers = spec, index, ledgers
        self.step = 0
        """The step that is being formed or trained: so many have ended."""
        self.published = 0
        """The newest version published."""
        self.credits = 0
        self._oldest, self._most_credits = spec.oldest, spec.credits
        self._escrow = 0
        self._undealt = 0
        self._deal_next = 0
        self._fresh = index
        self._returned: list[tuple[int, int]] = []
        self._tickets: dict[int, Ticket] = {}
        self._parked: dict[int, int] = {}
        self._offered: dict[int, list[int]] = {}
        self._lost_offered: set[int] = set()
        self._issued = self._trained = self._dropped = self._superseded = 0
        self._failed: dict[str, int] = {}
        held = 0 if state is None else self._restore(state.readmit(spec))
        self._deal(spec.credits_at(self.step) - held)
        self._saved = self._save()

    # Asks and grants

    def ask(self, generator: int, room: int) -> None:
        """Park the generator's ask; `room` adds to what it asked for before."""
        require(room >= 1, f"rank {generator} asked for {room} groups")
        self._parked[generator] = self._parked.get(generator, 0) + room

    def grant(self) -> dict[int, list[TicketGrant]]:
        """Grant what parked asks, credits and numbers allow; generators take turns, one ticket each."""
        grants: dict[int, list[TicketGrant]] = {}
        while self.credits and self._parked and self.next_number is not None:
            generator = next(iter(self._parked))
            room = self._parked.pop(generator)
            if room > 1:
                self._parked[generator] = room - 1
            grants.setdefault(generator, []).append(self._issue(generator))
        return grants

    def unpark(self, room: int | None) -> dict[int, int]:
        """Take up to `room` parked asks (None: all) out again, by generator."""
        taken: dict[int, int] = {}
        left = self.parked if room is None else min(room, self.parked)
        while left:
            generator, parked = self._parked.popitem()
            taken[generator] = min(parked, left)
            left -= taken[generator]
            if parked > taken[generator]:
                self._parked[generator] = parked - taken[generator]
        return taken

    @property
    def parked(self) -> int:
        return sum(self._parked.values())

    @property
    def next_number(self) -> int | None:
        """The number that the next grant would be for; None if none is left."""
        if self._returned:
            return self._returned[0][0]
        end = self.spec.end_of_numbers(self.step)
        return self._fresh if end is None or self._fresh < end else None

    def _exists(self, number: int) -> bool:
        return self.spec.tickets is None or number < self.spec.tickets

    def _issue(self, generator: int) -> TicketGrant:
        number, attempt = self._take_number()
        self._issued += attempt == 0
        self.credits -= 1
        self._tickets[number] = Ticket(number, attempt, attempt, self.published, {attempt: Work(generator)})
        return TicketGrant(number, attempt, self.published)

    def _take_number(self) -> tuple[int, int]:
        """Returned tickets go first."""
        if self._returned:
            return heapq.heappop(self._returned)
        self._fresh += self.ledgers
        return self._fresh - self.ledgers, 0

    # Reports of generators

    def started(self, generator: int, number: int, attempt: int, born: int) -> None:
        """The first token of a granted group was sampled with version `born`."""
        ticket = self._tickets.get(number)
        if ticket is None or attempt != ticket.attempt or ticket.stage is not Stage.GRANTED:
            self._superseded += 1
            return
        require(generator == ticket.generator, f"rank {generator} started ticket {number} of rank {ticket.generator}")
        require(born >= ticket.reserved, f"rank {generator} began ticket {number} with {born} < {ticket.reserved}")
        ticket.reserved = born
        ticket.stage = Stage.STARTED

    def finished(self, generator: int, sample: SampleMeta) -> None:
        """A sample is finished; the last one finishes its group. What doesn't count is counted as superseded."""
        ticket = self._tickets.get(sample.ticket)
        if ticket is None or not self._counts(ticket, sample):
            self._superseded += 1
            return
        work = ticket.works.setdefault(sample.attempt, Work(generator))
        require(
            generator == work.generator, f"rank {generator} finished ticket {sample.ticket} of rank {work.generator}"
        )
        work.samples[sample.sample] = sample
        if len(work.samples) == self.spec.group_size:
            self._complete(ticket, sample.attempt)

    def failed(self, number: int, attempt: int, reason: str) -> None:
        """The group is given up for good: its credit is free, another ticket takes its place."""
        ticket = self._tickets.get(number)
        if ticket is None or attempt != ticket.attempt or not ticket.open:
            self._superseded += 1
            return
        self._failed = add_counts([self._failed, {reason: 1}])
        self._drop(ticket)

    def lost(self, generator: int) -> None:
        """The generator is gone: its asks are forgotten, its tickets go back, except those in the batch being trained,
        which go back only if the batch is undone."""
        self._parked.pop(generator, None)
        offered = {number for numbers in self._offered.values() for number in numbers}
        for ticket in list(self._tickets.values()):
            self._forget_late_work(ticket, generator)
            if ticket.generator != generator or ticket.stage is Stage.CHOSEN:
                continue
            if ticket.number in offered:
                self._lost_offered.add(ticket.number)
            else:
                self._return(ticket)

    def _counts(self, ticket: Ticket, sample: SampleMeta) -> bool:
        """Whether the sample is one that an unfinished ticket lacks."""
        if not ticket.open or not 0 <= sample.sample < self.spec.group_size or sample.attempt > ticket.attempt:
            return False
        work = ticket.works.get(sample.attempt)
        if work is not None and sample.sample in work.samples:
            return False
        if sample.attempt < ticket.attempt:
            return self._late_counts(ticket, sample)
        text = f"ticket {sample.ticket} sample {sample.sample}: born {sample.born}, granted {ticket.reserved}"
        require(sample.born >= ticket.reserved, text)
        return True

    def _late_counts(self, ticket: Ticket, sample: SampleMeta) -> bool:
        """A result of an older attempt is as good as one of the newest if it is young enough for the deadline."""
        return sample.born >= ticket.reserved

    def _complete(self, ticket: Ticket, attempt: int) -> None:
        """One attempt is whole. An old one may have become too old by the start of the newest since it began."""
        work = ticket.works[attempt]
        if attempt < ticket.attempt and not all(self._late_counts(ticket, s) for s in work.samples.values()):
            self._superseded += len(ticket.works.pop(attempt).samples)
            return
        ticket.works = {attempt: work}
        ticket.live = attempt
        ticket.stage = Stage.FINISHED

    def _forget_late_work(self, ticket: Ticket, generator: int) -> None:
        ticket.works = {a: work for a, work in ticket.works.items() if a == ticket.live or work.generator != generator}

    def _drop(self, ticket: Ticket) -> None:
        """No longer outstanding; its credit is free again."""
        del self._tickets[ticket.number]
        self.credits += 1

    def _return(self, ticket: Ticket) -> None:
        self._drop(ticket)
        heapq.heappush(self._returned, (ticket.number, ticket.attempt + 1))

    # Rounds

    def contribute(self, escrow: bool) -> Standing:
        """What the others get to know. The finished groups told of can't be withdrawn until `deliver`; with `escrow`
        the free credits can't be granted until then."""
        if escrow:
            self.credits, self._escrow = 0, self.credits
        self._offered = self._finished_by_deadline()
        number = self.next_number
        numbers = self._numbers_left()
        return Standing(
            step=self.step,
            finished={deadline: len(found) for deadline, found in self._offered.items()},
            unfinished=dict(Counter(self._deadline(t) for t in self._tickets.values() if t.open)),
            chosen=sum(t.stage is Stage.CHOSEN for t in self._tickets.values()),
            credits=self.credits + self._escrow,
            undealt=self._undealt,
            offer=self._escrow,
            wants=min(self.parked, numbers),
            numbers=numbers,
            next_number=-1 if number is None else number,
        )

    def deliver(self, gained: int, taken: Mapping[int, int] | None) -> list[FormedGroup]:
        """The result of the round: `gained` credits (negative: given away), and how many groups were chosen here by
        deadline (None: no step was formed). Returns the chosen groups, lost ones among them: see `lost_chosen`."""
        self.credits += self._escrow + gained
        self._escrow = 0
        chosen = [number for deadline, count in (taken or {}).items() for number in self._offered[deadline][:count]]
        self._offered = {}
        for number in chosen:
            self._tickets[number].stage = Stage.CHOSEN
        for number in sorted(self._lost_offered.difference(chosen)):
            self._return(self._tickets[number])
        self._lost_offered.intersection_update(chosen)
        return [self._formed(self._tickets[number]) for number in sorted(chosen)]

    @property
    def lost_chosen(self) -> set[int]:
        """Tickets that were chosen though their generator had been lost meanwhile: the step must be undone."""
        return self._lost_offered

    def undo(self, lost: Collection[int]) -> None:
        """The chosen groups are finished again, except the lost ones, which go back."""
        for ticket in self._tickets.values():
            if ticket.stage is Stage.CHOSEN:
                ticket.stage = Stage.FINISHED
        for number in lost:
            if number in self._tickets and self._tickets[number].stage is Stage.FINISHED:
                self._return(self._tickets[number])
        self._lost_offered = set()

    def _deadline(self, ticket: Ticket) -> int:
        return ticket.reserved + self._oldest

    def _finished_by_deadline(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for ticket in self._tickets.values():
            if ticket.stage is Stage.FINISHED:
                found.setdefault(self._deadline(ticket), []).append(ticket.number)
        return {deadline: sorted(numbers) for deadline, numbers in found.items()}

    def _numbers_left(self) -> int:
        """Counted up to C: more can't be granted."""
        end = self.spec.end_of_numbers(self.step)
        if end is None:
            return self._most_credits
        fresh = max(0, -((self._fresh - end) // self.ledgers))
        return min(self._most_credits, len(self._returned) + fresh)

    def _formed(self, ticket: Ticket) -> FormedGroup:
        born = min(sample.born for sample in ticket.samples)
        deadline = self._deadline(ticket)
        return FormedGroup(ticket.number, ticket.live, ticket.generator, self.index, -1, born, deadline, ticket.samples)

    # Steps

    def end_step(self, trained: int, published: bool) -> None:
        """The step in training has ended, with `trained` groups over all ledgers; those chosen here are settled.

        Each trained group earns a credit, as far as the rest of the run needs one (after a short batch, the last, what
        was earned may be less than nothing)."""
        for ticket in [t for t in self._tickets.values() if t.stage is Stage.CHOSEN]:
            del self._tickets[ticket.number]
            self._trained += 1
        spent = self.spec.credits_at(self.step) - self.spec.credits_at(self.step + 1)
        self._undealt += trained - spent
        self.step += 1
        if published:
            self.published = self.step
            earned = max(0, self._undealt)
            self._undealt -= earned
            self._deal(earned)
        self._saved = self._save()

    def _deal(self, credits: int) -> None:
        """Credits for all ledgers, one each in turn, from where the last deal stopped: every ledger counts alike."""
        shares = forming.deal(credits, [credits] * self.ledgers, self._deal_next)
        self.credits += shares[self.index]
        self._deal_next = (self._deal_next + credits) % self.ledgers

    # What is counted and saved

    def counts(self) -> TicketCounts:
        """Running totals of this ledger, over restarts too; after a resume ledger 0 carries those of before."""
        return TicketCounts(
            issued=self._issued,
            trained=self._trained,
            dropped=self._dropped,
            failed=sum(self._failed.values()),
            outstanding=len(self._tickets),
            returned=sum(attempt > 0 for _, attempt in self._returned),
            superseded=self._superseded,
            failed_reasons=dict(self._failed),
        )

    def state(self) -> LedgerState:
        """As of the last end of step, or of the start."""
        return self._saved

    def waiting(self) -> dict[int, list[int]]:
        """Generator → its unfinished tickets that are due by this step, or, if none is due, all unfinished ones."""
        unfinished = [t for t in self._tickets.values() if t.open]
        due = [t for t in unfinished if self._deadline(t) <= self.step]
        found: dict[int, list[int]] = {}
        for ticket in sorted(due or unfinished, key=lambda t: t.number):
            found.setdefault(ticket.generator, []).append(ticket.number)
        return found

    def check(self) -> None:
        """Raise `LedgerRuleError` unless everything that this ledger can know of the rules holds."""
        require(self.counts().balanced, f"ledger {self.index}: {self.counts()}")
        require(self.credits >= 0 and self._escrow >= 0, f"ledger {self.index}: credits < 0")
        returned = {number for number, _ in self._returned}
        require(len(returned) == len(self._returned), f"ledger {self.index}: a number waits twice")
        require(returned.isdisjoint(self._tickets), f"ledger {self.index}: a number waits that is outstanding")
        for ticket in self._tickets.values():
            text = f"ledger {self.index} at step {self.step}: ticket {ticket.number} is due at {self._deadline(ticket)}"
            require(self._deadline(ticket) >= self.step, text)

    def _save(self) -> LedgerState:
        outstanding = self._tickets.values()
        done = [t for t in outstanding if not t.open]
        running = [(t.number, t.attempt + 1) for t in outstanding if t.open]
        return LedgerState(
            step=self.step,
            ledgers=self.ledgers,
            next_numbers=[(self.index, self._fresh)],
            finished=[SavedGroup(t.number, t.attempt, t.generator, t.reserved, t.samples) for t in done],
            returned=sorted([*self._returned, *running]),
            issued=self._issued,
            trained=self._trained,
            dropped=self._dropped,
            failed=dict(self._failed),
            superseded=self._superseded,
        )

    def _restore(self, whole: LedgerState) -> int:
        """Take this ledger's part of the whole run's state; return how many tickets are outstanding over all."""
        self.step = self.published = whole.step
        first = whole.next_fresh
        self._fresh = first + (self.index - first) % self.ledgers
        numbers = [*whole.returned, *((number, 0) for number in whole.unissued() if self._exists(number))]
        self._returned = [pair for pair in numbers if pair[0] % self.ledgers == self.index]
        heapq.heapify(self._returned)
        for group in whole.finished:
            if group.ticket % self.ledgers == self.index:
                self._tickets[group.ticket] = _readmitted(group)
        self._issued = len(self._tickets) + sum(attempt > 0 for _, attempt in self._returned)
        if self.index == 0:
            self._issued += whole.trained + whole.dropped + sum(whole.failed.values())
            self._trained, self._dropped, self._failed = whole.trained, whole.dropped, dict(whole.failed)
            self._superseded = whole.superseded
        return len(whole.finished)


def _readmitted(group: SavedGroup) -> Ticket:
    work = Work(group.owner, {sample.sample: sample for sample in group.samples})
    live = group.samples[0].attempt
    return Ticket(group.ticket, group.attempt, live, group.reserved, {live: work}, Stage.FINISHED)
