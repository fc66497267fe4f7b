"""The simulator: repeatable, true to the bound, faster with more staleness, and it survives faults."""

from __future__ import annotations

import dataclasses

import pytest

from headrace.comm.errors import WaitLimitError
from headrace.comm.messages import Message, SampleMeta
from headrace.ranks import pace
from headrace.ranks.memory import MemoryBound
from headrace.ranks.simulator import MadeUpLengths, SimulatedJob, Simulation, Trace
from headrace.ranks.tickets import LedgerSpec, Overdue
from headrace.rollout.config import LatencyConfig
from headrace.rollout.latency_engine import made_up_length

CONFIG = LatencyConfig(median_tokens=200, sigma=1.0)
TOKEN_S = 0.01


def job(
    staleness: float = 1, ledgers: int = 2, steps: int = 12, overdue: Overdue = "wait", **more: object
) -> SimulatedJob:
    spec = LedgerSpec(8, staleness, 1, 4, steps, overdue=overdue)
    plain = SimulatedJob(
        spec,
        generators=8,
        length=MadeUpLengths(CONFIG, 4, 4000),
        ledgers=ledgers,
        slots=4,
        token_s=lambda generator: TOKEN_S,
        train_s=1.0,
        weights_s=lambda generator, rng: rng.uniform(0, 2),
        message_s=lambda source, target, rng: rng.expovariate(100),
        pull_s=lambda trainer, rng: rng.uniform(0, 0.2),
        reissue_after_s=5.0,
        wait_limit_s=1000.0,
    )
    return dataclasses.replace(plain, **more)  # type: ignore[arg-type]


def trained(trace: Trace) -> list[list[int]]:
    return [[group.ticket for group in step.formed.groups] for step in trace.steps]


def seconds(trace: Trace) -> float:
    return trace.steps[-1].published_at


def test_one_seed_is_one_run() -> None:
    first, again, other = (Simulation(job(seed=seed)).run() for seed in (1, 1, 2))
    assert trained(first) == trained(again)
    assert seconds(first) == seconds(again)
    assert first.messages == again.messages
    assert seconds(first) != seconds(other)


@pytest.mark.parametrize("ledgers", [1, 2, 5])
@pytest.mark.parametrize("staleness", [0, 1, 2.5, 4])
def test_every_step_is_trained_once_within_the_bound(staleness: float, ledgers: int) -> None:
    simulation = Simulation(job(staleness, ledgers))
    trace = simulation.run()
    assert [step.formed.step for step in trace.steps] == list(range(12))
    tickets = [ticket for step in trained(trace) for ticket in step]
    assert len(set(tickets)) == len(tickets) == 12 * 8
    oldest = simulation.spec.oldest
    assert max(age for step in trace.steps for age in step.ages) <= oldest
    for step in trace.steps:
        for group in step.formed.groups:
            assert step.formed.step - oldest <= trace.groups[group.ticket, group.attempt].born <= step.formed.step
    for ledger in simulation.nodes:
        ledger.check()


def test_synchronous_steps_take_as_long_as_their_longest_sample_and_training() -> None:
    instant = {"weights_s": lambda g, r: 0.0, "message_s": lambda s, t, r: 0.0, "pull_s": lambda t, r: 0.0}
    trace = Simulation(job(0, 1, **instant)).run()
    ends = [0.0, *(step.published_at for step in trace.steps)]
    for step, begin, end in zip(trace.steps, ends, ends[1:], strict=False):
        longest = max(group.longest_s for group in trace.of_step(step))
        assert -1e-9 <= end - begin - (longest + 1.0) <= 0.05


def test_staleness_makes_steps_faster() -> None:
    times = [Simulation(job(staleness, steps=40)).run(30).step_s(6) for staleness in (0, 1, 2, 4)]
    assert times == sorted(times, reverse=True)
    assert times[0] > 1.6 * times[1]


