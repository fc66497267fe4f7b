"""Whole runs of one to three ledgers under random orders of events: bounded staleness, nothing lost, nothing stuck.

What holds at every event is checked by `World` itself; a failing seed prints the shortest story that it found.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import msgspec
import pytest
from ledger_world import Choices, Setup, World, play

from headrace.ranks.tickets import LedgerSpec

STALENESS = [0, 0.5, 1, 1.5, 2, 4]


def random_spec(rng: random.Random, steps: int, size: int, tickets: int | None) -> LedgerSpec:
    return LedgerSpec(rng.randint(1, 8), rng.choice(STALENESS), rng.choice([1, 1, 2, 3]), size, steps, tickets)


def random_setup(rng: random.Random, spec: LedgerSpec) -> Setup:
    return Setup(
        spec,
        ledgers=rng.choice([1, 1, 2, 3]),
        generators=rng.randint(1, 4),
        room=rng.randint(1, 5),
        failures=rng.choice([0, 2]),
        silences=rng.choice([0, 0, 3]),
        deaths=rng.choice([0, 0, 2]),
        noise=rng.choice([0, 0, 3]),
        follow=rng.random() < 0.5,
    )


def random_setups(seed: int) -> Iterator[Setup]:
    """Setups of one run: the same data and steps, anything else may change when it goes on."""
    rng = random.Random(seed)
    steps, size = rng.randint(1, 8), rng.choice([1, 1, 2])
    tickets = rng.choice([None, None, rng.randint(1, 40)])
    while True:
        yield random_setup(rng, random_spec(rng, steps, size, tickets))


@pytest.mark.parametrize("block", range(10))
def test_any_order_of_events_ends_the_run_within_the_bound(block: int) -> None:
    for seed in range(20 * block, 20 * block + 20):

        def scenario(choices: Choices, worlds: list[World], seed: int = seed) -> None:
            worlds.append(World(next(random_setups(seed)), choices))
            assert worlds[-1].run(), "it doesn't end"

        play(scenario, seed)


@pytest.mark.parametrize("block", range(10))
def test_killed_anywhere_a_run_goes_on_in_another_world(block: int) -> None:
    """Another S, B, p, number of ledgers and generators, up to three times; every ticket still has exactly one end."""
    for seed in range(20 * block, 20 * block + 20):

        def scenario(choices: Choices, worlds: list[World], seed: int = seed) -> None:
            setups = random_setups(seed)
            worlds.append(World(next(setups), choices))
            for life in range(3):
                if worlds[-1].run(random.Random(f"{seed} {life}").randrange(600)):
                    return
                worlds.append(worlds[-1].resumed(next(setups), choices))
            assert worlds[-1].run(), "it doesn't end"

        play(scenario, seed)


@pytest.mark.parametrize("ledgers", [1, 2, 3])
def test_losses_in_the_middle_of_forming_and_training_undo_the_step(ledgers: int) -> None:
    """Generators die with groups of the batch that weren't pulled yet, or fall silent while a round is under way."""
    undone = late = 0
    for seed in range(25):
        spec = LedgerSpec(3, STALENESS[seed % 6], 1 + seed % 3, 1 + seed % 2, 8, None if seed % 5 else 17)
        setup = Setup(spec, ledgers, generators=6, room=3, silences=8, deaths=5)
        world = play(lambda choices, worlds, setup=setup: _to_the_end(setup, choices, worlds), seed)[0]
        undone += sum(world.formations)
        late += sum(node.counts().superseded for node in world.nodes)
    assert undone > 0
    assert late > 0


def test_more_ledgers_than_groups_or_generators() -> None:
    setup = Setup(LedgerSpec(2, 1, 1, 1, 4, None), ledgers=6, generators=1, room=3)
    for seed in range(5):
        play(lambda choices, worlds: _to_the_end(setup, choices, worlds), seed)


@pytest.mark.parametrize("staleness", [0.5, 1, 2])
def test_the_bound_is_reached_and_not_passed(staleness: float) -> None:
    """With slow weights, some token is as old as the bound allows: the slack is really used."""
    setup = Setup(LedgerSpec(4, staleness, 1, 2, 12, None), generators=4, room=4)
    ages = [age for seed in range(10) for age in _ages(setup, seed)]
    assert max(ages) == setup.spec.oldest


