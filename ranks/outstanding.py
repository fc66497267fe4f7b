"""One outstanding ticket, and what its attempts have brought."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from headrace.comm.messages import SampleMeta
from headrace.ranks.tickets import SavedGroup, SavedWork


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

    def has(self, sample: int) -> bool:
        return sample in self.samples or sample in self.left_out

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
