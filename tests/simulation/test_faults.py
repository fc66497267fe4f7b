"""Faults that such systems are known for: each a short test of what must hold instead.

Here: deaths, rewards that raise or hang, long samples, stops, lost counts. Elsewhere:

- whoever is missing at the start, hangs, or falls silent is named, within a limit: tests/ranks/test_courier.py,
  tests/ranks/test_failure.py, tests/mpi/test_silence.py
- updates reach all generators: tests/mpi/test_weights_ranks.py; both sides agree after each of them, for tied and
  untied models and fused projections: tests/ranks/test_weights_agree.py; keys and values of the old weights are
  dropped, or kept as they are: tests/rollout/test_engine_weights.py (there is no cache of prefixes)
- a tensor larger than a bucket: tests/comm/test_weights_buckets.py
- collectives have one order on all ranks of worlds of 2 to 8, and 200 updates need no more files and threads than ten:
  tests/mpi/test_syncs.py; no fixed port: tests/comm/test_groups.py
- two saves differ, and each equals its step: tests/train/engine/test_engine.py; killed at every point of a save, a
  whole checkpoint is found: tests/train/test_checkpoint.py
- ranks that die, stop or send damaged bytes in the middle of a transfer of samples or weights, an exception while
  weights are loaded, and an update beside a long sample: tests/mpi/test_transfers.py
- generation that waits for a version goes on after it: tests/ranks/test_generator.py
- the end of the data, S = 0, replicas with groups of their own, a resume within the bound from the first step, a failed
  group that would hold up a resume: test_worlds.py
- staleness includes the time in the queue: tests/ranks/test_ledger.py, test_held_for_k_updates_a_sample_has_age_k
- every token is labelled with the version that sampled it, and versions don't mix without partial rollout:
  tests/ranks/test_generator.py
- step, schedule and optimizer after a resume are those of a run without: tests/mpi/test_deterministic.py
- shutdown is bounded: tests/mpi/test_stop.py
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from worlds.generators import Generator, Key, Run
from worlds.playing import choices, play_to_the_end, run
from worlds.resuming import resumed
from worlds.setup import Setup, StuckError
from worlds.world import World

from headrace.comm.messages import Finished, Message
from headrace.ranks.order import TicketOrder
from headrace.ranks.outstanding import Stage, Ticket
from headrace.ranks.simulator import MadeUpLengths, SimulatedJob, Simulation
from headrace.ranks.tickets import FormedStep, LedgerSpec
from headrace.rollout.config import LatencyConfig

SEEDS = range(10)
POLICIES = [
    {"overdue": "wait"},
    {"overdue": "cut"},
    {"overdue": "mask"},
    {"overdue": "drop"},
    {"overdue": "drop", "by_sample": True},
]


def spec(groups: int = 3, staleness: float = 1, steps: int = 6, size: int = 2, **more: Any) -> LedgerSpec:
    return LedgerSpec(groups, staleness, 1, size, steps, **more)


def trained(world: World) -> list[int]:
    return [ticket for step in world.trained for ticket in step]


def tickets(world: World) -> list[Ticket]:
    """All that are outstanding."""
    return [ticket for node in world.nodes for ticket in node.ledger._tickets.values()]


def happened(world: World, name: str) -> int:
    return sum(event[0] == name for event, _ in world.trace)


def killed_now_and_then(setup: Setup, seed: int, events: int, every: int = 1, journal: bool = True) -> World:
    """The last of the worlds that go on one from the other, each killed after up to three times as many events."""
    choose = choices(seed)
    world = World(setup)
    while not run(world, choose, events + choose(2 * events)):
        world = resumed(world, setup, choose, every, journal)
    return world


def killed_at_every_point(setup: Setup, seed: int) -> Iterator[World]:
    """At their end, those that were killed after 20 events, after 40, …, to the last step, and went on."""
    kills, over = 0, False
    while not over:
        kills += 1
        choose = choices(seed)
        world = World(setup)
        over = run(world, choose, 20 * kills)
        if not over:
            world = resumed(world, setup, choose, journal=kills % 2 == 0)
            assert run(world, choose)
        yield world
    assert kills > 10


# Waiting for ever


def test_the_tickets_of_dead_generators_are_made_by_others() -> None:
    deaths = 0
    for seed in SEEDS:
        world = play_to_the_end(Setup(spec(tickets=12), ledgers=2, generators=4, deaths=3), seed)
        assert sorted(trained(world)) == list(range(12))
        deaths += happened(world, "dies")
    assert deaths > 10


@pytest.mark.parametrize("journal", [True, False])
def test_a_dead_trainer_costs_no_more_than_the_steps_since_the_checkpoint(journal: bool) -> None:
    """All ledgers go on from the last one, here of every third step."""
    setup = Setup(spec(staleness=2, steps=9), ledgers=2, generators=3)
    for seed in SEEDS:
        choose = choices(seed)
        world = World(setup)
        while world.step < 5:
            world.do(world.events()[choose(len(world.events()))])
        again = resumed(world, setup, choose, every=3, journal=journal)
        assert again.step == 3
        assert run(again, choose)
        assert len(trained(again)) == len(set(trained(again))) == 27


def test_a_reward_that_raises_or_hangs_fails_its_group_and_the_batch_goes_on() -> None:
    for seed in SEEDS:
        world = play_to_the_end(Setup(spec(), ledgers=2, generators=2, failures=3, hangs=3), seed)
        assert [len(step) for step in world.trained] == [3] * 6
        reasons = sum((node.counts() for node in world.nodes[1:]), world.nodes[0].counts()).failed_reasons
        assert reasons == {"raised": 3, "hung": 3}


@pytest.mark.parametrize("ledgers", [2, 3, 4, 5, 6, 7, 8])
def test_ledgers_of_any_number_never_wait_for_each_other_in_a_circle(ledgers: int) -> None:
    for seed in range(2):
        play_to_the_end(Setup(spec(steps=4), ledgers=ledgers, generators=3), seed)


def test_a_new_version_waits_for_no_sample() -> None:
    """Steps are trained and versions taken in while a long sample goes on: its tokens are then of several versions."""
    mixed = 0
    for seed in SEEDS:
        world = World(Setup(spec(staleness=3, steps=10, size=1), generators=2, room=4, long=4))
        choose = choices(seed)
        while not world.is_over and not mixed:
            run(world, choose, 1)
            mixed += any(len(s.spans) > 2 for g in world.alive.values() for r in g.running.values() for s in r.samples)
    assert mixed


def test_what_is_waited_for_is_named() -> None:
    with pytest.raises(StuckError, match=r"tickets \[0.*\] at rank 1"):
        run(World(Setup(spec(size=1), endless=3, room=9)), choices(0))


def test_a_stop_at_any_time_ends_the_run_and_a_resume_completes_it() -> None:
    stopped = 0
    setup = Setup(spec(tickets=17, steps=20), ledgers=2, generators=2, stops=1)
    for seed in range(30):
        choose = choices(seed)
        world = World(setup)
        assert run(world, choose)
        stopped += world.stopped
        if world.stopped:
            world = resumed(world, replace(setup, stops=0), choose)
            assert run(world, choose)
        assert sorted(trained(world)) == list(range(17))
    assert stopped > 10


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: " ".join(map(str, policy.values())))
def test_a_sample_100_times_as_long_and_a_slow_generator_end_the_run_all_the_same(policy: dict[str, Any]) -> None:
    """Also after a resume, where the same sample is as long again."""
    setup = Setup(spec(staleness=2, **policy), ledgers=2, generators=3, room=3, long=5, slow=1)
    for seed in SEEDS:
        play_to_the_end(setup, seed)
        choose = choices(seed)
        world = World(setup)
        if not run(world, choose, 300):
            assert run(resumed(world, setup, choose), choose)


@pytest.mark.parametrize("staleness", [1, 2, 3])
def test_while_one_sample_has_no_end_the_others_go_on_up_to_the_bound_and_again_after_a_resume(staleness: int) -> None:
    """Then everything else is finished."""
    setup = Setup(spec(staleness=staleness, steps=20, size=1), ledgers=2, generators=3, room=9, endless=1000)
    for seed in range(3):
        choose = choices(seed)
        world = World(setup)
        for _ in range(3):
            with pytest.raises(StuckError, match=r"tickets \[0"):
                run(world, choose)
            assert world.step == world.begin.step + staleness
            stages = Counter(ticket.stage for ticket in tickets(world))
            assert (stages[Stage.STARTED], stages[Stage.GRANTED]) == (1, 0)
            assert stages[Stage.FINISHED] >= 3
            world = resumed(world, setup, choose, journal=False)


@pytest.mark.parametrize("policy", [POLICIES[1], POLICIES[3], POLICIES[4]], ids=["cut", "drop", "drop by sample"])
def test_a_sample_without_an_end_is_settled_by_the_policy(policy: dict[str, Any]) -> None:
    setup = Setup(spec(staleness=2, **policy), ledgers=2, generators=3, room=3, endless=7)
    for seed in SEEDS:
        play_to_the_end(setup, seed)


def test_a_version_that_never_reaches_one_generator_holds_up_the_others_no_longer_than_its_limit() -> None:
    ended = 0
    for seed in SEEDS:
        world = play_to_the_end(Setup(spec(steps=8), generators=3, deaf=1), seed)
        ended += happened(world, "dies_deaf")
    assert ended > 0


def test_versions_that_skip_a_generator_are_followed_by_the_next() -> None:
    skipped = sum(
        happened(play_to_the_end(Setup(spec(steps=8), generators=3, skips=3), seed), "skips") for seed in SEEDS
    )
    assert skipped > 10


# Counting wrong


def test_what_was_made_is_trained_dropped_failed_or_held_at_every_event() -> None:
    setup = Setup(spec(overdue="drop", filtered_per_step=2), 2, 3, rewards=(0.0, 1.0), failures=2, silences=3, long=3)
    for seed in SEEDS:
        world, choose = World(setup), choices(seed)
        while not world.is_over:
            run(world, choose, 1)
            for node in world.nodes:
                counts = node.counts()
                ends = counts.trained + counts.dropped + counts.failed
                assert counts.issued == ends + counts.outstanding + counts.returned
                assert counts.dropped == sum(counts.dropped_reasons.values())


class Maker(Generator):
    """Remembers every group that it has finished."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.made: set[Key] = set()

    def _report(self, run: Run) -> None:
        if run.done:
            self.made.add(run.key)
        super()._report(run)


