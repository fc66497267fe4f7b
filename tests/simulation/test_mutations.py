"""Every rule of the ledger is needed: with one left out, the simulation finds a world that breaks.

Each case names the smallest world that is known to fail; the same world runs clean with all rules in force.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import msgspec
import pytest
from worlds.playing import choices
from worlds.playing import run as play_on
from worlds.resuming import resumed
from worlds.setup import Setup
from worlds.world import World

from headrace.comm.messages import TicketGrant
from headrace.ranks import forming
from headrace.ranks.forming import Standing
from headrace.ranks.ledger import Ledger
from headrace.ranks.node import LedgerNode
from headrace.ranks.outstanding import Stage, Ticket
from headrace.ranks.tickets import FormedGroup, LedgerSpec, LedgerState

SEEDS = range(300)
CLEAN_SEEDS = range(10)
Patch = Callable[[pytest.MonkeyPatch], None]
Counts = dict[int, int] | None


def spec(
    groups: int, staleness: float, every: int = 1, size: int = 1, steps: int = 6, tickets: int | None = None
) -> LedgerSpec:
    return LedgerSpec(groups, staleness, every, size, steps, tickets)


def count_only_started(patch: pytest.MonkeyPatch) -> None:
    contribute = Ledger.contribute

    def forgetful(self: Ledger, escrow: bool) -> Standing:
        standing = contribute(self, escrow)
        started = [t for t in self._tickets.values() if t.stage is Stage.STARTED]
        return msgspec.structs.replace(standing, unfinished=dict(Counter(self._deadline(t) for t in started)))

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
    """Let a broken variant run until it does harm, instead of until the ledgers notice that credits are wrong."""
    patch.setattr(LedgerNode, "_check_credits", lambda self, standings: None)


def local_caps(share: Callable[[int, int], int]) -> Patch:
    def apply(patch: pytest.MonkeyPatch) -> None:
        without_credit_check(patch)
        keep_credits(patch)
        patch.setattr(Ledger, "_deal", lambda self, credits: None)
        contribute = Ledger.contribute

        def capped(self: Ledger, escrow: bool) -> Standing:
            refill(self)
            return contribute(self, False)

        def refill(self: Ledger) -> None:
            self.credits = share(self.spec.credits, self.ledgers) - len(self._tickets)

        patch.setattr(Ledger, "contribute", capped)

    return apply


def keep_credits(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(forming, "credit_moves", lambda standings, turn: [0] * len(standings))


def static_caps(patch: pytest.MonkeyPatch) -> None:
    """A trained group's credit stays with its ledger."""
    keep_credits(patch)
    without_credit_check(patch)
    deal, end_step = Ledger._deal, Ledger.end_step

    def own(self: Ledger, trained: int, published: bool) -> None:
        before = self._trained
        patch.setattr(Ledger, "_deal", lambda self, credits: None)
        end_step(self, trained, published)
        patch.setattr(Ledger, "_deal", deal)
        self.credits += self._trained - before

    patch.setattr(Ledger, "end_step", own)


def accept_any_late_result(patch: pytest.MonkeyPatch) -> None:
    counts, complete = Ledger._counts, Ledger._complete

    def lenient(self: Ledger, ticket: Ticket, sample: int, attempt: int, born: int) -> bool:
        return counts(self, ticket, sample, attempt, max(born, ticket.floor) if attempt < ticket.attempt else born)

    def unseeing(self: Ledger, ticket: Ticket, attempt: int) -> None:
        ticket.floor = min([ticket.floor, *(sample.born for sample in ticket.works[attempt].samples.values())])
        complete(self, ticket, attempt)

    patch.setattr(Ledger, "_counts", lenient)
    patch.setattr(Ledger, "_complete", unseeing)


def staleness_in_steps(patch: pytest.MonkeyPatch) -> None:
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
    deal = Ledger._deal
    patch.setattr(Ledger, "_deal", lambda self, credits: deal(self, max(0, credits)))


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


