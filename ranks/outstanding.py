"""The outstanding tickets of a ledger, and what their attempts have brought.

    Outstanding ── by number ──▶ Ticket ── by attempt ──▶ Work ── by sample ──▶ SampleMeta

Several attempts at one ticket may be at work: its generator was taken for lost, the ticket was granted to another, and
the first goes on. The first attempt that is whole, and young enough, makes the group; results of the others are late.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from headrace.comm.messages import SampleMeta
from headrace.ranks.tickets import LedgerRuleError, SavedGroup, SavedWork, require

Key = tuple[int, int]
"""(ticket, attempt)."""


class Stage(Enum):
    """Where an outstanding ticket is."""

    GRANTED = "granted"
    STARTED = "started"
    FINISHED = "finished"
    CHOSEN = "chosen"


OPEN = (Stage.GRANTED, Stage.STARTED)


@dataclass(slots=True)
class Work:
    """What one attempt has brought so far."""

    generator: int
    samples: dict[int, SampleMeta] = field(default_factory=dict)
    left_out: set[int] = field(default_factory=set)
    """Samples that ended without data."""

    @property
    def settled(self) -> int:
        """How many samples have ended, with or without data."""
        return len(self.samples) + len(self.left_out)


@dataclass(slots=True)
class Ticket:
    """An outstanding ticket."""

    number: int
    attempt: int
    """The newest attempt."""
    live: int
    """The attempt that counts: the newest, or an older one whose late result finished the group."""
    reserved: int
    """The version that its deadline is counted from."""
    floor: int
    """No token of it may be older; `reserved`, unless `overdue: mask` has moved the deadline."""
    works: dict[int, Work]
    since: int = 0
    """Results of attempts before this one don't count: their owners were told to forget them."""
    stage: Stage = Stage.GRANTED
    overdue: bool = False
    """Its generator was told that it is overdue."""

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
        return self.stage in OPEN

    def take(self, generator: int, results: Sequence[SampleMeta], start: int, size: int) -> tuple[int, int]:
        """Keep what counts of the results of one attempt, which begin at `start`, for a group of `size`; returns where
        they end and how many of them don't count. A result of an older attempt is as good as one of the newest if it
        is young enough for the deadline."""
        number, attempt, floor, refused = self.number, results[start].attempt, self.floor, 0
        work = self.works.get(attempt) or Work(generator)
        have, left_out = work.samples, work.left_out
        for end in range(start, len(results)):  # most of a ledger's work: nothing is called here that needn't be
            result = results[end]
            if result.ticket != number or result.attempt != attempt:
                break
            sample = result.sample
            if not 0 <= sample < size or sample in have or sample in left_out:
                refused += 1
            elif result.born < floor:
                self._check_older(attempt, result)
                refused += 1
            else:
                have[sample] = result
        else:
            end = len(results)
        if refused < end - start:
            self._check_owner(work, generator)
            self.works[attempt] = work
        return end, refused

    def is_whole(self, attempt: int, size: int) -> bool:
        """Whether the attempt has brought a result of every sample."""
        work = self.works.get(attempt)
        return work is not None and work.settled == size

    def leave_out(self, generator: int, attempt: int, sample: int, size: int) -> bool:
        """A sample ends without data; returns whether that counts."""
        if not self.expects(attempt) or not 0 <= sample < size:
            return False
        work = self.works.setdefault(attempt, Work(generator))
        self._check_owner(work, generator)
        if sample in work.samples or sample in work.left_out:
            return False
        work.left_out.add(sample)
        return True

    def expects(self, attempt: int) -> bool:
        """It is unfinished, and this attempt may finish it."""
        return self.stage in OPEN and self.since <= attempt <= self.attempt

    def _check_older(self, attempt: int, result: SampleMeta) -> None:
        """Only results of an attempt before the newest may be too old."""
        sample, born = result.sample, result.born
        require(attempt != self.attempt, f"ticket {self.number} sample {sample}: born {born}, granted {self.floor}")

    def _check_owner(self, work: Work, generator: int) -> None:
        if generator != work.generator:
            raise LedgerRuleError(f"rank {generator} finished ticket {self.number} of rank {work.generator}")

    def is_late(self, work: Work) -> bool:
        """What was young enough when it came may have become too old by the start of a newer attempt."""
        return any(sample.born < self.floor for sample in work.samples.values())

    def forget_late_work(self, generator: int) -> None:
        """Of older attempts that this generator makes."""
        self.works = {a: work for a, work in self.works.items() if a == self.live or work.generator != generator}


