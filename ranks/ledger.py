"""One ledger: the state machine that issues tickets and settles them. No I/O, no clock, no threads.

    number ──grant──▶ GRANTED ──started──▶ STARTED ──all samples──▶ FINISHED ──chosen──▶ CHOSEN ──end of step──▶ trained
       ▲                 │  │                 │  │                     │  ▲                │
       │                 │  └──── failed ─────┴──│──▶ failed           │  └─── undone ─────┤
       │                 ├──── overdue ───────┬──│──▶ dropped ◀────────┤ overdue            │
       │                 │                    │  │       ▲ no variance │                   │
       └──── lost ───────┴────────────────────┴──┴───────┴─────────────┴───────────────────┘ (only if undone)

A lost ticket, and one that its generator returns, goes back first in line, to be granted again as a new attempt. A
ledger owns the ticket numbers k ≡ index (mod number of ledgers). Its parts:

    asks.py    numbers.py    credits.py ──▶ a grant needs one of each
    outstanding.py ───────────────────────▶ the tickets from grant to end, their attempts, their counts by deadline
    notices.py ───────────────────────────▶ which of its groups a generator is told to end or to forget
    totals.py    tickets.py ──────────────▶ what is counted; plain data: what is formed, what is saved

A ticket's deadline is `reserved + D`: `reserved` is the newest version published when it was granted and, once its
start is reported, the version that really began it.

Why staleness stays within the bound and nothing is dropped for age: docs/ledger.md. What several ledgers decide
together is in `forming.py`, how they talk in `node.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from headrace.comm.messages import SampleMeta, TicketGrant
from headrace.ranks import forming
from headrace.ranks.asks import Asks
from headrace.ranks.credits import Credits
from headrace.ranks.forming import Standing
from headrace.ranks.notices import Notices
from headrace.ranks.numbers import Numbers
from headrace.ranks.outstanding import Key, Outstanding, Stage, Ticket, Work, readmitted, resumed, saved
from headrace.ranks.tickets import (
    NO_VARIANCE,
    OVERDUE,
    FormedGroup,
    LedgerRuleError,
    LedgerSpec,
    LedgerState,
    TicketCounts,
    formed_group,
    require,
)
from headrace.ranks.totals import Totals


class Ledger:
    """The ledger number `index` of `ledgers`. `state`: that of the whole run that goes on, see `LedgerState.merge`."""

    def __init__(self, spec: LedgerSpec, index: int, ledgers: int, state: LedgerState | None = None) -> None:
        self.spec, self.index, self.ledgers = spec, index, ledgers
        self.step = 0
        """The step that is being formed or trained: so many have ended."""
        self.published = 0
        """The newest version published."""
        self.changes = 0
        """So often has something happened that other ledgers may wait for."""
        self.lost_chosen: set[int] = set()
        """Tickets that were chosen though their generator had been lost meanwhile: the step must be undone. While a
        round goes on: lost ones that the others were told are finished."""
        self.asks = Asks()
        self._numbers = Numbers(spec, index, ledgers)
        self._credits = Credits(spec, index, ledgers)
        self._outstanding = Outstanding(spec.oldest)
        self.notices = Notices()
        self._totals = Totals()
        self._tickets = self._outstanding.tickets
        self._void: dict[int, int] = {}
        """Returned number → the attempt before which none counts."""
        self._offered: dict[int, list[int]] = {}
        self._told_open: dict[int, list[Key]] = {}
        self._may_filter = self._filter_share()
        held = 0 if state is None else self._restore(state.readmit(spec))
        self._credits.deal(spec.credits_at(self.step) - held)
        self._saved = self._save()

    # Asks and grants

    def ask(self, generator: int, room: int) -> None:
        """Park the generator's ask; see `Asks.add`."""
        self.asks.add(generator, room)

    def grant(self) -> dict[int, list[TicketGrant]]:
        """Grant what parked asks, credits and numbers allow; generators take turns, one ticket each."""
        grants: dict[int, list[TicketGrant]] = {}
        while self._credits.free and self.asks.parked and self.next_number is not None:
            generator = self.asks.next()
            grants.setdefault(generator, []).append(self._issue(generator))
        return grants

    @property
    def parked(self) -> int:
        """For how many groups asks are parked."""
        return self.asks.room

    @property
    def credits(self) -> int:
        """Those that a grant may spend now."""
        return self._credits.free

    @property
    def next_number(self) -> int | None:
        """The number that the next grant would be for; None if none is left."""
        return self._numbers.next(self.step)

    def _issue(self, generator: int) -> TicketGrant:
        number, attempt = self._numbers.take()
        self._totals.issued += attempt == 0
        self._credits.free -= 1
        works = {attempt: Work(generator)}
        since = self._void.pop(number, 0)
        self._outstanding.add(Ticket(number, attempt, attempt, self.published, self.published, works, since))
        return TicketGrant(number, attempt, self.published)

    # Reports of generators

    def started(self, generator: int, number: int, attempt: int, born: int) -> None:
        """The first token of a granted group was sampled with version `born`."""
        ticket = self._open(number, attempt)
        if ticket is None or ticket.stage is not Stage.GRANTED:
            self._totals.superseded += 1
            return
        if generator != ticket.generator or born < ticket.floor:
            owner = f"granted to rank {ticket.generator} with {ticket.floor}"
            raise LedgerRuleError(f"rank {generator} started ticket {number}, {owner}, with {born}")
        ticket.floor = born
        self._move(ticket, Stage.STARTED, max(born, ticket.reserved))

    def finished(self, generator: int, *samples: SampleMeta) -> None:
        """Samples are finished; the last one finishes its group. What doesn't count is counted as superseded."""
        size, start = self.spec.group_size, 0
        while start < len(samples):
            number, attempt = samples[start].ticket, samples[start].attempt
            ticket = self._tickets.get(number)
            if ticket is None or not ticket.expects(attempt):
                self._supersede(generator, number, attempt)
                start += 1
                continue
            end, refused = ticket.take(generator, samples, start, size)
            if ticket.is_whole(attempt, size):
                self._complete(ticket, attempt)
            for _ in range(refused):
                self._supersede(generator, number, attempt)
            start = end

    def left_out(self, generator: int, number: int, sample: int, attempt: int) -> None:
        """A sample of a group that was cut ends without data."""
        ticket = self._tickets.get(number)
        if ticket is None or not ticket.leave_out(generator, attempt, sample, self.spec.group_size):
            self._supersede(generator, number, attempt)
        elif ticket.is_whole(attempt, self.spec.group_size):
            self._complete(ticket, attempt)

    def failed(self, number: int, attempt: int, reason: str) -> None:
        """The group is given up for good: its credit is free, another ticket takes its place."""
        ticket = self._open(number, attempt)
        if ticket is None:
            self._totals.superseded += 1
            return
        self._totals.fail(reason)
        self.notices.drop_all(ticket, but=ticket.attempt)
        self._settle(ticket)

    def returned(self, generator: int, number: int, attempt: int) -> None:
        """The generator hands a group back that it hasn't begun."""
        ticket = self._open(number, attempt)
        if ticket is None:
            self._totals.superseded += 1
            return
        require(generator == ticket.generator, f"rank {generator} returned ticket {number} of rank {ticket.generator}")
        self._return(ticket)

    def lost(self, generator: int) -> int:
        """The generator is gone, or taken for it: its asks are forgotten (returns how many those were), its tickets go
        back, except those in the batch being trained, which go back only if the batch is undone."""
        if generator in self.asks.absent:
            return 0
        offered = {number for numbers in self._offered.values() for number in numbers}
        for ticket in list(self._tickets.values()):
            ticket.forget_late_work(generator)
            if ticket.generator != generator or ticket.stage is Stage.CHOSEN:
                continue
            if ticket.number in offered:
                self.lost_chosen.add(ticket.number)
            else:
                self._return(ticket)
        return self.asks.lost(generator)

    def _open(self, number: int, attempt: int) -> Ticket | None:
        """The unfinished ticket with this as its newest attempt."""
        ticket = self._tickets.get(number)
        return ticket if ticket is not None and attempt == ticket.attempt and ticket.open else None

    def _complete(self, ticket: Ticket, attempt: int) -> None:
        """An attempt is whole."""
        work = ticket.works[attempt]
        if attempt != ticket.attempt and ticket.is_late(work):
            self._totals.superseded += work.settled
            del ticket.works[attempt]
            self.notices.drop(work.generator, ticket.number, attempt)
            return
        if len(ticket.works) > 1:
            self.notices.drop_all(ticket, but=attempt)
            ticket.works = {attempt: work}
        ticket.live = attempt
        self._move(ticket, Stage.FINISHED, ticket.reserved)
        if not work.samples:
            self._drop(ticket, OVERDUE)
        elif self._may_filter and len({sample.reward for sample in work.samples.values()}) == 1:
            self._may_filter -= 1
            self._drop(ticket, NO_VARIANCE)

    def _supersede(self, generator: int, number: int, attempt: int) -> None:
        """A report that counts for nothing; its owner may forget the data, unless they are those that count."""
        self._totals.superseded += 1
        ticket = self._tickets.get(number)
        if ticket is None or attempt not in ticket.works:
            self.notices.drop(generator, number, attempt)

    def _drop(self, ticket: Ticket, reason: str) -> None:
        self._totals.drop(reason)
        self.notices.drop_all(ticket)
        self._settle(ticket)

    def _settle(self, ticket: Ticket) -> None:
        """No longer outstanding; its credit is free again."""
        self._outstanding.remove(ticket)
        self._credits.free += 1
        self.changes += 1

    def _move(self, ticket: Ticket, stage: Stage, reserved: int) -> None:
        """The ticket gets to a stage, or gets another deadline."""
        self.changes += reserved != ticket.reserved or stage is not Stage.STARTED
        self._outstanding.move(ticket, stage, reserved)

    def _return(self, ticket: Ticket) -> None:
        """What is finished of it is given up; what is still being made may count when it comes late."""
        if not ticket.open:
            self.notices.drop_all(ticket)
        self._void[ticket.number] = ticket.since if ticket.open else ticket.attempt + 1
        self._settle(ticket)
        self._numbers.give_back(ticket.number, ticket.attempt + 1)

    # Rounds

    def contribute(self, escrow: bool) -> Standing:
        """What the others get to know. The finished groups told of can't be withdrawn until `deliver`; with `escrow`
        the free credits can't be granted until then."""
        if escrow:
            self._credits.set_aside()
        self._offered = self._outstanding.finished_by_deadline()
        self._told_open = self._outstanding.open_by_deadline()
        return self.standing()

    def standing(self) -> Standing:
        """Where this ledger stands."""
        number, numbers = self.next_number, self._numbers.left(self.step)
        credits, outstanding = self._credits, self._outstanding
        return Standing(
            step=self.step,
            finished={deadline: count for deadline, count in outstanding.finished.items() if count},
            unfinished={deadline: count for deadline, count in outstanding.unfinished.items() if count},
            chosen=outstanding.chosen,
            credits=credits.free + credits.escrow,
            undealt=credits.undealt,
            offer=credits.escrow,
            wants=min(self.parked, numbers),
            numbers=numbers,
            next_number=-1 if number is None else number,
        )

    @property
    def lacks_credits(self) -> bool:
        """Asks are parked that credits would serve."""
        return bool(self.asks.parked) and not self._credits.free and self.next_number is not None

    @property
    def lacks_numbers(self) -> bool:
        """Asks are parked that can't be granted here, whatever comes."""
        return bool(self.asks.parked) and self.next_number is None

    def deliver(
        self, gained: int, taken: Mapping[int, int] | None, struck: Mapping[int, int] | None = None
    ) -> list[FormedGroup]:
        """The result of the round: `gained` credits (negative: given away), how many groups were chosen here by
        deadline (None: no step was formed), and how many unfinished ones the overdue policy strikes. Returns the chosen
        groups, lost ones among them: see `lost_chosen`."""
        self._credits.settle(gained)
        chosen = [number for deadline, count in (taken or {}).items() for number in self._offered[deadline][:count]]
        self._offered = {}
        for ticket in (self._tickets[number] for number in chosen):
            self._move(ticket, Stage.CHOSEN, ticket.reserved)
        for number in sorted(self.lost_chosen.difference(chosen)):
            self._return(self._tickets[number])
        self.lost_chosen.intersection_update(chosen)
        for deadline, count in (struck or {}).items():
            self._strike(self._told_open[deadline], count)
        return [self._formed(self._tickets[number]) for number in sorted(chosen)]

    def _strike(self, told: list[Key], count: int) -> None:
        """Strike `count` of the groups that the others were told of as unfinished. Those that have been settled or lost
        since count as struck; those that have finished since are struck last, since the step goes on without them."""
        there = [self._tickets[number] for number, attempt in told if self._outstanding.has(number, attempt)]
        there.sort(key=lambda ticket: not ticket.open)
        for ticket in there[: max(0, count - (len(told) - len(there)))]:
            if self.spec.overdue == "drop" and not self.spec.by_sample:
                self._drop(ticket, OVERDUE)
                continue
            if self.spec.overdue == "mask":
                self._move(ticket, ticket.stage, self.step)
            self.notices.is_overdue(ticket)

    def undo(self, lost: Collection[int]) -> None:
        """The chosen groups are finished again, except the lost ones, which go back."""
        for ticket in self._tickets.values():
            if ticket.stage is Stage.CHOSEN:
                self._move(ticket, Stage.FINISHED, ticket.reserved)
        for number in lost:
            if number in self._tickets and self._tickets[number].stage is Stage.FINISHED:
                self._return(self._tickets[number])
        self.lost_chosen = set()

    def _formed(self, ticket: Ticket) -> FormedGroup:
        oldest, deadline = self.step - self.spec.oldest, self._outstanding.deadline(ticket)
        attention = self.spec.attention_length
        return formed_group(ticket.number, ticket.generator, self.index, deadline, ticket.samples, attention, oldest)

    # Steps

    def end_step(self, trained: int, published: bool) -> None:
        """The step in training has ended, with `trained` groups over all ledgers; those chosen here are settled."""
        self._totals.trained += self._outstanding.end_step()
        self.changes += 1
        self._credits.end_step(self.step, trained, published)
        self.step += 1
        self._may_filter = self._filter_share()
        self.published = self.step if published else self.published
        self._saved = self._save()

    def adapt(self, left: int) -> None:
        """A step was formed that left so many finished groups over: see `Credits.adapt`."""
        self._credits.adapt(left)

    def _filter_share(self) -> int:
        """How many groups may be filtered here in this step: the odd ones in turn."""
        most = self.spec.filtered_per_step
        return forming.deal(most, [most] * self.ledgers, self.step)[self.index]

    # What is counted and saved

    def counts(self) -> TicketCounts:
        """Running totals of this ledger, over restarts too; after a resume ledger 0 carries those of before."""
        return self._totals.counts(len(self._tickets), self._numbers.granted_before())

    def state(self) -> LedgerState:
        """As of the last end of step, or of the start."""
        return self._saved

    def waiting(self) -> dict[int, list[int]]:
        """Generator → its unfinished tickets that are due by this step, or, if none is due, all unfinished ones."""
        return self._outstanding.by_generator(self.step)

    def check(self) -> None:
        """Raise `LedgerRuleError` unless everything that this ledger can know of the rules holds."""
        name = f"ledger {self.index}"
        require(self.counts().balanced, f"{name}: {self.counts()}")
        self._credits.check(name)
        self._numbers.check(name, self._tickets)
        self._outstanding.check(self.step, name)

    def _save(self) -> LedgerState:
        outstanding = self._tickets.values()
        running = [(t.number, t.attempt + 1) for t in outstanding if t.open]
        return LedgerState(
            step=self.step,
            ledgers=self.ledgers,
            next_numbers=[(self.index, self._numbers.fresh)],
            finished=[saved(ticket) for ticket in outstanding if not ticket.open],
            returned=sorted([*self._numbers.returned, *running]),
            issued=self._totals.issued,
            trained=self._totals.trained,
            dropped=dict(self._totals.dropped),
            failed=dict(self._totals.failed),
            superseded=self._totals.superseded,
        )

    def _restore(self, whole: LedgerState) -> int:
        """Take this ledger's part of the whole run's state; return how many tickets are outstanding over all."""
        self.step = self.published = whole.step
        self._numbers.restore(whole)
        outstanding = [*map(readmitted, whole.finished), *map(resumed, whole.working)]
        for ticket in outstanding:
            if ticket.number % self.ledgers == self.index:
                self._outstanding.add(ticket)
        self._totals.issued = len(self._tickets) + self._numbers.granted_before()
        if self.index == 0:
            self._totals.restore(whole)
        return len(outstanding)
