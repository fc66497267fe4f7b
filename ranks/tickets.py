"""The plain data of the ledger: its numbers, what is saved of it, what it counts, what it hands to a trainer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from fractions import Fraction
from functools import cache
from math import ceil, floor
from typing import Literal

import msgspec

from headrace.comm.messages import SampleMeta
from headrace.ranks.forming import in_time

Overdue = Literal["wait", "cut", "mask", "drop"]

OVERDUE = "overdue"
NO_VARIANCE = "no_variance"
"""Reasons for which groups are dropped."""


class LedgerRuleError(AssertionError):
    """The ledger, or a rank that speaks to it, broke its own rules: a defect of the program, never of the user."""


def require(condition: bool, text: str) -> None:
    """Raise `LedgerRuleError` unless the condition holds; unlike `assert` it can't be switched off."""
    if not condition:
        raise LedgerRuleError(text)


class LedgerSpec(msgspec.Struct, frozen=True):
    """The numbers that all ledgers of a run share."""

    groups_per_step: int
    """B: groups in one optimizer step."""
    max_staleness: float
    """S: largest age of a trained token, in publications."""
    publish_every: int
    """p: optimizer steps per publication."""
    group_size: int
    """Samples in a group."""
    steps: int
    """Optimizer steps of the run."""
    tickets: int | None = None
    """How many ticket numbers there are (size of the dataset times epochs); None means no end."""
    in_order: bool = False
    """Step v trains tickets vB … vB + B - 1, whatever the timing of asks: for equal bits. Only with S = 0, p = 1."""
    overdue: Overdue = "wait"
    """What happens to groups that are due and unfinished while the others would make a step; see `forming.decide`."""
    by_sample: bool = False
    """`drop` leaves out the unfinished samples of a due group and trains the others."""
    attention_length: int | None = None
    """Length of a sequence, in tokens, whose attention costs as much as all else; None: attention isn't counted when a
    batch is divided over the replicas."""
    filtered_per_step: int = 0
    """Most groups without reward variance that are dropped per step, over all ledgers; 0 drops none."""

    def end_of_numbers(self, step: int) -> int | None:
        """Tickets from this number on can't be granted while `step` is formed; None means that all can."""
        window = (step + 1) * self.groups_per_step
        if not self.in_order:
            return self.tickets
        return window if self.tickets is None else min(window, self.tickets)

    @property
    def credits(self) -> int:
        """C = floor((1 + S)·p·B): the most groups between grant and the end of the step that trains them."""
        return floor(_periods(self.max_staleness) * self.publish_every * self.groups_per_step)

    @property
    def oldest(self) -> int:
        """D = ceil((1 + S)·p) - 1: the largest age of a trained token, in optimizer steps."""
        return ceil(_periods(self.max_staleness) * self.publish_every) - 1

    def credits_at(self, step: int) -> int:
        """Credits plus outstanding tickets before `step`: no more than the rest of the run needs."""
        return max(0, min(self.credits, (self.steps - step) * self.groups_per_step))


@cache
def _periods(max_staleness: float) -> Fraction:
    """1 + S, exact: 0.1 means a tenth, so that floor and ceil don't depend on rounding."""
    return 1 + Fraction(str(max_staleness))


class TicketCounts(msgspec.Struct, frozen=True, array_like=True):
    """Running totals: issued = trained + dropped + failed + outstanding + returned."""

    issued: int
    """Distinct numbers ever granted."""
    trained: int
    dropped: int
    failed: int
    outstanding: int
    """From grant to the end of the step that trains it."""
    returned: int
    """Granted before, waiting to be granted again."""
    superseded: int
    """Reports that count for nothing: of an old attempt, of a settled or unknown ticket, repeated, out of range."""
    dropped_reasons: dict[str, int]
    failed_reasons: dict[str, int]

    def __add__(self, other: TicketCounts) -> TicketCounts:
        return TicketCounts(
            issued=self.issued + other.issued,
            trained=self.trained + other.trained,
            dropped=self.dropped + other.dropped,
            failed=self.failed + other.failed,
            outstanding=self.outstanding + other.outstanding,
            returned=self.returned + other.returned,
            superseded=self.superseded + other.superseded,
            dropped_reasons=add_counts([self.dropped_reasons, other.dropped_reasons]),
            failed_reasons=add_counts([self.failed_reasons, other.failed_reasons]),
        )

    @property
    def balanced(self) -> bool:
        return self.issued == self.trained + self.dropped + self.failed + self.outstanding + self.returned