def train_what_was_lost(patch: pytest.MonkeyPatch) -> None:
    """A failed group keeps its credit."""

    def settle(self: Ledger, ticket: Ticket) -> None:
        del self._tickets[ticket.number]

    patch.setattr(Ledger, "_settle", settle)
    without_credit_check(patch)


CASES: dict[str, tuple[Patch, Setup]] = {
    "started counted instead of granted": (count_only_started, Setup(spec(1, 1.0), generators=2, room=3)),
    "no min_version": (no_min_version, Setup(spec(1, 1.0), generators=2, room=2)),
    "local caps rounded down": (local_caps(lambda c, n: c // n), Setup(spec(3, 0.0), ledgers=2, generators=2, room=4)),
    "local caps rounded up": (
        local_caps(lambda c, n: -(-c // n)),
        Setup(spec(3, 0.0), ledgers=2, generators=2, room=4),
    ),
    "static caps": (static_caps, Setup(spec(1, 0.0), ledgers=2, homes=(1,))),
    "any late result accepted": (accept_any_late_result, Setup(spec(1, 1.0), generators=2, silences=3)),
    "S counted in steps": (staleness_in_steps, Setup(spec(1, 0.0, every=3))),
    "last batch must be full": (full_last_batch, Setup(spec(2, 0.0, tickets=3))),
    "credits aren't dealt anew, finite data": (
        static_caps,
        Setup(spec(1, 0.0, tickets=5, steps=9), ledgers=2, generators=2, failures=2),
    ),
    "credits stay where they were dealt": (keep_credits, Setup(spec(1, 0.0), ledgers=2, homes=(1,))),
    "credits move without escrow": (move_without_escrow, Setup(spec(1, 0.0), ledgers=2, generators=2)),
    "credits move between steps": (move_between_steps, Setup(spec(1, 0.0, steps=30), ledgers=2, homes=(1,))),
    "asks stay where there are no numbers": (asks_stay, Setup(spec(1, 0.0, tickets=1), ledgers=2, homes=(1,))),
    "end of the data judged by each ledger": (
        end_of_data_judged_by_each,
        Setup(spec(2, 0.0, tickets=3), ledgers=2, generators=2, failures=2),
    ),
    "youngest first": (youngest_first, Setup(spec(2, 1.0), generators=2, room=4)),
    "never waiting for what is due": (never_wait, Setup(spec(1, 1.0), generators=2, room=3)),
    "offered groups withdrawn": (withdraw_offered, Setup(spec(2, 1.0, steps=9), ledgers=2, generators=3, silences=9)),
    "failed groups keep their credit": (train_what_was_lost, Setup(spec(1, 0.0), failures=2)),
}


def run(setup: Setup, seed: int) -> None:
    """A world to its end."""
    if not play_on(World(setup), choices(seed), 20_000):
        raise AssertionError("it doesn't end")


def resume(before: Setup, after: Setup, seed: int) -> None:
    """A world that is killed somewhere and goes on as another."""
    choose = choices(seed)
    world = World(before)
    if not play_on(world, choose, 60 + choose(100)) and not play_on(resumed(world, after, choose), choose, 20_000):
        raise AssertionError("it doesn't end")


def run_all(scenario: Callable[[int], None], seeds: range) -> None:
    for seed in seeds:
        scenario(seed)


@pytest.mark.parametrize("name", CASES)
def test_without_this_rule_a_world_breaks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    patch, setup = CASES[name]
    scenario = partial(run, setup)
    run_all(scenario, CLEAN_SEEDS)
    patch(monkeypatch)
    with pytest.raises(AssertionError):
        run_all(scenario, SEEDS)


def test_without_readmission_a_resume_into_a_smaller_bound_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = partial(resume, Setup(spec(1, 2.0), room=4), Setup(spec(1, 0.0), room=4))
    run_all(scenario, CLEAN_SEEDS)
    resume_without_readmission(monkeypatch)
    with pytest.raises(AssertionError):
        run_all(scenario, SEEDS)
