"""How a run goes on from a checkpoint, a journal and what is in the archive, over many crashes of a small world."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from archive_program import group
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.comm.errors import HeadraceError
from headrace.comm.messages import HeldGroup, SampleMeta, StepReport, TicketGrant
from headrace.comm.simulated import SimulatedNetwork
from headrace.comm.spilling import LostGroupsError
from headrace.comm.trajectories import trajectories_of
from headrace.comm.trajectory import Trajectory, Unit
from headrace.ranks import forming
from headrace.ranks.config import RanksConfig
from headrace.ranks.heartbeat import MainState
from headrace.ranks.journal import Began, Journal, JournalWriter, Trained, read_journal
from headrace.ranks.ledger import Ledger
from headrace.ranks.recovery import covered_by
from headrace.ranks.replay import Replay
from headrace.ranks.resume import Plan, await_plan, gather_salvaged, held_group, make_plan, meta_of, tell_plan
from headrace.ranks.segments import Archived
from headrace.ranks.tickets import NO_VARIANCE, FormedGroup, FormedStep, LedgerSpec, LedgerState
from headrace.ranks.topology import plan_roles

Key = tuple[int, int]


class World:
    """Ledgers without a network, one generator without an engine, a disk that outlives crashes."""

    def __init__(self, spec: LedgerSpec, ledgers: int, seed: int, lost: float) -> None:
        self.spec, self.rng, self.lost = spec, random.Random(seed), lost
        self.archive: dict[Key, HeldGroup] = {}
        self.journal = Journal({0: 0})
        self.launch = 0
        self.trained: dict[int, list[Key]] = {}
        """By step, in the time line that counts."""
        self.begin(ledgers, None)
        self.saved = [ledger.state() for ledger in self.ledgers]

    def begin(self, ledgers: int, state: LedgerState | None) -> None:
        self.ledgers = [Ledger(self.spec, index, ledgers, state) for index in range(ledgers)]
        self.running: list[TicketGrant] = []
        self.owners: dict[Key, int] = {}
        """Who goes on with what was unfinished; all else is made by 9."""
        for ledger in self.ledgers:
            ledger.check()
            ledger.ask(9, 1000)

    @property
    def step(self) -> int:
        return self.ledgers[0].step

    def ledger_of(self, ticket: int) -> Ledger:
        return self.ledgers[ticket % len(self.ledgers)]

    def work(self) -> None:
        """Grant, finish some groups, form a step if possible."""
        for ledger in self.ledgers:
            for grant in ledger.grant().get(9, []):
                self.running.append(grant)
                ledger.started(9, grant.ticket, grant.attempt, grant.min_version)
        self.rng.shuffle(self.running)
        for _ in range(self.rng.randint(0, len(self.running))):
            self.finish(self.running.pop())
        standings = [ledger.contribute(escrow=False) for ledger in self.ledgers]
        taken = forming.decide(standings, self.spec).taken
        shares = [None] * len(self.ledgers) if taken is None else taken
        chosen = [
            group for ledger, share in zip(self.ledgers, shares, strict=True) for group in ledger.deliver(0, share)
        ]
        if chosen:
            self.end_step(sorted(chosen, key=lambda group: group.ticket))

    def finish(self, grant: TicketGrant) -> None:
        now = self.step
        spans = ((grant.min_version, 3), (now, 2)) if now > grant.min_version else ()
        metas = [SampleMeta(grant.ticket, i, grant.attempt, grant.min_version, 4, 5, float(i), spans) for i in range(2)]
        key = grant.ticket, grant.attempt
        for meta in metas:
            self.ledger_of(grant.ticket).finished(self.owners.get(key, 9), meta)
        assert key not in self.archive or not self.archive[key].finished, "a key is made once"
        if self.rng.random() >= self.lost:
            self.archive[key] = HeldGroup(*key, self.launch, True, grant.min_version, now, 10, metas)

    def end_step(self, chosen: list[FormedGroup]) -> None:
        step = self.step
        assert all(0 <= step - group.born <= self.spec.oldest for group in chosen)
        for ledger in self.ledgers:
            ledger.end_step(len(chosen), published=(step + 1) % self.spec.publish_every == 0)
            ledger.check()
        self.trained[step] = [(group.ticket, group.attempt) for group in chosen]
        self.journal.steps[step] = Trained(step, chosen, [ledger.state() for ledger in self.ledgers])

    def checkpoint(self) -> None:
        self.saved = [ledger.state() for ledger in self.ledgers]
        covered = covered_by(self.saved)
        for key in [key for key in self.archive if self.is_settled(covered.next_numbers, set(covered.open), key[0])]:
            del self.archive[key]
        for step in [step for step in self.journal.steps if step < self.step]:
            del self.journal.steps[step]

    @staticmethod
    def is_settled(numbers: list[int], unsettled: set[int], ticket: int) -> bool:
        return ticket < numbers[ticket % len(numbers)] and ticket not in unsettled

    def stop(self) -> None:
        """What is at work is archived, too, as after a signal."""
        self.checkpoint()
        for grant in self.running:
            if self.rng.random() >= self.lost:
                key = grant.ticket, grant.attempt
                self.archive[key] = HeldGroup(*key, self.launch, False, grant.min_version, self.step, 3, [])

    def go_on(self, ledgers: int, generators: int) -> None:
        """After a stop or a crash."""
        held: dict[int, list[HeldGroup]] = {20 + index: [] for index in range(generators)}
        for item in self.archive.values():
            held[20 + self.rng.randrange(generators)].append(item)
        plan = make_plan(self.saved, self.journal, held, self.spec, ledgers)
        self.check_plan(plan, held)
        self.launch += 1
        self.begin(ledgers, plan.ledger)
        self.running = [TicketGrant(work.ticket, work.attempt, work.born) for work in plan.ledger.working]
        self.owners = {(work.ticket, work.attempt): work.owner for work in plan.ledger.working}
        for step in [step for step in self.trained if step >= self.step]:
            del self.trained[step]
            self.journal.steps.pop(step, None)
        self.journal.launches[self.launch] = self.step

    def check_plan(self, plan: Plan, held: dict[int, list[HeldGroup]]) -> None:
        keys = {rank: {(g.ticket, g.attempt) for g in groups} for rank, groups in held.items()}
        for formed in plan.replay:
            assert [(g.ticket, g.attempt) for g in formed.groups] == self.trained[formed.step]
            assert all((g.ticket, g.attempt) in keys[g.owner] for g in formed.groups)
        finished = {(g.ticket, g.samples[0].attempt): g for g in plan.ledger.finished}
        assert all(key in keys[group.owner] for key, group in finished.items())
        working = {(work.ticket, work.attempt) for work in plan.ledger.working}
        assert all(not self.archive[key].finished for key in working)
        used = {(g.ticket, g.attempt) for f in plan.replay for g in f.groups} | finished.keys() | working
        dropped = {key for keys in plan.dropped.values() for key in keys}
        assert dropped == set(self.archive) - used
        if self.lost == 0:
            assert plan.ledger.step == self.step, "all steps are repeated"
            covered = covered_by([plan.ledger])
            outstanding = {*covered.open, *(ticket for ticket, _ in working)}
            unsettled = [k for k in self.archive if not self.is_settled(covered.next_numbers, outstanding, k[0])]
            assert set(unsettled) == finished.keys() | working, "nothing that was made is made again"


@settings(max_examples=80, deadline=None)
@given(
    ledgers=st.lists(st.integers(1, 3), min_size=2, max_size=5),
    staleness=st.sampled_from([0, 0.5, 1, 2]),
    publish_every=st.integers(1, 2),
    lost=st.sampled_from([0.0, 0.0, 0.2]),
    seed=st.integers(0, 10**6),
)
def test_over_any_stops_and_crashes_every_ticket_is_trained_once_within_the_bound(
    ledgers, staleness, publish_every, lost, seed
):
    spec = LedgerSpec(3, staleness, publish_every, 2, steps=12)
    if staleness == 0.5 and publish_every == 1:
        ledgers = [1 for _ in ledgers]  # no rounds here that move credits between ledgers
    world = World(spec, ledgers[0], seed, lost)
    for count in ledgers[1:]:
        for _ in range(world.rng.randint(0, 25)):
            world.work()
            if world.rng.random() < 0.1:
                world.checkpoint()
        if world.rng.random() < 0.5:
            world.stop()
        world.go_on(count, world.rng.randint(1, 3))
    for _ in range(600):
        if world.step == spec.steps:
            break
        world.work()
    assert sorted(world.trained) == list(range(spec.steps))
    tickets = [ticket for keys in world.trained.values() for ticket, _ in keys]
    assert len(set(tickets)) == len(tickets) == spec.steps * spec.groups_per_step
    counts = [ledger.counts() for ledger in world.ledgers]
    assert sum(c.trained for c in counts) == len(tickets)
    assert sum(c.issued for c in counts) == sum(c.trained + c.outstanding + c.returned for c in counts)


def state(step: int, next_number: int, returned: list[Key] = [], **changes: object) -> LedgerState:  # noqa: B006
    trained = next_number - len(returned)
    plain = LedgerState(step, 1, [(0, next_number)], [], returned, next_number, trained, {}, {}, 0)
    return msgspec.structs.replace(plain, **changes)


def held(ticket: int, born: int, newest: int, attempt: int = 0, launch: int = 0, rewards: tuple[float, ...] = (0, 1)):
    samples = [SampleMeta(ticket, i, attempt, born, 1, 4, reward) for i, reward in enumerate(rewards)]
    return HeldGroup(ticket, attempt, launch, True, born, newest, 8, samples)


SPEC = LedgerSpec(2, 2, 1, 2, steps=50)


def test_tokens_of_versions_that_never_were_dont_count():
    """Launch 0 got to step 14 and lost its steps from 12 on; launch 1 goes on from there and crashes at 13."""
    journal = Journal({0: 0, 1: 12}, {12: Trained(12, [], [state(13, 26, [(24, 1), (25, 1)])])})
    groups = [held(24, 11, 13), held(25, 11, 12), held(26, 12, 13, launch=1)]
    plan = make_plan([state(12, 26, [(24, 1), (25, 1)])], journal, {5: groups}, SPEC, 1)
    assert [g.ticket for g in plan.ledger.finished] == [25, 26]
    assert plan.ledger.returned == [(24, 1)]
    assert plan.dropped == {5: [(24, 0)]}
    ahead = make_plan([state(12, 26, [(24, 1)])], Journal(), {5: [held(24, 11, 13)]}, SPEC, 1)
    assert ahead.ledger.finished == []
    assert ahead.ledger.returned == [(24, 1)]


def test_the_newest_attempt_of_a_ticket_counts_and_each_key_has_one_holder():
    groups = {5: [held(9, 4, 4), held(10, 4, 4)], 6: [held(9, 4, 4, attempt=2), held(10, 4, 4, launch=1)]}
    plan = make_plan([state(4, 10, [(9, 1)])], Journal(), groups, SPEC, 1)
    assert [(g.ticket, g.attempt, g.owner) for g in plan.ledger.finished] == [(9, 2, 6), (10, 0, 6)]
    assert plan.dropped == {5: [(9, 0), (10, 0)]}


def test_what_is_settled_or_beyond_the_data_is_dropped():
    spec = msgspec.structs.replace(SPEC, tickets=12)
    plan = make_plan([state(4, 10)], Journal(), {5: [held(3, 1, 1), held(12, 4, 4), held(11, 4, 4)]}, spec, 1)
    assert [g.ticket for g in plan.ledger.finished] == [11]
    assert plan.ledger.returned == [(10, 0)]
    assert plan.ledger.next_numbers == [(0, 12)]
    assert plan.dropped == {5: [(3, 0), (12, 0)]}


def test_groups_too_old_or_too_many_go_back_as_new_attempts():
    groups = [held(ticket, 4, 4) for ticket in range(10, 17)] + [held(17, 1, 2)]
    plan = make_plan([state(4, 10)], Journal(), {5: groups}, SPEC, 1)
    assert len(plan.ledger.finished) == SPEC.credits == 6
    assert plan.ledger.returned == [(16, 1), (17, 1)]


def test_the_filter_strikes_groups_of_equal_rewards_that_the_ledger_never_heard_of():
    spec = msgspec.structs.replace(SPEC, filtered_per_step=1)
    groups = [held(10, 4, 4, rewards=(1, 1)), held(11, 4, 4), held(12, 4, 4, rewards=(0, 0))]
    plan = make_plan([state(4, 10)], Journal(), {5: groups}, spec, 1)
    assert [g.ticket for g in plan.ledger.finished] == [11, 12], "no more than the cap"
    assert plan.ledger.dropped == {NO_VARIANCE: 1}
    assert plan.dropped == {5: [(10, 0)]}
    assert Ledger(spec, 0, 1, plan.ledger).counts().balanced


def test_masked_groups_keep_a_deadline_that_can_be_met():
    spec = msgspec.structs.replace(SPEC, overdue="mask")
    plan = make_plan([state(4, 10)], Journal(), {5: [held(10, 1, 4)]}, spec, 1)
    assert [(g.ticket, g.reserved) for g in plan.ledger.finished] == [(10, 2)]
    assert make_plan([state(4, 10)], Journal(), {5: [held(10, 1, 4)]}, SPEC, 1).ledger.finished == []


def test_the_line_for_people_says_what_was_saved():
    line = FormedGroup(3, 0, 1, 0, 0, 4, 3, 2, 10, 8, 4, 8, 2, 1.0)
    journal = Journal({0: 0}, {4: Trained(4, [line], [state(5, 10)])})
    groups = {5: [held(3, 3, 3), held(10, 5, 5)]}
    plan = make_plan([state(4, 10, [(3, 0)])], journal, groups, SPEC, 1)
    text = plan.describe(groups)
    assert text.startswith("archive: 1 finished groups (8 tokens) and 0 unfinished ones (0) go on;")
    assert text.endswith("; steps 5 to 5 are trained again with their 1 groups")


def test_what_is_read_of_a_group_is_what_its_ledger_was_told():
    versions = np.array([-1, -1, 4, 4, 5, 7], np.int32)
    plain = trajectories_of(group(5))[0]
    one = Trajectory(Unit(5, 0, 1), versions, np.ones(6, np.uint8), np.zeros(6, np.float32), versions, 0.5, "stop")
    assert meta_of(one) == SampleMeta(5, 0, 1, 4, 2, 4, 0.5, ((4, 2), (5, 1), (7, 1)))
    assert meta_of(plain) == SampleMeta(5, 0, 0, 1, 0, 50, 0.0, ())
    seen = held_group(Archived((5, 1), True, 3, [one]))
    assert (seen.launch, seen.born, seen.newest, seen.tokens) == (3, 4, 7, 4)


def report(ledger: LedgerState) -> StepReport:
    return StepReport(0, {}, {}, 0.0, 0, {}, msgspec.msgpack.encode(ledger))


def open_journal(path: Path, launch: int, step: int, said: list[str]) -> JournalWriter:
    def fail(error: BaseException) -> None:
        raise error

    return JournalWriter(path, launch, step, fail, said.append)


def test_the_journal_is_what_was_written_up_to_the_first_torn_line(tmp_path):
    path, said = tmp_path / "archive/journal.jsonl", []
    batch = [FormedGroup(3, 0, 1, 0, 0, 4, 3, 2, 10, 8, 4, 8, 2, 1.0)]
    assert read_journal(path) == Journal()
    writer = open_journal(path, 0, 0, said)
    for step in range(5):
        writer.trained(step, batch, [report(state(step + 1, 9)), report(state(step + 1, 8))])
    writer.covered(2)
    writer.close()
    lines = {step: Trained(step, batch, [state(step + 1, 9), state(step + 1, 8)]) for step in (2, 3, 4)}
    assert read_journal(path) == Journal({0: 0}, lines)
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    assert read_journal(path) == Journal({0: 0}, {step: lines[step] for step in (2, 3)})
    writer = open_journal(path, 1, 3, said)
    writer.trained(3, batch, [report(state(4, 7))])
    writer.close()
    read = read_journal(path)
    assert read == Journal({0: 0, 1: 3}, {2: lines[2], 3: Trained(3, batch, [state(4, 7)])})
    assert (read.oldest_begin_after(0), read.oldest_begin_after(1)) == (3, None)
    assert said == []


def test_lines_after_the_point_where_a_later_launch_began_are_void(tmp_path):
    path = tmp_path / "journal.jsonl"
    lines = [Began(0, 0), *(Trained(step, [], []) for step in range(5)), Began(1, 2), Trained(2, [], [])]
    path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    assert sorted(read_journal(path).steps) == [0, 1, 2]


def test_a_journal_that_cant_be_written_is_told_once(tmp_path):
    said: list[str] = []
    writer = open_journal(tmp_path / "archive/journal.jsonl", 0, 0, said)
    (tmp_path / "archive/journal.jsonl").unlink()
    (tmp_path / "archive").rmdir()
    for step in range(3):
        writer.trained(step, [], [])
    writer.close()
    assert len(said) == 1
    assert "journal.jsonl can't be written (No such file or directory)" in said[0]


def test_trainers_and_generators_learn_the_plan():
    network = SimulatedNetwork(4)
    roles = plan_roles(["a"] * 4, RanksConfig(trainers=2, generators=2))
    generators, other = roles.generators, roles.trainers[1]
    from headrace.comm.messages import Dropped, Heartbeat, Salvaged

    for rank in generators:
        network.transport(rank).send(0, Heartbeat("starting", 0.0, 0))
        network.transport(rank).send(0, Salvaged([held(10 + rank, 4, 4), held(rank, 1, 1)]))
    early: list[object] = []
    found = gather_salvaged(network.transport(0), roles, early, 5)  # type: ignore[arg-type]
    assert sorted(found) == sorted(generators)
    assert len(early) == 2
    plan = make_plan([state(4, 10)], Journal(), found, SPEC, 2)
    tell_plan(network.transport(0), roles, plan)
    assert await_plan(network.transport(other), roles, [], 5) == plan
    for rank in generators:
        assert [received.message for received in network.transport(rank).poll()] == [Dropped([(rank, 0)])]


def test_a_generator_that_doesnt_read_the_archive_is_named():
    from headrace.comm.errors import WaitLimitError

    roles = plan_roles(["a"] * 2, RanksConfig(trainers=1, generators=1))
    with pytest.raises(WaitLimitError, match=r"rank 1 \(generator 0 on a\) to read the archive"):
        gather_salvaged(SimulatedNetwork(2).transport(0), roles, [], 0.05)


def test_steps_whose_groups_are_lost_after_all_end_the_job_with_the_way_on():
    def lost(request):
        raise LostGroupsError("Rank 2 has lost groups: ticket 3 has gone.", [(3, 0)])

    consumer = SimpleNamespace(pull=lambda owner, keys: 0, take=lost)
    replay = Replay(0, None, consumer, None, MainState(), None, 9.0)
    formed = FormedStep(4, 0, [FormedGroup(3, 0, 2, 0, 0, 4, 4, 1, 3, 1, 1, 1, 1, 1.0)], finished=False)
    with pytest.raises(HeadraceError, match=r"ticket 3 has gone\. So the steps .* Go on by --resume"):
        list(replay.run([formed]))
