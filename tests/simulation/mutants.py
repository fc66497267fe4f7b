"""The ledger with one rule left out, each by one function that patches it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import msgspec
import pytest
from worlds.rules import Rules

from headrace.comm.messages import SampleMeta, TicketGrant
from headrace.ranks import forming, ledger
from headrace.ranks.contribution import Phase
from headrace.ranks.credits import Credits
from headrace.ranks.forming import Decision, Standing
from headrace.ranks.ledger import Ledger
from headrace.ranks.node import LedgerNode
from headrace.ranks.notices import Notices
from headrace.ranks.outstanding import Stage, Ticket
from headrace.ranks.tickets import NO_VARIANCE, FormedGroup, LedgerSpec, LedgerState, formed_group

Patch = Callable[[pytest.MonkeyPatch], None]
Counts = dict[int, int] | None


def count_only_started(patch: pytest.MonkeyPatch) -> None:
    contribute = Ledger.contribute

    def forgetful(self: Ledger, escrow: bool) -> Standing:
        standing = contribute(self, escrow)
        started = [t for t in self._tickets.values() if t.stage is Stage.STARTED]
        return msgspec.structs.replace(
            standing, unfinished=dict(Counter(self._outstanding.deadline(t) for t in started))
        )

    patch.setattr(Ledger, "contribute", forgetful)
    without_credit_check(patch)


def no_min_version(patch: pytest.MonkeyPatch) -> None:
    """The grant doesn't say how old the weights may be; the deadline counts from what began the group."""
    issue, started = Ledger._issue, Ledger.started

    def careless(self: Ledger, generator: int) -> TicketGrant:
        grant = issue(self, generator)
        return msgspec.structs.replace(grant, min_version=0)

    def believing(self: Ledger, generator: int, number: int, attempt: int, born: int) -> None:
        if number in self._tickets:
            self._tickets[number].reserved = min(self._tickets[number].reserved, born)
        started(self, generator, number, attempt, born)

    patch.setattr(Ledger, "_issue", careless)
    patch.setattr(Ledger, "started", believing)


def without_credit_check(patch: pytest.MonkeyPatch) -> None:
    """Let a broken variant run until it does harm, instead of until somebody notices that credits are wrong."""
    patch.setattr(LedgerNode, "_check_credits", lambda self, standings: None)
    patch.setattr(Rules, "_check_credits", lambda self: None)


def local_caps(share: Callable[[int, int], int]) -> Patch:
    def apply(patch: pytest.MonkeyPatch) -> None:
        without_credit_check(patch)
        keep_credits(patch)
        patch.setattr(Credits, "deal", lambda self, credits: None)
        contribute = Ledger.contribute

        def capped(self: Ledger, escrow: bool) -> Standing:
            refill(self)
            return contribute(self, False)

        def refill(self: Ledger) -> None:
            self._credits.free = share(self.spec.credits, self.ledgers) - len(self._tickets)

        patch.setattr(Ledger, "contribute", capped)

    return apply


