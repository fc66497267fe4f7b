"""The generator's loop against a scripted engine: what it reports, keeps, ends and forgets."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scripted import PROMPT, Engine, Scorer, Subscriber, Tasks

from headrace.comm.courier import Courier
from headrace.comm.exchange import ExchangeOwner
from headrace.comm.messages import (
    Ask,
    Cut,
    Dropped,
    Failed,
    Finished,
    Forgotten,
    Grants,
    Release,
    Returned,
    SampleMeta,
    Started,
    TicketGrant,
)
from headrace.comm.simulated import SimulatedNetwork
from headrace.comm.trajectories import TrajectoryStore
from headrace.ranks.config import RanksConfig
from headrace.ranks.generator import GeneratorDesk, GeneratorLoop
from headrace.ranks.heartbeat import MainState
from headrace.ranks.memory import MemoryBound
from headrace.ranks.topology import plan_roles
from headrace.rollout.engine import Capacity, SamplingParams


class Bench:
    """One generator (rank 1); the test plays the trainer (rank 0)."""

    def __init__(self, slots=4, group_size=2, lengths=None, partial=True, oldest=1, delay=0, memory_bytes=math.inf):
        network = SimulatedNetwork(2)
        self.trainer, transport = network.transport(0), network.transport(1)
        roles = plan_roles(["a", "a"], RanksConfig(trainers=1, generators=1))
        desk = GeneratorDesk(transport, roles)
        self.store, self.scorer, self.written = TrajectoryStore(memory_bytes), Scorer(), []
        self.courier = Courier(transport, [desk, ExchangeOwner(transport, self.store)], lambda error: None)
        self.engine, self.subscriber = Engine(slots, lengths or {}, delay), Subscriber()
        self.loop = GeneratorLoop(
            rank=1,
            roles=roles,
            courier=self.courier,
            desk=desk,
            engine=self.engine,
            subscriber=self.subscriber,
            store=self.store,
            tasks=Tasks(),
            scorer=self.scorer,
            params=SamplingParams(max_tokens=100),
            group_size=group_size,
            memory=MemoryBound(memory_bytes, step_groups=3),
            partial=partial,
            oldest=oldest,
            seed=0,
            main=MainState(),
        )
        self.got = []
        self.turn()

    def turn(self, times=1):
        """Let the loop run; what it has said is in `got`, asks apart."""
        for _ in range(times):
            self.courier.pump()
            self.loop.step()
            self.courier.pump()
            self.got += [received.message for received in self.trainer.poll()]

    def say(self, message):
        self.trainer.send(1, message)

    def grant(self, *tickets, version=0):
        self.say(Grants([TicketGrant(ticket, 0, version) for ticket in tickets]))

    def take(self, kind):
        """What came of this kind since the last time."""
        found = [message for message in self.got if isinstance(message, kind)]
        self.got = [message for message in self.got if not isinstance(message, kind)]
        return found

    def asked(self):
        return sum(ask.room for ask in self.take(Ask))


def test_a_group_is_reported_and_kept_with_the_version_of_every_token():
    bench = Bench(lengths={(0, 0): 2, (0, 1): 5})
    assert bench.asked() == 2
    bench.grant(0)
    bench.turn(2)
    assert bench.take(Started) == [Started([(0, 0, 0)])]
    bench.subscriber.version = 1
    bench.turn(2)
    bench.subscriber.version = 3
    bench.turn(2)
    (finished,) = bench.take(Finished)
    assert finished.samples == [
        SampleMeta(0, 0, 0, 0, PROMPT, 2, 2.0),
        SampleMeta(0, 1, 0, 0, PROMPT, 5, 5.0, ((0, 2), (1, 2), (3, 1))),
    ]
    assert not finished.left_out
    first, second = bench.store.get([(0, 0)])[0, 0]
    assert first.versions.tolist() == [-1] * PROMPT + [0, 0]
    assert second.versions.tolist() == [-1] * PROMPT + [0, 0, 1, 1, 3]
    assert second.tokens.tolist() == [7] * PROMPT + [1, 2, 3, 4, 5]
    assert second.loss_mask.tolist() == [0] * PROMPT + [1] * 5
    assert (second.finish, second.response_text, second.born) == ("stop", "1 2 3 4 5", 0)


def test_a_grant_waits_for_the_weights_that_it_needs():
    bench = Bench()
    bench.grant(0, version=2)
    bench.turn(3)
    assert not bench.take(Started)
    assert bench.loop.waits
    bench.subscriber.version = 2
    bench.turn()
    assert bench.take(Started) == [Started([(0, 0, 2)])]


def test_cut_keeps_what_there_is_and_leaves_out_samples_without_a_token():
    bench = Bench(slots=2, group_size=3, lengths={(0, 0): 1, (0, 1): 50, (0, 2): 50})
    bench.engine.slots = 1
    bench.grant(0)
    bench.turn(4)
    bench.say(Cut([(0, 0)], keep=True))
    bench.turn()
    (finished,) = bench.take(Finished)
    assert [(meta.sample, meta.response_tokens, meta.reward) for meta in finished.samples] == [(0, 1, 1.0), (1, 3, 3.0)]
    assert finished.left_out == [(0, 2, 0)]
    assert [sample.finish for sample in bench.store.get([(0, 0)])[0, 0]] == ["stop", "cut"]
    assert bench.engine.capacity() == Capacity(1, 0, 0)
    bench.asked()
    bench.turn()
    assert bench.asked() == 0, "the slots that got free have been asked for once"


def test_cut_without_keeping_leaves_out_what_runs_and_waits_for_rewards_of_the_rest():
    bench = Bench(group_size=3, lengths={(0, 0): 1, (0, 1): 50, (0, 2): 2})
    bench.scorer.held = True
    bench.grant(0)
    bench.turn(3)
    bench.say(Cut([(0, 0)], keep=False))
    bench.turn()
    assert not bench.take(Finished)
    bench.scorer.held = False
    bench.turn()
    (finished,) = bench.take(Finished)
    assert [meta.sample for meta in finished.samples] == [0, 2]
    assert finished.left_out == [(0, 1, 0)]


def test_a_cut_group_of_which_nothing_is_finished_is_left_out_whole():
    bench = Bench(lengths={(0, 0): 50, (0, 1): 50})
    bench.grant(0)
    bench.turn(2)
    bench.say(Cut([(0, 0)], keep=False))
    bench.turn()
    (finished,) = bench.take(Finished)
    assert (finished.samples, finished.left_out) == ([], [(0, 0, 0), (0, 1, 0)])
    assert bench.store.list() == []


def test_cut_groups_without_a_token_are_handed_back_whether_held_or_waiting_for_slots():
    bench = Bench(slots=6, group_size=2, lengths={(0, 0): 50, (0, 1): 50})
    bench.engine.slots = 2
    bench.grant(0, 1)
    bench.grant(2, version=9)
    bench.turn()
    assert bench.engine.capacity() == Capacity(2, 2, 2)
    bench.say(Cut([(1, 0), (2, 0), (8, 0)], keep=True))
    bench.turn()
    (returned,) = bench.take(Returned)
    assert sorted(returned.tickets) == [(1, 0), (2, 0)]
    assert bench.engine.capacity() == Capacity(2, 2, 0)


def test_a_cut_sample_whose_reward_fails_gives_up_its_group():
    bench = Bench(lengths={(0, 0): 50, (0, 1): 50})
    bench.scorer.failing = {0}
    bench.grant(0)
    bench.turn(2)
    bench.say(Cut([(0, 0)], keep=True))
    bench.turn()
    assert bench.take(Failed) == [Failed(0, 0, "bad", "x")]
    assert not bench.take(Finished)


def test_a_cut_that_crosses_its_answer_changes_nothing():
    bench = Bench(lengths={(0, 0): 2, (0, 1): 2})
    bench.grant(0)
    bench.turn(3)
    assert len(bench.take(Finished)) == 1
    bench.say(Cut([(0, 0)], keep=False))
    bench.turn()
    assert not bench.take((Finished, Returned))
    assert bench.store.list() == [(0, 0)]


def test_dropped_groups_are_forgotten_wherever_they_are():
    bench = Bench(slots=8, lengths={(0, 0): 1, (0, 1): 1, (2, 0): 3, (2, 1): 3})
    bench.grant(0, 1, 2)
    bench.grant(3, version=9)
    bench.turn(2)
    assert bench.store.list() == [(0, 0)]
    bench.scorer.held = True
    bench.turn(2)
    bench.asked()
    bench.say(Dropped([(ticket, 0) for ticket in range(4)] + [(17, 0)]))
    bench.turn()
    assert bench.store.list() == []
    assert bench.engine.capacity() == Capacity(8, 0, 0)
    assert bench.asked() == 2, "room for the groups that ran or were held; slots of finished ones were asked for before"
    bench.scorer.held = False
    bench.take((Started, Finished))
    bench.turn(3)
    assert not bench.take((Finished, Failed, Returned)), "rewards that come late count for nothing"
    assert not bench.loop.waits


def test_forgotten_asks_are_asked_again():
    bench = Bench(slots=8, group_size=2)
    assert bench.asked() == 4
    bench.say(Forgotten(3))
    bench.turn()
    assert bench.asked() == 3


@pytest.mark.parametrize(("oldest", "late"), [(1, True), (2, False)])
def test_a_group_that_ends_after_its_deadline_counts_as_late(oldest, late):
    bench = Bench(slots=1, group_size=1, lengths={(ticket, 0): 5 for ticket in range(9)}, oldest=oldest)
    bench.loop._intake.window = 4
    bench.loop._intake._slots = 8
    version = 0
    for ticket in range(4):
        bench.turn()
        bench.grant(ticket, version=version)
        bench.turn()
        bench.subscriber.version = version = version + 2
        bench.turn(5)
    assert bench.loop._intake.window == (1 if late else 5)


def versions_seen(partial, delay, every=3, turns=300):
    """Groups of a long run in which a new version comes every few turns; returns the versions in each."""
    lengths = {(ticket, sample): 1 + (5 * ticket + 3 * sample) % 11 for ticket in range(1000) for sample in range(3)}
    bench = Bench(slots=5, group_size=3, lengths=lengths, partial=partial, delay=delay)
    ticket = version = 0
    groups = []
    for turn in range(turns):
        if turn % every == 0 and bench.subscriber.version is None:
            version += 1
            bench.subscriber.version = version
        room = bench.asked()
        bench.grant(*range(ticket, ticket + room), version=version)
        ticket += room
        bench.turn()
        for finished in bench.take(Finished):
            keys = {(meta.ticket, meta.attempt) for meta in finished.samples}
            for samples in bench.store.get(keys).values():
                groups.append(set(np.concatenate([s.versions[s.versions >= 0] for s in samples]).tolist()))
            bench.store.release(keys)
    return groups


@pytest.mark.parametrize("delay", [0, 2, 7])
def test_without_partial_rollout_no_group_mixes_versions_though_they_come_all_the_time(delay):
    groups = versions_seen(partial=False, delay=delay)
    assert len(groups) > 10
    assert all(len(versions) == 1 for versions in groups)
    assert len(set.union(*groups)) > 5, "it goes on to newer versions"


def test_with_partial_rollout_groups_mix_versions():
    groups = versions_seen(partial=True, delay=0)
    assert sum(len(versions) > 1 for versions in groups) > len(groups) / 2


def test_without_partial_rollout_a_waiting_version_holds_back_new_groups_until_the_running_ones_are_over():
    bench = Bench(slots=4, group_size=2, lengths={(0, 0): 3, (0, 1): 6}, partial=False)
    bench.grant(0)
    bench.turn()
    bench.subscriber.version = 1
    bench.grant(1, version=0)
    bench.turn(4)
    assert bench.take(Started) == [Started([(0, 0, 0)])]
    bench.turn(2)
    assert bench.take(Started) == [Started([(1, 0, 1)])]
    (finished,) = bench.take(Finished)
    assert [meta.spans for meta in finished.samples] == [(), ()]


def test_what_is_at_work_at_a_stop_goes_on_elsewhere_where_it_was():
    lengths = {(0, 0): 1, (0, 1): 2, (0, 2): 9, (0, 3): 4}
    first = Bench(slots=3, group_size=5, lengths=lengths)
    first.grant(0)
    first.turn()
    first.scorer.held = True
    first.turn(2)
    first.subscriber.version = 1
    first.turn()
    (group,) = first.loop.drop_all()
    group.samples[4].left_out = True
    assert [(len(s.tokens), s.finish, s.reward) for s in group.samples] == [
        (1, "stop", 1.0),
        (2, "stop", None),
        (4, "", None),
        (3, "", None),
        (2, "", None),
    ]
    kept = [t for t in group.trajectories() if t.unit.sample != 4]
    assert [t.finish for t in kept] == ["stop", "stop", "", ""]

    second = Bench(slots=3, group_size=5, lengths=lengths)
    second.subscriber.version = 2
    second.turn()
    asked = second.asked()
    second.loop.resume((0, 0), kept)
    second.turn(6)
    assert not second.take(Started), "its ledger knows"
    (finished,) = second.take(Finished)
    assert [(m.sample, m.response_tokens, m.born, m.reward, m.spans) for m in finished.samples] == [
        (0, 1, 0, 1.0, ()),
        (1, 2, 0, 2.0, ()),
        (2, 9, 0, 9.0, ((0, 3), (1, 1), (2, 5))),
        (3, 4, 0, 4.0, ((0, 2), (1, 1), (2, 1))),
    ]
    assert finished.left_out == [(0, 4, 0)]
    long = second.store.get([(0, 0)])[0, 0][2]
    assert long.tokens.tolist() == [7] * PROMPT + list(range(1, 10))
    assert long.logprobs[PROMPT:].tolist() == pytest.approx([-made / 10 for made in range(1, 10)])
    assert second.engine.capacity() == Capacity(3, 0, 0)
    assert asked + second.asked() == 1, "what it goes on with wasn't asked for"


def test_a_resumed_group_that_counts_no_more_is_dropped_with_all_that_it_has():
    first = Bench()
    first.grant(0)
    first.turn(2)
    (group,) = first.loop.drop_all()
    second = Bench()
    second.loop.resume((0, 0), group.trajectories())
    second.say(Dropped([(0, 0)]))
    second.turn(10)
    assert not second.take(Finished)
    assert second.engine.capacity() == Capacity(4, 0, 0)


def test_without_memory_it_asks_for_a_steps_groups_and_goes_on_when_they_are_released():
    bench = Bench(slots=12, group_size=2, memory_bytes=1)
    assert bench.asked() == 6, "before a group is finished nobody knows how large one is"
    bench.grant(*range(6))
    bench.turn(10)
    assert len(bench.store.list()) == 6
    assert bench.asked() == 0
    bench.say(Release([(0, 0), (1, 0), (2, 0)]))
    bench.turn()
    assert bench.asked() == 0, "three are a step"
    bench.say(Release([(3, 0)]))
    bench.turn()
    assert bench.asked() == 1
    bench.grant(6)
    bench.turn(10)
    (*_, last) = bench.take(Finished)
    assert last.counters.kept_bytes == sum(g.nbytes for g in bench.store.select(bench.store.list()).values())
    assert bench.asked() == 0
    bench.say(Release(bench.store.list()))
    bench.turn()
    assert bench.asked() == 3


def test_what_is_spilled_makes_room():
    bench = Bench(slots=2, group_size=2, memory_bytes=1)
    bench.store.spill_to(lambda group: bench.written.append(group.key), lambda: None, lambda key: None)
    for ticket in range(3):
        assert bench.asked() == 1
        bench.grant(ticket)
        bench.turn(10)
    assert bench.asked() == 0
    bench.store.let_go(bench.written, written=True)
    bench.turn()
    assert bench.asked() == 1
    bench.grant(3)
    bench.turn(10)
    (*_, last) = bench.take(Finished)
    assert last.counters.spilled == 3
