"""Every rule of the ledger is needed: with one left out, the simulation finds a world that breaks, for that reason.

Each case names a small world that is known to fail; the same world runs clean with all rules in force.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import mutants
import pytest
from mutants import Patch, local_caps
from pydantic import ValidationError
from worlds.playing import choices
from worlds.playing import run as play_on
from worlds.resuming import resumed
from worlds.setup import Setup, StuckError
from worlds.world import World

from headrace.comm.messages import Cut
from headrace.ranks.config import LedgerConfig
from headrace.ranks.tickets import LedgerSpec

SEEDS = range(300)
CLEAN_SEEDS = range(10)


def spec(groups: int, staleness: float, every: int = 1, size: int = 1, steps: int = 6, **more: Any) -> LedgerSpec:
    return LedgerSpec(groups, staleness, every, size, steps, **more)


class Case(NamedTuple):
    """What leaves a rule out; a world for that; how the failure is told."""

    mutate: Patch
    setup: Setup
    text: str


PAIR = Setup(spec(1, 1.0), generators=2, room=3)
FAR = Setup(spec(1, 0.0), ledgers=2, homes=(1,))
CUT = Setup(spec(2, 1.0, overdue="cut"), generators=2, room=3, long=3)
FILTERED = Setup(spec(1, 0.0, size=2, filtered_per_step=2), rewards=(0.0, 1.0))
SILENT = Setup(spec(1, 1.0), generators=2, silences=2)
DUE, STUCK = "is due at", "^ledger 0, step"

CASES = {
    "started counted instead of granted": Case(mutants.count_only_started, PAIR, DUE),
    "no min_version": Case(mutants.no_min_version, PAIR, "started ticket"),
    "local caps rounded down": Case(
        local_caps(lambda c, n: c // n), Setup(spec(3, 0.0), ledgers=2, generators=2, room=4), STUCK
    ),
    "local caps rounded up": Case(
        local_caps(lambda c, n: -(-c // n)), Setup(spec(3, 0.0), ledgers=2, generators=2, room=4), "outstanding with C"
    ),
    "static caps": Case(mutants.static_caps, FAR, STUCK),
    "any late result accepted": Case(
        mutants.accept_any_late_result, Setup(spec(1, 1.0), generators=2, silences=3), "has age 2"
    ),
    "S counted in steps": Case(mutants.staleness_in_steps, Setup(spec(1, 0.0, every=3)), STUCK),
    "last batch must be full": Case(mutants.full_last_batch, Setup(spec(2, 0.0, tickets=3)), STUCK),
    "credits aren't dealt anew, finite data": Case(
        mutants.static_caps, Setup(spec(1, 0.0, tickets=5, steps=9), ledgers=2, generators=2, failures=2), STUCK
    ),
    "credits stay where they were dealt": Case(mutants.keep_credits, FAR, STUCK),
    "credits move without escrow": Case(
        mutants.move_without_escrow, Setup(spec(1, 0.0), ledgers=2, generators=2), "2 outstanding with C = 1"
    ),
    "credits move between steps": Case(
        mutants.move_between_steps, Setup(spec(1, 0.0, steps=30), ledgers=2, homes=(1,)), DUE
    ),
    "asks stay where there are no numbers": Case(
        mutants.asks_stay, Setup(spec(1, 0.0, tickets=1), ledgers=2, homes=(1,)), STUCK
    ),
    "end of the data judged by each ledger": Case(
        mutants.end_of_data_judged_by_each,
        Setup(spec(2, 0.0, tickets=3), ledgers=2, generators=2, failures=2),
        "a short batch before the end",
    ),
    "youngest first": Case(mutants.youngest_first, Setup(spec(2, 1.0), generators=2, room=4), STUCK),
    "first in, first out": Case(mutants.first_in_first_out, PAIR, DUE),
    "never waiting for what is due": Case(mutants.never_wait, PAIR, DUE),
    "deadlines one step late": Case(mutants.deadlines_one_late, PAIR, "has age 2"),
    "one group too many in time": Case(mutants.one_group_too_many_in_time, PAIR, DUE),
    "one credit more": Case(mutants.one_credit_more, PAIR, "3 outstanding with C = 2"),
    "offered groups withdrawn": Case(
        mutants.withdraw_offered,
        Setup(spec(2, 1.0, steps=9), ledgers=2, generators=3, silences=9),
        "a chosen group isn't there",
    ),
    "results count whose owner was told to forget them": Case(
        mutants.results_after_dropped,
        Setup(spec(1, 2.0, steps=12), generators=3, room=4, silences=30),
        "was never lost and has forgotten",
    ),
    "finished groups dropped when a batch is taken": Case(mutants.drop_what_is_finished, PAIR, "dropped for {'queue'}"),
    "failed groups keep their credit": Case(mutants.failed_keep_their_credit, Setup(spec(1, 0.0), failures=2), STUCK),
    "filtered groups keep their credit": Case(mutants.filtered_keep_their_credit, FILTERED, STUCK),
    "filtered without end": Case(mutants.filter_without_end, FILTERED, "3 filtered in step"),
    "groups cut that hold nothing up": Case(mutants.cut_all, CUT, "is told to end and holds nothing up"),
    "groups cut again": Case(mutants.cut_again, CUT, "is told to end twice"),
    "overdue groups aren't told": Case(
        mutants.cut_is_not_sent, Setup(spec(2, 1.0, overdue="cut"), generators=2, room=3, endless=3), STUCK
    ),
    "nothing is masked": Case(
        mutants.mask_nothing,
        Setup(spec(1, 1.0, size=2, overdue="mask"), generators=2, room=3, long=3, slow=1),
        "oldest version in the loss",
    ),
    "masked groups keep their deadline": Case(
        mutants.mask_at_the_old_deadline,
        Setup(spec(1, 1.0, overdue="mask"), generators=2, room=3, long=3, slow=1),
        DUE,
    ),
    "forgotten asks aren't told": Case(mutants.forget_asks_silently, SILENT, "asked for .* are known"),
    "grants to the absent": Case(mutants.grant_to_the_absent, SILENT, "is absent and gets a grant"),
}


def run(setup: Setup, seed: int) -> None:
    """A world to its end."""
    if not play_on(World(setup), choices(seed), 20_000):
        raise StuckError("it doesn't end")


def resume(before: Setup, after: Setup, seed: int) -> None:
    """A world that is killed somewhere and goes on as another."""
    choose = choices(seed)
    world = World(before)
    if not play_on(world, choose, 60 + choose(100)) and not play_on(resumed(world, after, choose), choose, 20_000):
        raise StuckError("it doesn't end")


def run_all(scenario: Callable[[int], None], seeds: range) -> None:
    for seed in seeds:
        scenario(seed)


def check(scenario: Callable[[int], None], mutate: Patch, text: str, patch: pytest.MonkeyPatch) -> None:
    run_all(scenario, CLEAN_SEEDS)
    mutate(patch)
    with pytest.raises(AssertionError, match=text):
        run_all(scenario, SEEDS)


@pytest.mark.parametrize("name", CASES)
def test_without_this_rule_a_world_breaks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    check(partial(run, case.setup), case.mutate, case.text, monkeypatch)


def test_without_readmission_a_resume_into_a_smaller_bound_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = partial(resume, Setup(spec(1, 2.0), room=4), Setup(spec(1, 0.0), room=4))
    check(scenario, mutants.resume_without_readmission, "outstanding with C|due at", monkeypatch)


def test_with_versions_counted_anew_after_a_resume_the_bound_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = partial(resume, Setup(spec(1, 1.0, steps=12), room=4), Setup(spec(1, 1.0, steps=12), room=4))
    check(scenario, mutants.counter_reset_at_resume, DUE, monkeypatch)


@pytest.mark.parametrize("overdue", ["cut", "mask", "drop"])
def test_overdue_policies_are_refused_at_staleness_0(overdue: str) -> None:
    with pytest.raises(ValidationError, match="max_staleness"):
        LedgerConfig.model_validate({"max_staleness": 0, "overdue": overdue})


def test_at_staleness_0_cutting_would_strike_at_once_and_dropping_never() -> None:
    """Every group is due as soon as it is granted, and there are never B others."""
    for seed in range(10):
        cut = played(Setup(spec(2, 0.0, overdue="cut"), generators=2, room=2), seed)
        assert any(isinstance(message, Cut) for _, message in cut.trace)
        drop = played(Setup(spec(2, 0.0, overdue="drop"), generators=2, room=2, long=2), seed)
        assert drop.nodes[0].counts().dropped == 0


def played(setup: Setup, seed: int) -> World:
    world = World(setup)
    assert play_on(world, choices(seed))
    return world
