"""One ledger: the state machine that issues tickets and settles them. No I/O, no clock, no threads.

    number ──grant──▶ GRANTED ──started──▶ STARTED ──all samples──▶ FINISHED ──chosen──▶ CHOSEN ──end of step──▶ trained
       ▲                 │  │                 │  │                     │  ▲                │
       │                 │  └──── failed ─────┴──│──▶ failed           │  └─── undone ─────┤
       │                 ├──── overdue ───────┬──│──▶ dropped ◀────────┤ overdue            │
       │                 │                    │  │       ▲ no variance │                   │
       └──── lost ───────┴────────────────────┴──┴───────┴─────────────┴───────────────────┘ (only if undone)

A lost ticket, and one that its generator returns, goes back first in line, to be granted again as a new attempt.

A ledger owns the ticket numbers k ≡ index (mod number of ledgers). Each grant spends a credit; there are C in all
(`LedgerSpec.credits`), dealt round-robin over the ledgers at the start and, as groups are trained, at publications.
While finished groups pile up, some earned credits stay in reserve: groups that are begun later are younger when they
are trained.
A ticket's deadline is `reserved + D`: `reserved` is the newest version published when it was granted and, once its
start is reported, the version that really began it.

Why staleness stays within the bound and nothing is dropped for age: let N(d) be the outstanding tickets with a deadline
≤ d. Before step v, N(d) ≤ (d - v + 1)·B is needed for every d. The newest class is bounded by C ≤ (D + 1)·B. An older
class only shrinks, since nobody grants with so old a version any more once every ledger has ended that step, and
`forming.decide` takes a batch only if what it leaves keeps the inequality. What several ledgers decide together is in
`forming.py`, how they talk in `node.py`.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Mapping

from headrace.comm.messages import SampleMeta, TicketGrant
from headrace.ranks import forming
from headrace.ranks.forming import Standing
from headrace.ranks.outstanding import OPEN, Stage, Ticket, Work, readmitted, resumed
from headrace.ranks.tickets import (
    NO_VARIANCE,
    OVERDUE,
    FormedGroup,
    LedgerRuleError,
    LedgerSpec,
    LedgerState,
    SavedGroup,
    TicketCounts,
    add_counts,
    formed_group,
    require,
)

Key = tuple[int, int]
"""(ticket, attempt)."""


class Ledger:
    """The ledger number `index` of `ledgers`. `state`: that of the whole run that goes on, see `LedgerState.merge`."""

    def __init__(self, spec: LedgerSpec, index: int, ledgers: int, state: LedgerState | None = None) -> None:
        self.spec, self.index, self.ledgers = spec, index, ledgers
        self.step = 0
        """The step that is being formed or trained: so many have ended."""
        self.published = 0
        """The newest version published."""
        self.credits = 0
        self.changes = 0
        """So often has something happened that other ledgers may wait for."""
        self._oldest, self._most_credits, self._size = spec.oldest, spec.credits, spec.group_size
        self._escrow = 0
        self._undealt = 0
        """Credits earned since the last publication."""
        self._reserve = 0
        """Credits that wait outside the window."""
        self._window = spec.credits
        """So many credits, free or spent, are in play over all ledgers; all compute it alike."""
        self._deal_next = 0
        self._fresh = index
        self._returned: list[tuple[int, int]] = []
        self._tickets: dict[int, Ticket] = {}
        self._finished: Counter[int] = Counter()
        self._unfinished: Counter[int] = Counter()
        """Outstanding tickets by deadline."""
        self._chosen = 0
        self._void: dict[int, int] = {}
        """Returned number → the attempt before which none counts."""
        self._parked: dict[int, int] = {}
        self._absent: dict[int, int] = {}
        self._offered: dict[int, list[int]] = {}
        self._lost_offered: set[int] = set()
        self._told_open: dict[int, list[Key]] = {}
        self._to_drop: dict[int, list[Key]] = {}
        self._overdue: dict[int, list[Key]] = {}
        self._issued = self._trained = self._superseded = 0
        self._dropped: dict[str, int] = {}
        self._failed: dict[str, int] = {}
        self._may_filter = self._filter_share()
        held = 0 if state is None else self._restore(state.readmit(spec))
        self._deal(spec.credits_at(self.step) - held)
        self._saved = self._save()

    # Asks and grants

    def ask(self, generator: int, room: int) -> None:
        """Park the generator's ask; `room` adds to what it asked for before. Asks of one that is taken for lost wait
        until it is `back`."""
        require(room >= 1, f"rank {generator} asked for {room} groups")
        asks = self._absent if generator in self._absent else self._parked
        asks[generator] = asks.get(generator, 0) + room

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
        works = {attempt: Work(generator)}
        since = self._void.pop(number, 0)
        ticket = Ticket(number, attempt, attempt, self.published, self.published, works, since)
        self._tickets[number] = ticket
        self._tally(ticket, 1)
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
        require(born >= ticket.floor, f"rank {generator} began ticket {number} with {born} < {ticket.floor}")
        ticket.floor = born
        self._move(ticket, Stage.STARTED, max(born, ticket.reserved))

    def finished(self, generator: int, sample: SampleMeta) -> None:
        """A sample is finished; the last one finishes its group. What doesn't count is counted as superseded."""
        ticket = self._tickets.get(sample.ticket)
        if ticket is None or not self._counts(ticket, sample.sample, sample.attempt, sample.born):
            self._supersede(generator, sample.ticket, sample.attempt)
            return
        work = self._work(ticket, sample.attempt, generator)
        work.samples[sample.sample] = sample
        if len(work.samples) + len(work.left_out) == self._size:
            self._complete(ticket, sample.attempt)

    def left_out(self, generator: int, number: int, sample: int, attempt: int) -> None:
        """A sample of a group that was cut ends without data."""
        ticket = self._tickets.get(number)
        if ticket is None or not self._counts(ticket, sample, attempt, ticket.floor):
            self._supersede(generator, number, attempt)
            return
        work = self._work(ticket, attempt, generator)
        work.left_out.add(sample)
        if work.settled == self._size:
            self._complete(ticket, attempt)

    def failed(self, number: int, attempt: int, reason: str) -> None:
        """The group is given up for good: its credit is free, another ticket takes its place."""
        ticket = self._tickets.get(number)
        if ticket is None or attempt != ticket.attempt or not ticket.open:
            self._superseded += 1
            return
        self._failed = add_counts([self._failed, {reason: 1}])
        self._tell_dropped(ticket, but=ticket.attempt)
        self._settle(ticket)

    def returned(self, generator: int, number: int, attempt: int) -> None:
        """The generator hands a group back that it hasn't begun."""
        ticket = self._tickets.get(number)
        if ticket is None or attempt != ticket.attempt or not ticket.open:
            self._superseded += 1
            return
        require(generator == ticket.generator, f"rank {generator} returned ticket {number} of rank {ticket.generator}")
        self._return(ticket)

    def lost(self, generator: int) -> int:
        """The generator is gone, or taken for it: its asks are forgotten (returns how many those were), its tickets go
        back, except those in the batch being trained, which go back only if the batch is undone."""
        if generator in self._absent:
            return 0
        self._absent[generator] = 0
        offered = {number for numbers in self._offered.values() for number in numbers}
        for ticket in list(self._tickets.values()):
            self._forget_late_work(ticket, generator)
            if ticket.generator != generator or ticket.stage is Stage.CHOSEN:
                continue
            if ticket.number in offered:
                self._lost_offered.add(ticket.number)
            else:
                self._return(ticket)
        return self._parked.pop(generator, 0)

    def back(self, generator: int) -> None:
        """A generator that was taken for lost is heard again: it may be granted tickets."""
        room = self._absent.pop(generator, 0)
        if room:
            self.ask(generator, room)

    @property
    def absent(self) -> Collection[int]:
        """Generators that are taken for lost."""
        return self._absent.keys()

    def take_dropped(self) -> dict[int, list[Key]]:
        """By generator: groups that count no more though it may have or make them; each is told once."""
        dropped, self._to_drop = self._to_drop, {}
        return dropped

    def take_overdue(self) -> dict[int, list[Key]]:
        """By generator: its groups that are overdue; each is told once."""
        overdue, self._overdue = self._overdue, {}
        return overdue

    def _counts(self, ticket: Ticket, sample: int, attempt: int, born: int) -> bool:
        """Whether the sample is one that an unfinished ticket lacks. A result of an older attempt is as good as one of
        the newest if it is young enough for the deadline."""
        if ticket.stage not in OPEN or not 0 <= sample < self._size:
            return False
        if not ticket.since <= attempt <= ticket.attempt:
            return False
        work = ticket.works.get(attempt)
        if work is not None and (sample in work.samples or sample in work.left_out):
            return False
        if born < ticket.floor and attempt == ticket.attempt:
            raise LedgerRuleError(f"ticket {ticket.number} sample {sample}: born {born}, granted {ticket.floor}")
        return born >= ticket.floor

    def _work(self, ticket: Ticket, attempt: int, generator: int) -> Work:
        work = ticket.works.get(attempt)
        if work is None:
            work = ticket.works[attempt] = Work(generator)
        if generator != work.generator:
            raise LedgerRuleError(f"rank {generator} finished ticket {ticket.number} of rank {work.generator}")
        return work

    def _complete(self, ticket: Ticket, attempt: int) -> None:
        """An attempt is whole. An old one may have become too old by the start of the newest since it began."""
        work = ticket.works[attempt]
        if any(sample.born < ticket.floor for sample in work.samples.values()):
            self._superseded += work.settled
            del ticket.works[attempt]
            self._tell(work.generator, ticket.number, attempt)
            return
        self._tell_dropped(ticket, but=attempt)
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
        self._superseded += 1
        ticket = self._tickets.get(number)
        if ticket is None or attempt not in ticket.works:
            self._tell(generator, number, attempt)

    def _forget_late_work(self, ticket: Ticket, generator: int) -> None:
        ticket.works = {a: work for a, work in ticket.works.items() if a == ticket.live or work.generator != generator}

    def _tell_dropped(self, ticket: Ticket, but: int | None = None) -> None:
        for attempt, work in ticket.works.items():
            if attempt != but:
                self._tell(work.generator, ticket.number, attempt)

    def _tell(self, generator: int, number: int, attempt: int) -> None:
        told = self._to_drop.setdefault(generator, [])
        if (number, attempt) not in told:
            told.append((number, attempt))

    def _drop(self, ticket: Ticket, reason: str) -> None:
        self._dropped = add_counts([self._dropped, {reason: 1}])
        self._tell_dropped(ticket)
        self._settle(ticket)

    def _settle(self, ticket: Ticket) -> None:
        """No longer outstanding; its credit is free again."""
        del self._tickets[ticket.number]
        self._tally(ticket, -1)
        self.credits += 1
        self.changes += 1

    def _move(self, ticket: Ticket, stage: Stage, reserved: int) -> None:
        """The ticket gets to a stage, or gets another deadline."""
        self._tally(ticket, -1)
        self.changes += reserved != ticket.reserved or stage is not Stage.STARTED
        ticket.stage, ticket.reserved = stage, reserved
        self._tally(ticket, 1)

    def _tally(self, ticket: Ticket, sign: int) -> None:
        if ticket.stage is Stage.CHOSEN:
            self._chosen += sign
        else:
            counts = self._unfinished if ticket.open else self._finished
            counts[self._deadline(ticket)] += sign

    def _return(self, ticket: Ticket) -> None:
        """What is finished of it is given up; what is still being made may count when it comes late."""
        if not ticket.open:
            self._tell_dropped(ticket)
        self._void[ticket.number] = ticket.since if ticket.open else ticket.attempt + 1
        self._settle(ticket)
        heapq.heappush(self._returned, (ticket.number, ticket.attempt + 1))

    # Rounds

    def contribute(self, escrow: bool) -> Standing:
        """What the others get to know. The finished groups told of can't be withdrawn until `deliver`; with `escrow`
        the free credits can't be granted until then."""
        if escrow:
            self.credits, self._escrow = 0, self.credits
        self._offered = self._finished_by_deadline()
        self._told_open = self._open_by_deadline()
        return self.standing()

    def standing(self) -> Standing:
        """Where this ledger stands."""
        number = self.next_number
        numbers = self._numbers_left()
        return Standing(
            step=self.step,
            finished={deadline: count for deadline, count in self._finished.items() if count},
            unfinished={deadline: count for deadline, count in self._unfinished.items() if count},
            chosen=self._chosen,
            credits=self.credits + self._escrow,
            undealt=self._undealt + self._reserve,
            offer=self._escrow,
            wants=min(self.parked, numbers),
            numbers=numbers,
            next_number=-1 if number is None else number,
        )

    @property
    def lacks_credits(self) -> bool:
        """Asks are parked that credits would serve."""
        return bool(self._parked) and not self.credits and self.next_number is not None

    @property
    def lacks_numbers(self) -> bool:
        """Asks are parked that can't be granted here, whatever comes."""
        return bool(self._parked) and self.next_number is None

    def deliver(
        self, gained: int, taken: Mapping[int, int] | None, struck: Mapping[int, int] | None = None
    ) -> list[FormedGroup]:
        """The result of the round: `gained` credits (negative: given away), how many groups were chosen here by
        deadline (None: no step was formed), and how many unfinished ones the overdue policy strikes. Returns the chosen
        groups, lost ones among them: see `lost_chosen`."""
        self.credits += self._escrow + gained
        self._escrow = 0
        chosen = [number for deadline, count in (taken or {}).items() for number in self._offered[deadline][:count]]
        self._offered = {}
        for ticket in (self._tickets[number] for number in chosen):
            self._move(ticket, Stage.CHOSEN, ticket.reserved)
        for number in sorted(self._lost_offered.difference(chosen)):
            self._return(self._tickets[number])
        self._lost_offered.intersection_update(chosen)
        for deadline, count in (struck or {}).items():
            self._strike(self._told_open[deadline], count)
        return [self._formed(self._tickets[number]) for number in sorted(chosen)]

    def _strike(self, told: list[Key], count: int) -> None:
        """Strike `count` of the groups that the others were told of as unfinished. Those that have been settled or lost
        since count as struck; those that have finished since are struck last, since the step goes on without them."""
        there = [self._tickets[number] for number, attempt in told if self._is_outstanding(number, attempt)]
        there.sort(key=lambda ticket: not ticket.open)
        for ticket in there[: max(0, count - (len(told) - len(there)))]:
            if self.spec.overdue == "drop" and not self.spec.by_sample:
                self._drop(ticket, OVERDUE)
                continue
            if self.spec.overdue == "mask":
                self._move(ticket, ticket.stage, self.step)
            if ticket.open and not ticket.overdue:
                ticket.overdue = True
                self._overdue.setdefault(ticket.generator, []).append((ticket.number, ticket.attempt))

    def _is_outstanding(self, number: int, attempt: int) -> bool:
        return number in self._tickets and self._tickets[number].attempt == attempt

    @property
    def lost_chosen(self) -> set[int]:
        """Tickets that were chosen though their generator had been lost meanwhile: the step must be undone."""
        return self._lost_offered

    def undo(self, lost: Collection[int]) -> None:
        """The chosen groups are finished again, except the lost ones, which go back."""
        for ticket in self._tickets.values():
            if ticket.stage is Stage.CHOSEN:
                self._move(ticket, Stage.FINISHED, ticket.reserved)
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

    def _open_by_deadline(self) -> dict[int, list[Key]]:
        found: dict[int, list[Key]] = {}
        for ticket in self._tickets.values():
            if ticket.open:
                found.setdefault(self._deadline(ticket), []).append((ticket.number, ticket.attempt))
        return {deadline: sorted(keys) for deadline, keys in found.items()}

    def _numbers_left(self) -> int:
        """Counted up to C: more can't be granted."""
        end = self.spec.end_of_numbers(self.step)
        if end is None:
            return self._most_credits
        fresh = max(0, -((self._fresh - end) // self.ledgers))
        return min(self._most_credits, len(self._returned) + fresh)

    def _formed(self, ticket: Ticket) -> FormedGroup:
        oldest = self.step - self._oldest
        return formed_group(ticket.number, ticket.generator, self.index, self._deadline(ticket), ticket.samples, oldest)

    # Steps

    def end_step(self, trained: int, published: bool) -> None:
        """The step in training has ended, with `trained` groups over all ledgers; those chosen here are settled.

        Each trained group earns a credit, as far as the rest of the run needs one (after a short batch, the last, what
        was earned may be less than nothing)."""
        for ticket in [t for t in self._tickets.values() if t.stage is Stage.CHOSEN]:
            del self._tickets[ticket.number]
            self._trained += 1
        self._chosen = 0
        self._finished, self._unfinished = +self._finished, +self._unfinished
        self.changes += 1
        spent = self.spec.credits_at(self.step) - self.spec.credits_at(self.step + 1)
        self._undealt += trained - spent
        self.step += 1
        self._may_filter = self._filter_share()
        if published:
            self.published = self.step
            earned = max(0, self._undealt)
            self._undealt -= earned
            self._reserve += earned
        self._deal_reserve()
        self._saved = self._save()

    def adapt(self, left: int) -> None:
        """A step was formed that left so many finished groups over. More than two steps' worth are work done too early,
        which only gets old: a little less is begun. With less than one step's worth trainers may have to wait: more."""
        size = self.spec.groups_per_step
        if left < size:
            self._window = min(self._most_credits, self._window + size)
        elif left > 2 * size:
            self._window = max(2 * size, self._window - -(-(left - 2 * size) // 10))

    def _deal_reserve(self) -> None:
        """Deal earned credits as long as those in play, here and elsewhere, are within the window."""
        in_play = self.spec.credits_at(self.step) - self._undealt - self._reserve
        dealt = max(0, min(self._reserve, self._window - in_play))
        self._reserve -= dealt
        self._deal(dealt)

    def _deal(self, credits: int) -> None:
        """Credits for all ledgers, one each in turn, from where the last deal stopped: every ledger counts alike."""
        shares = forming.deal(credits, [credits] * self.ledgers, self._deal_next)
        self.credits += shares[self.index]
        self._deal_next = (self._deal_next + credits) % self.ledgers

    def _filter_share(self) -> int:
        """How many groups may be filtered here in this step: the odd ones in turn."""
        most = self.spec.filtered_per_step
        return forming.deal(most, [most] * self.ledgers, self.step)[self.index]

    # What is counted and saved

    def counts(self) -> TicketCounts:
        """Running totals of this ledger, over restarts too; after a resume ledger 0 carries those of before."""
        return TicketCounts(
            issued=self._issued,
            trained=self._trained,
            dropped=sum(self._dropped.values()),
            failed=sum(self._failed.values()),
            outstanding=len(self._tickets),
            returned=sum(attempt > 0 for _, attempt in self._returned),
            superseded=self._superseded,
            dropped_reasons=dict(self._dropped),
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
        for counts, found in (
            (self._finished, self._finished_by_deadline()),
            (self._unfinished, self._open_by_deadline()),
        ):
            counted = {deadline: count for deadline, count in counts.items() if count}
            require(counted == {d: len(keys) for d, keys in found.items()}, f"ledger {self.index} counted {counted}")
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
            dropped=dict(self._dropped),
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
        outstanding = [*map(readmitted, whole.finished), *map(resumed, whole.working)]
        for ticket in outstanding:
            if ticket.number % self.ledgers == self.index:
                self._tickets[ticket.number] = ticket
                self._tally(ticket, 1)
        self._issued = len(self._tickets) + sum(attempt > 0 for _, attempt in self._returned)
        if self.index == 0:
            self._issued += whole.trained + sum(whole.dropped.values()) + sum(whole.failed.values())
            self._trained, self._dropped, self._failed = whole.trained, dict(whole.dropped), dict(whole.failed)
            self._superseded = whole.superseded
        return len(outstanding)
