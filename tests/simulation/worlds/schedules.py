"""Random worlds, one per seed: any numbers, policies and faults; stopped anywhere, to go on as another world."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from headrace.ranks.tickets import LedgerSpec
from worlds.playing import Choose, run
from worlds.resuming import resumed
from worlds.setup import Setup, StuckError
from worlds.world import World

STALENESS = (0, 0.5, 1, 1.5, 2, 3, 4)
LIVES = 4


@dataclass(frozen=True)
class Data:
    """What stays the same when a run goes on."""

    steps: int
    group_size: int
    tickets: int | None
    in_order: int
    """B of a run whose steps train their tickets in order; 0: no such run."""


def random_data(rng: random.Random) -> Data:
    return Data(
        steps=rng.randint(1, 10),
        group_size=rng.choice([1, 1, 2, 3]),
        tickets=rng.choice([None, None, rng.randint(1, 40)]),
        in_order=rng.choice([0] * 9 + [3]),
    )


def random_spec(rng: random.Random, data: Data) -> LedgerSpec:
    if data.in_order:
        return LedgerSpec(data.in_order, 0, 1, data.group_size, data.steps, data.tickets, in_order=True)
    groups, staleness = rng.randint(1, 8), rng.choice(STALENESS)
    overdue = rng.choice(["wait", "cut", "mask", "drop", "drop"]) if staleness else "wait"
    return LedgerSpec(
        groups_per_step=groups,
        max_staleness=staleness,
        publish_every=rng.choice([1, 1, 2, 3]),
        group_size=data.group_size,
        steps=data.steps,
        tickets=data.tickets,
        overdue=overdue,
        by_sample=overdue == "drop" and rng.random() < 0.5,
        filtered_per_step=rng.choice([0, 0, 1, groups, 4 * groups]),
    )


def random_setup(rng: random.Random, data: Data) -> Setup:
    generators = rng.randint(1, 5)
    faults = rng.random() < 0.7
    spec = random_spec(rng, data)
    slow = [0, 0, 1] if spec.overdue == "wait" else [0, 1, 1]
    return Setup(
        spec,
        ledgers=rng.choice([1, 1, 2, 3]),
        generators=generators,
        room=rng.randint(1, 5),
        follow=rng.random() < 0.5,
        together=rng.random() < 0.5,
        rewards=rng.choice([(0.5,), (0.0, 1.0)]),
        failures=faults * rng.choice([0, 2]) * (not data.in_order),
        hangs=faults * rng.choice([0, 1]) * (not data.in_order),
        silences=faults * rng.choice([0, 3]),
        deaths=faults * rng.choice([0, 2]),
        noise=faults * rng.choice([0, 3]),
        skips=faults * (generators > 1) * rng.choice([0, 2]),
        stops=rng.choice([0, 0, 0, 1]),
        long=rng.choice(slow) * rng.randint(2, 6),
        slow=min(rng.choice(slow), generators - 1),
        deaf=faults * min(rng.choice(slow), generators - 1),
        little=rng.random() < 0.4,
    )


def setups_of(seed: int) -> Iterator[Setup]:
    """The setups of one run's lives."""
    rng = random.Random(seed)
    data = random_data(rng)
    while True:
        yield random_setup(rng, data)


def live(seed: int, choose: Choose, worlds: list[World]) -> None:
    """A run of several lives: in all but the last it is killed somewhere, or stopped, if it doesn't end before."""
    setups, rng = setups_of(seed), random.Random(f"{seed} lives")
    worlds.append(World(next(setups)))
    for _ in range(rng.randrange(LIVES)):
        over = run(worlds[-1], choose, rng.randrange(1500))
        if over and not worlds[-1].stopped:
            return
        every, journal = rng.choice([1, 1, 2, 3]), rng.random() < 0.7
        worlds.append(resumed(worlds[-1], next(setups), choose, every, journal))
    if not run(worlds[-1], choose):
        raise StuckError("it doesn't end")


def covered(worlds: list[World]) -> Counter[str]:
    """What happened in the worlds of one seed."""
    found: Counter[str] = Counter(worlds=len(worlds), resumes=len(worlds) - 1)
    for world in worlds:
        found["events"] += len(world.trace)
        found.update(str(event[0]) for event, _ in world.trace)
        found.update(type(message).__name__ for event, message in world.trace if event[0] == "arrive")
        found["steps"] += len(world.formations)
        found["groups"] += len(world.rules.ages)
        found["undone steps"] += sum(world.formations)
        found["masked tokens"] += world.rules.masked
        found["lives that reached the bound"] += max(world.rules.ages, default=-1) == world.spec.oldest
        found["lives with little memory"] += world.setup.little
        found[f"policy {world.spec.overdue}" + " by sample" * world.spec.by_sample] += 1
        found["samples left out"] += world.rules.left_out
        for node in world.nodes:
            counts = node.counts()
            found["superseded"] += counts.superseded
            found.update({f"dropped {reason}": number for reason, number in counts.dropped_reasons.items()})
    return found