def test_without_the_longest_pause_no_step_waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds begin because they have a result, not because time has passed."""
    monkeypatch.setattr(pace, "LONGEST_PAUSE_S", 1e9)
    for seed in range(5):
        slow = Simulation(job(2, ledgers=5, seed=seed))
        usual = seconds(slow.run())
        assert usual < 12 * (4000 * TOKEN_S + 10)


def test_rounds_stay_few_when_many_groups_finish() -> None:
    trace = Simulation(job(1, ledgers=5, steps=20)).run()
    rounds = trace.messages["RoundPart"] / (5 * 3)
    assert rounds <= 16 * 20


def test_a_slow_generator_holds_up_the_others_no_further_than_the_bound() -> None:
    slow = job(2, token_s=lambda generator: TOKEN_S * (100 if generator == 3 else 1), steps=6, wait_limit_s=1e5)
    trace = Simulation(slow).run()
    late = [group for group in trace.groups.values() if group.generator == 3 and group.finished == group.finished]
    assert late
    for step in trace.steps:
        assert max(step.ages) <= 2
    first = min(group.granted + group.longest_s for group in late)
    assert sum(step.published_at < first for step in trace.steps) >= 2, "steps before its first group is due"


@pytest.mark.parametrize("overdue", ["cut", "mask", "drop"])
def test_with_an_overdue_policy_a_slow_generator_holds_up_nobody(overdue: Overdue) -> None:
    speeds = {"token_s": lambda generator: TOKEN_S * (100 if generator == 3 else 1)}
    waiting = Simulation(job(2, steps=20, wait_limit_s=1e5, **speeds)).run(8)
    going_on = Simulation(job(2, steps=20, overdue=overdue, **speeds)).run(8)
    assert seconds(going_on) < seconds(waiting) / 3


def test_a_dead_generators_groups_are_made_by_others() -> None:
    simulation = Simulation(job(1))
    simulation.at(4.0, simulation.kill, 2)
    trace = simulation.run()
    assert len(trace.steps) == 12
    lost = {group.ticket for group in trace.groups.values() if group.generator == 2 and not group.finished <= 4.0}
    again = {group.ticket for group in trace.groups.values() if group.attempt > 0 and group.generator != 2}
    assert lost <= again


def test_a_silent_generator_returns() -> None:
    simulation = Simulation(job(1))
    simulation.at(4.0, simulation.silence, 2, 24.0)
    trace = simulation.run()
    assert len(trace.steps) == 12
    assert any(group.generator == 2 and group.granted > 24.0 for group in trace.groups.values())


def test_a_generator_that_gets_slower_starts_longer_samples() -> None:
    simulation = Simulation(job(1))
    simulation.at(0.0, simulation.slow, 1, 3.0)
    trace = simulation.run()
    for group in trace.groups.values():
        if group.generator == 1 and group.finished == group.finished and group.granted > 0:
            lengths = [simulation.job.length(group.ticket, sample) for sample in range(4)]
            assert group.longest_s == pytest.approx(3 * TOKEN_S * max(lengths))


def test_a_step_that_takes_too_long_says_what_is_waited_for() -> None:
    with pytest.raises(WaitLimitError, match=r"ledger 0, step 0, forming: tickets \["):
        Simulation(job(0, ledgers=1, wait_limit_s=0.5)).run()


def test_spans_of_a_sample_add_up_to_its_tokens() -> None:
    metas: list[SampleMeta] = []

    class Watched(Simulation):
        def receive(self, index: int, source: int, message: object) -> None:
            metas.extend(getattr(message, "samples", []))
            super().receive(index, source, message)  # type: ignore[arg-type]

    Watched(job(2)).run()
    assert any(len(meta.spans) > 1 for meta in metas)
    assert not any(len(meta.spans) == 1 for meta in metas), "all of it has the version that it was born with"
    for meta in filter(lambda meta: meta.spans, metas):
        versions = [version for version, _ in meta.spans]
        assert sum(tokens for _, tokens in meta.spans) == meta.response_tokens
        assert versions == sorted(set(versions))
        assert meta.born == versions[0]


def test_lengths_are_those_of_the_latency_engine() -> None:
    lengths = MadeUpLengths(CONFIG, 4, 300, seed=7)
    for ticket in (0, 255, 256, 9000):
        assert lengths(ticket, 3) == min(300, made_up_length((7, ticket, 3), CONFIG))


class Watched(Simulation):
    """Knows how much any generator has kept at most."""

    groups = bytes = 0

    def send(self, source: int, target: int, message: Message) -> None:
        super().send(source, target, message)
        for generator in self.generators:
            self.groups = max(self.groups, len(generator.kept))
            self.bytes = max(self.bytes, sum(generator.kept.values()))


LITTLE = {"generators": 2, "slots": 8, "memory_bytes": 1}


@pytest.mark.parametrize("ledgers", [1, 2, 5])
@pytest.mark.parametrize("staleness", [0, 1, 2.5, 4])
def test_with_memory_for_nothing_a_generator_keeps_a_steps_groups_and_all_are_trained(
    staleness: float, ledgers: int
) -> None:
    simulation = Watched(job(staleness, ledgers, **LITTLE))
    trace = simulation.run()
    tickets = [ticket for step in trained(trace) for ticket in step]
    assert len(set(tickets)) == len(tickets) == 12 * 8
    assert simulation.groups <= simulation.spec.groups_per_step
    for ledger in simulation.nodes:
        ledger.check()


def test_memory_bounds_what_is_kept() -> None:
    slow = {"generators": 2, "slots": 8, "train_s": 300.0}
    free = Watched(job(8, **slow))
    free.run()
    bound = 0.6 * free.bytes
    simulation = Watched(job(8, memory_bytes=bound, **slow))
    trace = simulation.run()
    assert simulation.bytes <= 1.2 * bound, "groups at work are counted by the mean size of the finished ones"
    assert simulation.groups > simulation.spec.groups_per_step
    assert len(trace.steps) == 12


@pytest.mark.parametrize("seed", range(8))
def test_with_memory_for_nothing_the_others_make_up_for_a_dead_generator_and_a_silent_one(seed: int) -> None:
    simulation = Watched(job(seed % 4, 1 + seed % 3, seed=seed, **LITTLE | {"generators": 3}))
    simulation.at(3.0 + seed, simulation.silence, 0, 24.0)
    simulation.at(5.0 + 2 * seed, simulation.kill, 1)
    assert len(simulation.run().steps) == 12


def test_with_less_than_a_steps_groups_the_run_would_stand_still(monkeypatch: pytest.MonkeyPatch) -> None:
    make = MemoryBound.__init__
    monkeypatch.setattr(MemoryBound, "__init__", lambda self, memory, groups: make(self, memory, groups - 1))
    with pytest.raises(WaitLimitError):
        Simulation(job(1, 1, **LITTLE | {"generators": 1})).run()