class Outstanding:
    """The outstanding tickets of one ledger, counted by deadline. `oldest`: D, so many steps after the version that it
    is counted from a ticket is due."""

    def __init__(self, oldest: int) -> None:
        self.tickets: dict[int, Ticket] = {}
        self.finished: Counter[int] = Counter()
        self.unfinished: Counter[int] = Counter()
        """Deadline → how many; zeros aren't removed before `end_step`."""
        self.chosen = 0
        """Those in the step being trained."""
        self._oldest = oldest

    def deadline(self, ticket: Ticket) -> int:
        """The last step that may train it."""
        return ticket.reserved + self._oldest

    def has(self, number: int, attempt: int) -> bool:
        """Whether the ticket is outstanding with this as its newest attempt."""
        return number in self.tickets and self.tickets[number].attempt == attempt

    def add(self, ticket: Ticket) -> None:
        self.tickets[ticket.number] = ticket
        self._tally(ticket, 1)

    def remove(self, ticket: Ticket) -> None:
        del self.tickets[ticket.number]
        self._tally(ticket, -1)

    def move(self, ticket: Ticket, stage: Stage, reserved: int) -> None:
        """The ticket gets to a stage, or gets another deadline."""
        if reserved == ticket.reserved and stage in OPEN and ticket.stage in OPEN:
            ticket.stage = stage  # counted as before
            return
        self._tally(ticket, -1)
        ticket.stage, ticket.reserved = stage, reserved
        self._tally(ticket, 1)

    def end_step(self) -> int:
        """Remove the chosen tickets; returns how many those were."""
        ended = self.chosen
        for ticket in [t for t in self.tickets.values() if t.stage is Stage.CHOSEN]:
            self.remove(ticket)
        self.finished, self.unfinished = +self.finished, +self.unfinished
        return ended

    def finished_by_deadline(self) -> dict[int, list[int]]:
        """Deadline → numbers of the finished tickets, in the order in which they are to be chosen."""
        found: dict[int, list[int]] = {}
        for ticket in self.tickets.values():
            if ticket.stage is Stage.FINISHED:
                found.setdefault(self.deadline(ticket), []).append(ticket.number)
        return {deadline: sorted(numbers) for deadline, numbers in found.items()}

    def open_by_deadline(self) -> dict[int, list[Key]]:
        """Deadline → unfinished tickets, in the order in which they are struck."""
        found: dict[int, list[Key]] = {}
        for ticket in self.tickets.values():
            if ticket.open:
                found.setdefault(self.deadline(ticket), []).append((ticket.number, ticket.attempt))
        return {deadline: sorted(keys) for deadline, keys in found.items()}

    def by_generator(self, due: int) -> dict[int, list[int]]:
        """Generator → its unfinished tickets that are due by this step, or, if none is due, all unfinished ones."""
        unfinished = [t for t in self.tickets.values() if t.open]
        urgent = [t for t in unfinished if self.deadline(t) <= due]
        found: dict[int, list[int]] = {}
        for ticket in sorted(urgent or unfinished, key=lambda t: t.number):
            found.setdefault(ticket.generator, []).append(ticket.number)
        return found

    def check(self, step: int, name: str) -> None:
        """Raise `LedgerRuleError` unless the counts are right and nothing should have been trained before `step`."""
        finished = {deadline: len(numbers) for deadline, numbers in self.finished_by_deadline().items()}
        unfinished = {deadline: len(keys) for deadline, keys in self.open_by_deadline().items()}
        for counts, found in ((self.finished, finished), (self.unfinished, unfinished)):
            counted = {deadline: count for deadline, count in counts.items() if count}
            require(counted == found, f"{name} counted {counted} by deadline, not {found}")
        for ticket in self.tickets.values():
            text = f"{name} at step {step}: ticket {ticket.number} is due at {self.deadline(ticket)}"
            require(self.deadline(ticket) >= step, text)

    def _tally(self, ticket: Ticket, sign: int) -> None:
        stage = ticket.stage
        if stage is Stage.CHOSEN:
            self.chosen += sign
        else:
            counts = self.unfinished if stage in OPEN else self.finished
            counts[ticket.reserved + self._oldest] += sign


def readmitted(group: SavedGroup) -> Ticket:
    """A finished group of an earlier run, whose data are still there."""
    work = Work(group.owner, {sample.sample: sample for sample in group.samples})
    live = group.samples[0].attempt
    floor = min(sample.born for sample in group.samples)
    return Ticket(group.ticket, group.attempt, live, group.reserved, floor, {live: work}, stage=Stage.FINISHED)


def resumed(work: SavedWork) -> Ticket:
    """A group of an earlier run that its owner goes on with."""
    works = {work.attempt: Work(work.owner)}
    return Ticket(work.ticket, work.attempt, work.attempt, work.reserved, work.born, works, stage=Stage.STARTED)


def saved(ticket: Ticket) -> SavedGroup:
    """What `readmitted` makes the ticket of again."""
    return SavedGroup(ticket.number, ticket.attempt, ticket.generator, ticket.reserved, ticket.samples)