def under_way(world: World) -> set[Key]:
    """Groups of which a report hasn't arrived yet."""
    messages = [message for queue in world.channels.values() for message in queue if isinstance(message, Finished)]
    samples = {(meta.ticket, meta.attempt) for message in messages for meta in message.samples}
    return samples | {(ticket, attempt) for message in messages for ticket, _, attempt in message.left_out}


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: " ".join(map(str, policy.values())))
def test_every_group_that_was_made_is_trained_dropped_under_way_or_held_at_every_event(policy: dict[str, Any]) -> None:
    """By the generators' own count of what they made, without looking at the ledgers' totals."""
    setup = Setup(spec(filtered_per_step=2, **policy), 2, 3, rewards=(0.0, 1.0), failures=2, long=3)
    for seed in range(4):
        world, choose = World(setup, generator_type=Maker), choices(seed)
        while not world.is_over:
            run(world, choose, 1)
            made = {key for g in world.alive.values() if isinstance(g, Maker) for key in g.made}
            held = {(t.number, t.live) for t in tickets(world) if t.stage in (Stage.FINISHED, Stage.CHOSEN)}
            ended = set().union(*world.rules.given_up).union(trained(world))
            assert {key for key in made if key[0] not in ended} <= held | under_way(world)
            assert held <= made
        assert len(made) > 12