def keep_credits(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(forming, "credit_moves", lambda standings, turn: [0] * len(standings))


def static_caps(patch: pytest.MonkeyPatch) -> None:
    """A trained group's credit stays with its ledger."""
    keep_credits(patch)
    without_credit_check(patch)
    deal, end_step = Credits.deal, Ledger.end_step

    def own(self: Ledger, trained: int, published: bool) -> None:
        before = self._totals.trained
        patch.setattr(Credits, "deal", lambda self, credits: None)
        end_step(self, trained, published)
        patch.setattr(Credits, "deal", deal)
        self._credits.free += self._totals.trained - before

    patch.setattr(Ledger, "end_step", own)


def accept_any_late_result(patch: pytest.MonkeyPatch) -> None:
    take, complete = Ticket.take, Ledger._complete

    def lenient(self: Ticket, generator: int, results: Sequence[SampleMeta], start: int, size: int) -> tuple[int, int]:
        floor = self.floor
        if results[start].attempt < self.attempt:
            self.floor = 0
        taken = take(self, generator, results, start, size)
        self.floor = floor
        return taken

    def unseeing(self: Ledger, ticket: Ticket, attempt: int) -> None:
        ticket.floor = min([ticket.floor, *(sample.born for sample in ticket.works[attempt].samples.values())])
        complete(self, ticket, attempt)

    patch.setattr(Ticket, "take", lenient)
    patch.setattr(Ledger, "_complete", unseeing)


def staleness_in_steps(patch: pytest.MonkeyPatch) -> None:
    without_credit_check(patch)
    patch.setattr(LedgerSpec, "credits", property(lambda self: int((1 + self.max_staleness) * self.groups_per_step)))


def full_last_batch(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(forming, "is_end_of_data", lambda standings: False)


def move_without_escrow(patch: pytest.MonkeyPatch) -> None:
    contribute, deliver = Ledger.contribute, Ledger.deliver

    def open_handed(self: Ledger, escrow: bool) -> Standing:
        standing = contribute(self, False)
        return msgspec.structs.replace(standing, offer=self.credits if escrow else 0)

    def unguarded(self: Ledger, gained: int, taken: Counts, struck: Counts) -> list[FormedGroup]:
        return deliver(self, max(gained, -self.credits), taken, struck)

    patch.setattr(Ledger, "contribute", open_handed)
    patch.setattr(Ledger, "deliver", unguarded)
    without_credit_check(patch)


def move_between_steps(patch: pytest.MonkeyPatch) -> None:
    def moves(standings: Sequence[Standing], turn: int) -> list[int]:
        return credit_moves([msgspec.structs.replace(s, step=0) for s in standings], turn)

    credit_moves = forming.credit_moves
    patch.setattr(forming, "credit_moves", moves)


def asks_stay(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(forming, "redirection", lambda standings, here, next_number, margin: (here, 0))


def end_of_data_judged_by_each(patch: pytest.MonkeyPatch) -> None:
    def judged(standings: Sequence[Standing]) -> bool:
        return not any(s.unfinished or (s.numbers and s.credits) for s in standings)

    patch.setattr(forming, "is_end_of_data", judged)


def resume_without_readmission(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LedgerState, "readmit", lambda self, spec: self)
    without_credit_check(patch)
    deal = Credits.deal
    patch.setattr(Credits, "deal", lambda self, credits: deal(self, max(0, credits)))


def youngest_first(patch: pytest.MonkeyPatch) -> None:
    """Any finished groups, in place of those that are due first."""

    def latest(finished: Counter[int], size: int) -> Counter[int]:
        taken: Counter[int] = Counter()
        for deadline in sorted(finished, reverse=True):
            taken[deadline] = min(finished[deadline], size - taken.total())
        return +taken

    patch.setattr(forming, "_earliest", latest)


def never_wait(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(forming, "in_time", lambda others, step, size: True)


def withdraw_offered(patch: pytest.MonkeyPatch) -> None:
    """A lost group goes back at once though the others were told that it is finished."""
    contribute = Ledger.contribute

    def forgetful(self: Ledger, escrow: bool) -> Standing:
        standing = contribute(self, escrow)
        self._told, self._offered = self._offered, {}  # type: ignore[attr-defined]
        return standing

    def remembered(self: Ledger, gained: int, taken: Counts, struck: Counts) -> list[FormedGroup]:
        self._offered = self._told  # type: ignore[attr-defined]
        for numbers in self._offered.values():
            if taken and any(n not in self._tickets or self._tickets[n].open for n in numbers):
                raise AssertionError("a chosen group isn't there")
        return deliver(self, gained, taken, struck)

    deliver = Ledger.deliver
    patch.setattr(Ledger, "contribute", forgetful)
    patch.setattr(Ledger, "deliver", remembered)


def failed_keep_their_credit(patch: pytest.MonkeyPatch) -> None:
    """A failed group keeps its credit."""

    def settle(self: Ledger, ticket: Ticket) -> None:
        self._outstanding.remove(ticket)

    patch.setattr(Ledger, "_settle", settle)
    without_credit_check(patch)


# Overdue groups, filtering, silence


def cut_all(patch: pytest.MonkeyPatch) -> None:
    """Whatever is unfinished is struck, due or not."""
    patch.setattr(forming, "_overdue", lambda finished, unfinished, step, size: Counter(unfinished))


def cut_again(patch: pytest.MonkeyPatch) -> None:
    """A group is told to end in every round that waits for it."""
    strike = Ledger._strike

    def insistent(self: Ledger, told: list[tuple[int, int]], count: int) -> None:
        for ticket in self._tickets.values():
            ticket.overdue = False
        strike(self, told, count)

    patch.setattr(Ledger, "_strike", insistent)


def cut_is_not_sent(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Notices, "take_overdue", lambda self: {})


def mask_nothing(patch: pytest.MonkeyPatch) -> None:
    """Tokens that are too old stay in the loss."""

    def unmasked(*args: object) -> FormedGroup:
        return formed_group(*args[:-1], -1)  # type: ignore[arg-type]

    patch.setattr(ledger, "formed_group", unmasked)


def mask_at_the_old_deadline(patch: pytest.MonkeyPatch) -> None:
    """A step goes on without a group that is due, and its deadline isn't moved."""
    move = Ledger._move

    def unmoved(self: Ledger, ticket: Ticket, stage: Stage, reserved: int) -> None:
        struck = stage is ticket.stage
        move(self, ticket, stage, ticket.reserved if struck else reserved)

    patch.setattr(Ledger, "_move", unmoved)


def drop_what_is_finished(patch: pytest.MonkeyPatch) -> None:
    """When a batch is taken, the finished groups that it leaves are thrown away."""
    deliver = Ledger.deliver

    def draining(self: Ledger, gained: int, taken: Counts, struck: Counts = None) -> list[FormedGroup]:
        chosen = deliver(self, gained, taken, struck)
        for ticket in list(self._tickets.values()) if taken else []:
            if ticket.stage is Stage.FINISHED:
                self._drop(ticket, "queue")
        return chosen

    patch.setattr(Ledger, "deliver", draining)


def filtered_keep_their_credit(patch: pytest.MonkeyPatch) -> None:
    drop = Ledger._drop

    def keeping(self: Ledger, ticket: Ticket, reason: str) -> None:
        drop(self, ticket, reason)
        self._credits.free -= reason == NO_VARIANCE

    patch.setattr(Ledger, "_drop", keeping)
    without_credit_check(patch)


def filter_without_end(patch: pytest.MonkeyPatch) -> None:
    share = Ledger._filter_share
    patch.setattr(Ledger, "_filter_share", lambda self: 10 * share(self))


def forget_asks_silently(patch: pytest.MonkeyPatch) -> None:
    lost = Ledger.lost

    def silent(self: Ledger, generator: int) -> int:
        lost(self, generator)
        return 0

    patch.setattr(Ledger, "lost", silent)


def grant_to_the_absent(patch: pytest.MonkeyPatch) -> None:
    """A generator that is taken for lost is granted tickets as before."""

    def trusting(self: Ledger, generator: int, room: int) -> None:
        self.asks.parked[generator] = self.asks.parked.get(generator, 0) + room

    patch.setattr(Ledger, "ask", trusting)


def results_after_dropped(patch: pytest.MonkeyPatch) -> None:
    """A late result counts though its owner was told to forget the data."""
    expects = Ticket.expects

    def forgetful(self: Ticket, attempt: int) -> bool:
        self.since = 0
        return expects(self, attempt)

    patch.setattr(Ticket, "expects", forgetful)


# Order and bounds


def first_in_first_out(patch: pytest.MonkeyPatch) -> None:
    """The groups that were finished first, whatever waits for its deadline."""
    finished, decide = Ledger.finished, LedgerNode._decide

    def noting(self: Ledger, generator: int, *samples: SampleMeta) -> None:
        finished(self, generator, *samples)
        self.__dict__.setdefault("queue", []).extend(sample.ticket for sample in samples)

    def first(self: LedgerNode, standings: Sequence[Standing]) -> Decision:
        size, tickets = self.spec.groups_per_step, self.ledger._tickets
        queue = dict.fromkeys(self.ledger.__dict__.get("queue", []))
        waiting = [n for n in queue if n in tickets and tickets[n].stage is Stage.FINISHED]
        if len(waiting) < size or self._contributed is not Phase.FORMING or self.ledger.step == self.spec.steps:
            return decide(self, standings)
        return Decision([dict(Counter(self.ledger._outstanding.deadline(tickets[n]) for n in waiting[:size]))])

    patch.setattr(Ledger, "finished", noting)
    patch.setattr(LedgerNode, "_decide", first)


def deadlines_one_late(patch: pytest.MonkeyPatch) -> None:
    oldest = LedgerSpec.oldest.fget
    patch.setattr(LedgerSpec, "oldest", property(lambda self: oldest(self) + 1))


def one_group_too_many_in_time(patch: pytest.MonkeyPatch) -> None:
    in_time = forming.in_time
    patch.setattr(forming, "in_time", lambda others, step, size: in_time(others, step - 1, size))


def one_credit_more(patch: pytest.MonkeyPatch) -> None:
    credits = LedgerSpec.credits.fget
    patch.setattr(LedgerSpec, "credits", property(lambda self: credits(self) + 1))


def counter_reset_at_resume(patch: pytest.MonkeyPatch) -> None:
    """A ledger that goes on counts versions from 0 again."""
    restore = Ledger._restore

    def resetting(self: Ledger, whole: LedgerState) -> int:
        held = restore(self, whole)
        self.published = 0
        return held

    patch.setattr(Ledger, "_restore", resetting)