@pytest.mark.parametrize("ledgers", [1, 2, 3])
def test_with_staleness_0_every_group_is_trained_by_the_version_that_made_it(ledgers: int) -> None:
    setup = Setup(LedgerSpec(3, 0, 1, 2, 6, None), ledgers=ledgers, generators=2, room=3)
    for seed in range(5):
        assert set(_ages(setup, seed)) == {0}


@pytest.mark.parametrize(("tickets", "groups"), [(3, 8), (10, 4), (7, 2), (1, 1), (24, 8)])
def test_the_end_of_the_data_is_no_deadlock(tickets: int, groups: int) -> None:
    """Smaller than a batch, not divided by B, several epochs' worth: all is trained, once, by one short last batch."""
    for ledgers in (1, 2, 3):
        setup = Setup(LedgerSpec(groups, 1, 1, 1, 100, tickets), ledgers=ledgers, generators=2, room=4)
        for seed in range(4):
            worlds = play(lambda choices, worlds, setup=setup: _to_the_end(setup, choices, worlds), seed)
            sizes = [len(step) for step in worlds[0].trained]
            assert sizes == [groups] * (tickets // groups) + [tickets % groups] * (tickets % groups > 0)


def test_after_a_resume_the_bound_holds_from_the_first_step() -> None:
    before = Setup(LedgerSpec(2, 4, 1, 1, 10, None), generators=3, room=4)
    after = replace(before, spec=msgspec.structs.replace(before.spec, max_staleness=1))
    for seed in range(20):
        choices = Choices(seed)
        world = World(before, choices)
        if not world.run(300):
            resumed = world.resumed(after, choices)
            assert resumed.run()
            assert max(resumed.ages, default=0) <= 1


def test_a_failed_group_does_not_hold_up_the_position_of_a_resume() -> None:
    setup = Setup(LedgerSpec(2, 1, 1, 1, 50, 20), ledgers=2, generators=2, room=3, failures=4)
    for seed in range(10):
        choices = Choices(seed)
        world = World(setup, choices)
        for _ in range(6):
            if world.run(120):
                break
            world = world.resumed(setup, choices, hold=False)
        assert world.run()


def test_what_is_trained_is_what_was_generated() -> None:
    """No group is dropped for being long: of finite data everything is trained, however long it took."""
    setup = Setup(LedgerSpec(3, 2, 1, 4, 100, 30), ledgers=2, generators=3, room=4)
    world = World(setup, Choices(1))
    assert world.run()
    assert sorted(ticket for step in world.trained for ticket in step) == list(range(30))


def test_replicas_train_disjoint_groups() -> None:
    setup = Setup(LedgerSpec(8, 1, 1, 1, 5, None), ledgers=3, generators=3, room=5)
    for seed in range(5):
        world = play(lambda choices, worlds: _to_the_end(setup, choices, worlds), seed)[0]
        trained = [ticket for step in world.trained for ticket in step]
        assert len(trained) == len(set(trained)) == 40


@pytest.mark.parametrize("ledgers", [2, 3])
def test_one_generator_does_not_leave_other_ledgers_tickets_for_last(ledgers: int) -> None:
    """All asks come to the first ledger: numbers are used about in order all the same, for as long as the run lasts."""
    setup = Setup(LedgerSpec(4, 0, 1, 1, 60, None), ledgers=ledgers, homes=(0,), room=4, follow=False)
    for seed in range(2):
        world = play(lambda choices, worlds: _to_the_end(setup, choices, worlds), seed)[0]
        trained = [ticket for step in world.trained for ticket in step]
        assert max(ticket - place for place, ticket in enumerate(trained)) < 20


def _ages(setup: Setup, seed: int) -> list[int]:
    return play(lambda choices, worlds: _to_the_end(setup, choices, worlds), seed)[0].ages


def _to_the_end(setup: Setup, choices: Choices, worlds: list[World]) -> None:
    worlds.append(World(setup, choices))
    assert worlds[-1].run(), "it doesn't end"