@pytest.mark.parametrize("journal", [True, False])
def test_over_any_kills_every_prompt_is_used_once_per_epoch(journal: bool) -> None:
    setup = Setup(spec(tickets=23, steps=30), ledgers=2, generators=3, silences=2)
    for seed in SEEDS:
        world = killed_now_and_then(setup, seed, 200, 1 + seed % 3, journal)
        assert sorted(trained(world)) == list(range(23))


def test_killed_at_any_point_every_prompt_is_used_once_in_each_epoch_and_no_epoch_is_skipped() -> None:
    """Within an epoch, at its end, while a batch is formed or trained. The last batch of the data is a short one."""
    order = TicketOrder(size=5, seed=3, epochs=3)
    setup = Setup(spec(groups=4, tickets=order.tickets, steps=30, size=1), ledgers=2, generators=2)
    for world in killed_at_every_point(setup, 7):
        uses = Counter((order.epoch(ticket), order.task(ticket)) for ticket in trained(world))
        assert uses == {(epoch, task): 1 for epoch in range(3) for task in range(5)}
        assert [len(step) for step in world.trained] == [4, 4, 4, 3]


def test_killed_at_any_point_the_data_position_is_that_of_an_uninterrupted_run() -> None:
    """Where steps train their tickets in order. The rest: tests/mpi/test_deterministic.py"""
    setup = Setup(spec(staleness=0, steps=5, size=1, in_order=True), ledgers=2, generators=2)
    whole = play_to_the_end(setup, 0).trained
    for world in killed_at_every_point(setup, 1):
        assert [sorted(step) for step in world.trained] == [sorted(step) for step in whole]


