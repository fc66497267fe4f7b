"""Whole runs under random orders of events and faults: bounded staleness, nothing lost, nothing stuck.

What holds at every event is checked by `worlds.rules`; a failing seed prints the shortest story that it found, and
`python tests/simulation/simulate.py --seed N` plays one of the seeds of the first test again.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial

import msgspec
import pytest
from worlds.playing import choices, play, play_to_the_end, run
from worlds.resuming import resumed
from worlds.schedules import STALENESS, covered, live
from worlds.setup import Setup
from worlds.world import World

from headrace.ranks.tickets import LedgerSpec

SEEDS = 500


@pytest.mark.parametrize("block", range(10))
def test_any_order_of_events_and_faults_ends_within_the_bound(block: int) -> None:
    """Stopped or killed up to three times, with another S, B, p, policy, and number of ledgers and generators after."""
    size = SEEDS // 10
    for seed in range(size * block, size * (block + 1)):
        play(partial(live, seed), seed)


@pytest.mark.parametrize("ledgers", [1, 2, 3])
def test_losses_in_the_middle_of_forming_and_training_undo_the_step(ledgers: int) -> None:
    """Generators die with groups of the batch that weren't pulled yet, or fall silent while a round is under way."""
    found: Counter[str] = Counter()
    for seed in range(25):
        spec = LedgerSpec(3, STALENESS[seed % 6], 1 + seed % 3, 1 + seed % 2, 8, None if seed % 5 else 17)
        found += covered([play_to_the_end(Setup(spec, ledgers, generators=6, room=3, silences=8, deaths=5), seed)])
    assert found["undone steps"] > 0
    assert found["superseded"] > 0


def test_more_ledgers_than_groups_or_generators() -> None:
    for seed in range(5):
        play_to_the_end(Setup(LedgerSpec(2, 1, 1, 1, 4, None), ledgers=6, generators=1, room=3), seed)


@pytest.mark.parametrize("staleness", [0.5, 1, 2])
def test_the_bound_is_reached_and_not_passed(staleness: float) -> None:
    """With slow weights, some token is as old as the bound allows: the slack is really used."""
    setup = Setup(LedgerSpec(4, staleness, 1, 2, 12, None), generators=4, room=4)
    ages = [age for seed in range(10) for age in play_to_the_end(setup, seed).rules.ages]
    assert max(ages) == setup.spec.oldest


@pytest.mark.parametrize("ledgers", [1, 2, 3])
def test_with_staleness_0_every_group_is_trained_by_the_version_that_made_it(ledgers: int) -> None:
    setup = Setup(LedgerSpec(3, 0, 1, 2, 6, None), ledgers=ledgers, generators=2, room=3)
    for seed in range(5):
        assert set(play_to_the_end(setup, seed).rules.ages) == {0}


@pytest.mark.parametrize(("tickets", "groups"), [(3, 8), (10, 4), (7, 2), (1, 1), (24, 8)])
def test_the_end_of_the_data_is_no_deadlock(tickets: int, groups: int) -> None:
    """Smaller than a batch, not divided by B, several epochs' worth: all is trained, once, by one short last batch."""
    for ledgers in (1, 2, 3):
        setup = Setup(LedgerSpec(groups, 1, 1, 1, 100, tickets), ledgers=ledgers, generators=2, room=4)
        for seed in range(4):
            sizes = [len(step) for step in play_to_the_end(setup, seed).trained]
            assert sizes == [groups] * (tickets // groups) + [tickets % groups] * (tickets % groups > 0)


def test_after_a_resume_the_bound_holds_from_the_first_step() -> None:
    before = Setup(LedgerSpec(2, 4, 1, 1, 10, None), generators=3, room=4)
    after = replace(before, spec=msgspec.structs.replace(before.spec, max_staleness=1))
    for seed in range(20):
        choose = choices(seed)
        world = World(before)
        if not run(world, choose, 300):
            world = resumed(world, after, choose)
            assert run(world, choose)
            assert max(world.rules.ages, default=0) <= 1


def test_a_failed_group_does_not_hold_up_the_position_of_a_resume() -> None:
    setup = Setup(LedgerSpec(2, 1, 1, 1, 50, 20), ledgers=2, generators=2, room=3, failures=4)
    for seed in range(10):
        choose = choices(seed)
        world = World(setup)
        for _ in range(6):
            if run(world, choose, 120):
                break
            world = resumed(world, setup, choose, journal=False)
        assert run(world, choose)


def test_what_is_trained_is_what_was_generated() -> None:
    """No group is dropped for being long: of finite data everything is trained, however long it took."""
    world = play_to_the_end(Setup(LedgerSpec(3, 2, 1, 4, 100, 30), ledgers=2, generators=3, room=4, long=3), 1)
    assert sorted(ticket for step in world.trained for ticket in step) == list(range(30))


def test_replicas_train_disjoint_groups() -> None:
    setup = Setup(LedgerSpec(8, 1, 1, 1, 5, None), ledgers=3, generators=3, room=5)
    for seed in range(5):
        trained = [ticket for step in play_to_the_end(setup, seed).trained for ticket in step]
        assert len(trained) == len(set(trained)) == 40


@pytest.mark.parametrize("ledgers", [2, 3])
def test_one_generator_does_not_leave_other_ledgers_tickets_for_last(ledgers: int) -> None:
    """All asks come to the first ledger: numbers are used about in order all the same, for as long as the run lasts."""
    setup = Setup(LedgerSpec(4, 0, 1, 1, 60, None), ledgers=ledgers, homes=(0,), room=4, follow=False)
    for seed in range(2):
        trained = [ticket for step in play_to_the_end(setup, seed).trained for ticket in step]
        assert max(ticket - place for place, ticket in enumerate(trained)) < 20