class FormedGroup(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One group of a formed step: all that every replica needs to know of it."""

    ticket: int
    attempt: int
    owner: int
    """World rank of the generator that holds its data."""
    ledger: int
    """Index of the ledger that settles it."""
    replica: int
    """Index of the trainer replica that trains it."""
    deadline: int
    """The last step that may train it."""
    born: int
    """Oldest version among its tokens in the loss."""
    samples: int
    """Samples with data: the group's size, but for those that were left out."""
    tokens: int
    """Of prompts and responses."""
    response_tokens: int
    longest: int
    """Tokens of the longest response."""
    loss_tokens: int
    """Response tokens in the loss; with `overdue: mask` those that are young enough."""
    sequences: int
    """Samples with a token in the loss."""
    reward_sum: float
    cost: int = 0
    """Of training it, in tokens of a short sequence; see `cost_of`."""


def cost_of(tokens: int, attention_length: int | None) -> int:
    """Floating-point operations of a sequence, in units of those of a token without attention: n + n²/L, since
    attention's grow with the square of its length n (Kaplan et al. 2020, table 1). `attention_length`: L."""
    return tokens if attention_length is None else tokens + tokens * tokens // attention_length


def formed_group(
    ticket: int,
    owner: int,
    ledger: int,
    deadline: int,
    samples: Sequence[SampleMeta],
    attention_length: int | None,
    oldest: int,
) -> FormedGroup:
    """What is to be known of a group of these samples. Tokens of versions before `oldest` aren't in the loss."""
    lengths = [sample.prompt_tokens + sample.response_tokens for sample in samples]
    in_loss = [sample.tokens_since(oldest) for sample in samples]
    return FormedGroup(
        ticket=ticket,
        attempt=samples[0].attempt,
        owner=owner,
        ledger=ledger,
        replica=-1,
        deadline=deadline,
        born=min((s.born_since(oldest) for s, tokens in zip(samples, in_loss, strict=True) if tokens), default=oldest),
        samples=len(samples),
        tokens=sum(lengths),
        response_tokens=sum(sample.response_tokens for sample in samples),
        longest=max(sample.response_tokens for sample in samples),
        loss_tokens=sum(in_loss),
        sequences=sum(tokens > 0 for tokens in in_loss),
        reward_sum=sum(sample.reward for sample in samples),
        cost=sum(cost_of(length, attention_length) for length in lengths),
    )


class FormedStep(msgspec.Struct, frozen=True):
    """The batch of one optimizer step, the same on all ledgers."""

    step: int
    formation: int
    """0, and one more every time that this step was undone and formed again."""
    groups: list[FormedGroup]
    """All of the batch, ordered by ticket."""
    finished: bool
    """The run is over: no groups, and none to come."""


class SavedGroup(msgspec.Struct, frozen=True):
    """A finished group that wasn't trained yet when the ledger was saved."""

    ticket: int
    attempt: int
    owner: int
    reserved: int
    """What its deadline is counted from."""
    samples: list[SampleMeta]
    """Those with data; fewer than the group's size where some were left out."""

    @property
    def newest_born(self) -> int:
        return max(sample.born for sample in self.samples)

    def counted_for(self, spec: LedgerSpec) -> SavedGroup:
        """With the deadline that the run which goes on sees: only one that masks tokens can train them late."""
        if spec.overdue == "mask":
            return self
        born = min(sample.born for sample in self.samples)
        return msgspec.structs.replace(self, reserved=min(self.reserved, born))


class SavedWork(msgspec.Struct, frozen=True):
    """A group that was at work when the run was stopped, and whose tokens so far are kept."""

    ticket: int
    attempt: int
    owner: int
    reserved: int
    born: int
    """Oldest version among its tokens."""

    @property
    def newest_born(self) -> int:
        return self.born


class LedgerState(msgspec.Struct, frozen=True):
    """What is saved of one ledger at an end of step, or of all of them when merged; plain data that goes into JSON.

    Credits aren't in it: they follow from the rest (`LedgerSpec.credits_at`), whatever S and B the run goes on with.
    """

    step: int
    """Steps ended; the next to be formed."""
    ledgers: int
    """How many ledgers the run had."""
    next_numbers: list[tuple[int, int]]
    """(ledger index, its lowest number that was never granted and isn't in `returned`)."""
    finished: list[SavedGroup]
    returned: list[tuple[int, int]]
    """(number, attempt of its next grant): what was running or returned; attempt 0 was never granted."""
    issued: int
    trained: int
    dropped: dict[str, int]
    failed: dict[str, int]
    superseded: int
    working: list[SavedWork] = []
    """Groups that go on where they were; only in a state that a run goes on from, see `ranks.resume`."""

    @staticmethod
    def merge(states: Sequence[LedgerState], owners: Mapping[int, int] | None = None) -> LedgerState:
        """The state of the whole run from those of all its ledgers at the same step, in any order.

        Every ledger of the run that goes on gets it whole, however many they are. `owners` (ticket → world rank) says
        which finished groups' data still exist and who holds them now; all other groups go back as numbers.
        """
        first = states[0]
        require(
            all(s.step == first.step for s in states), f"states of steps {sorted(s.step for s in states)} don't mix"
        )
        numbers = sorted(pair for s in states for pair in s.next_numbers)
        indices = [index for index, _ in numbers]
        require(indices == list(range(first.ledgers)), f"saved ledgers {indices} of {first.ledgers}")
        whole = LedgerState(
            step=first.step,
            ledgers=first.ledgers,
            next_numbers=numbers,
            finished=sorted((g for s in states for g in s.finished), key=lambda group: group.ticket),
            returned=sorted(pair for s in states for pair in s.returned),
            issued=sum(s.issued for s in states),
            trained=sum(s.trained for s in states),
            dropped=add_counts([s.dropped for s in states]),
            failed=add_counts([s.failed for s in states]),
            superseded=sum(s.superseded for s in states),
        )
        held = owners or {}
        return whole._keeping(
            [msgspec.structs.replace(g, owner=held[g.ticket]) for g in whole.finished if g.ticket in held]
        )

    def readmit(self, spec: LedgerSpec) -> LedgerState:
        """Leave as finished, or at work, what can still be trained in time under `spec`: by order of deadline, as long
        as for every d at most (d - step + 1)·B are due by d, and within the credits. The rest goes back as numbers."""
        kept: list[SavedGroup | SavedWork] = []
        due: Counter[int] = Counter()
        groups: list[SavedGroup | SavedWork] = [g.counted_for(spec) for g in self.finished]
        groups += self.working
        for group in sorted(groups, key=lambda g: (g.reserved, g.ticket)):
            trial = due + Counter([group.reserved + spec.oldest])
            fits = len(kept) < spec.credits_at(self.step) and group.newest_born <= self.step
            if fits and in_time(trial, self.step - 1, spec.groups_per_step):
                due = trial
                kept.append(group)
        return self._keeping(kept)

    def _keeping(self, kept: Collection[SavedGroup | SavedWork]) -> LedgerState:
        """With only these groups; the others go back."""
        tickets = {group.ticket for group in kept}
        groups: list[SavedGroup | SavedWork] = [*self.finished, *self.working]
        gone = [group for group in groups if group.ticket not in tickets]
        return msgspec.structs.replace(
            self,
            finished=[group for group in kept if isinstance(group, SavedGroup)],
            working=[group for group in kept if isinstance(group, SavedWork)],
            returned=sorted([*self.returned, *((group.ticket, group.attempt + 1) for group in gone)]),
        )

    def unissued(self) -> list[int]:
        """Numbers that were never granted though higher ones were, by another ledger; a whole state only."""
        lowest = dict(self.next_numbers)
        numbers = range(min(lowest.values()), self.next_fresh)
        return [number for number in numbers if number >= lowest[number % self.ledgers]]

    @property
    def next_fresh(self) -> int:
        """From here on no number was ever granted."""
        return max(number for _, number in self.next_numbers)


def add_counts(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for count in counts:
        for reason, number in count.items():
            total[reason] = total.get(reason, 0) + number
    return total