def test_after_a_resume_no_step_is_counted_twice() -> None:
    for seed in SEEDS:
        world = killed_now_and_then(Setup(spec(steps=6), ledgers=2, generators=2), seed, 100)
        assert [len(step) for step in world.trained] == [3] * 6


class Stutterer(Generator):
    """Reports everything that it finishes twice."""

    def _tell(self, ticket: int, message: Message) -> None:
        super()._tell(ticket, message)
        if isinstance(message, Finished):
            super()._tell(ticket, message)


def test_a_group_that_is_reported_twice_is_recognised_and_trained_once() -> None:
    for seed in SEEDS:
        world, choose = World(Setup(spec(tickets=18), 2, 3), generator_type=Stutterer), choices(seed)
        assert run(world, choose)
        assert sorted(trained(world)) == list(range(18))
        assert sum(node.counts().superseded for node in world.nodes) > 0


class Shares(World):
    """Looks at what every replica trains."""

    def train(self, formed: FormedStep, data: Any) -> None:
        shares = [set(taken.data or ()) for taken in self.trainers.taken.values()]
        assert all(shares), "a replica has nothing"
        assert sum(map(len, shares)) == len(set().union(*shares)) == len(formed.groups)
        super().train(formed, data)


def test_no_group_is_trained_by_two_data_parallel_ranks() -> None:
    for ledgers in (2, 3, 4):
        world, choose = Shares(Setup(spec(groups=5), ledgers, 3)), choices(ledgers)
        assert run(world, choose)
        assert len(world.trained) == 6


@pytest.mark.parametrize("staleness", [1, 4, 8])
def test_trained_lengths_are_distributed_as_generated_lengths(staleness: int) -> None:
    """Lengths of sigma 1.3, where a rule that prefers what is finished first trains the short ones: of all that was
    begun, only what is still outstanding at the end isn't trained, and each share of the lengths is as large."""
    steps, groups, size = 100, 16, 4
    lengths = MadeUpLengths(LatencyConfig(token_ms=10, median_tokens=100, sigma=1.3), size, 10_000)
    job = SimulatedJob(spec(groups, staleness, steps, size), 8, lengths, slots=8, train_s=2.0)
    used = {g.ticket for step in Simulation(job).run().steps for g in step.formed.groups}
    assert len(used) == steps * groups
    assert max(used) < len(used) + job.spec.credits
    long_of = {ticket: max(lengths(ticket, sample) for sample in range(size)) for ticket in range(max(used) + 1)}
    made = sorted(long_of.values())
    for tenth in range(1, 10):
        limit = made[len(made) * tenth // 10]
        share = sum(long_of[ticket] <= limit for ticket in used) / len(used)
        assert share == pytest.approx(sum(one <= limit for one in made) / len(made), abs=0.02)


def test_a_resume_moves_on_though_a_group_was_dropped_in_the_middle() -> None:
    setup = Setup(spec(overdue="drop", staleness=2, tickets=20, steps=30), 2, 3, long=6, room=4)
    worlds = [killed_now_and_then(setup, seed, 200) for seed in SEEDS]
    dropped = [sum(node.counts().dropped for node in world.nodes) for world in worlds]
    assert [len(trained(world)) for world in worlds] == [20 - lost for lost in dropped]
    assert sum(dropped) > 0
