"""Ledger nodes over the simulated network and the real wire format: forming, pacing, undoing, what they say."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from headrace.comm.messages import (
    Ask,
    Cut,
    Dropped,
    Failed,
    Finished,
    Forgotten,
    GeneratorCounters,
    Grants,
    Late,
    Message,
    Redirect,
    SampleMeta,
    Silence,
    Started,
    TicketGrant,
)
from headrace.comm.simulated import SimulatedNetwork
from headrace.comm.transport import Received
from headrace.ranks.node import LedgerNode
from headrace.ranks.pace import LONGEST_PAUSE_S, SHORTEST_PAUSE_S
from headrace.ranks.tickets import FormedStep, LedgerRuleError, LedgerSpec, Overdue, TicketCounts

TICK_S = 0.002


def counters(version: int = 0) -> GeneratorCounters:
    return GeneratorCounters(10, 2, 1.0, 0.5, 1.0, version)


class Job:
    """Ledgers at ranks 0 … L-1, one generator rank after them, whose messages the test writes and reads."""

    def __init__(self, spec: LedgerSpec, ledgers: int) -> None:
        self.network = SimulatedNetwork(ledgers + 1)
        self.generator = ledgers
        self.transports = [self.network.transport(rank) for rank in range(ledgers + 1)]
        ranks = list(range(ledgers))
        self.nodes = [LedgerNode(spec, i, ranks, [ledgers], self.transports[i].send) for i in ranks]
        self.grants: list[TicketGrant] = []
        self.redirects: list[Redirect] = []
        self.dropped: list[tuple[int, int]] = []
        self.cut: list[Cut] = []
        self.forgotten: list[int] = []
        self.late: list[tuple[int, int]] = []

    def say(self, message: Message, ledger: int = 0) -> None:
        self.transports[self.generator].send(ledger, message)

    def tell_all(self, message: Message) -> None:
        for ledger in range(len(self.nodes)):
            self.say(message, ledger)

    def finish(self, ticket: int, length: int = 1, born: int = 0) -> None:
        self.say(Finished([SampleMeta(ticket, 0, 0, born, 3, length, 1.0)], counters()), ticket % len(self.nodes))

    def pass_time(self, seconds: float) -> None:
        for _ in range(round(seconds / TICK_S)):
            self.network.advance(TICK_S)
            for node, transport in zip(self.nodes, self.transports, strict=False):
                for received in transport.poll():
                    node.receive(received, self.network.now)
                node.tick(self.network.now)
                node.check()
            for received in self.transports[self.generator].poll():
                match received.message:
                    case Grants(grants):
                        self.grants += grants
                    case Redirect(ledger, room):
                        self.redirects.append(received.message)
                        self.say(Ask(room), ledger)
                    case Dropped(tickets):
                        self.dropped += tickets
                    case Late(tickets):
                        self.late += tickets
                    case Cut():
                        self.cut.append(received.message)
                    case Forgotten(room):
                        self.forgotten.append(room)

    def formed(self) -> FormedStep:
        """The batch, which must be the same everywhere."""
        self.pass_time(0.3)
        batches = [node.take_formed() for node in self.nodes]
        assert batches[0] is not None
        assert all(batch == batches[0] for batch in batches)
        assert all(node.take_formed() is None for node in self.nodes)
        return batches[0]

    def end_step(self, step: int, formation: int = 0) -> None:
        """All replicas pull, train and publish."""
        for node in self.nodes:
            node.pulled(formation)
        self.pass_time(0.1)
        for node in self.nodes:
            node.end_step(step, published=True)

    def run_step(self, room: int) -> FormedStep:
        """Ask, finish what was granted, form."""
        self.say(Ask(room))
        self.pass_time(0.3)
        for grant in self.grants:
            self.finish(grant.ticket, 1 + grant.ticket, grant.min_version)
        self.grants = []
        return self.formed()


def spec(groups: int, staleness: float = 0, steps: int = 9, tickets: int | None = None) -> LedgerSpec:
    return LedgerSpec(groups, staleness, 1, 1, steps, tickets)


@pytest.mark.parametrize("ledgers", [1, 2, 3, 5])
def test_all_ledgers_form_the_same_steps_to_the_end(ledgers: int) -> None:
    job = Job(spec(4, steps=3), ledgers)
    trained: list[int] = []
    for step in range(3):
        formed = job.run_step(room=4)
        assert (formed.step, formed.formation, formed.finished, len(formed.groups)) == (step, 0, False, 4)
        assert {group.replica for group in formed.groups} == set(range(min(4, ledgers)))
        assert all(group.ledger == group.ticket % ledgers for group in formed.groups)
        trained += [group.ticket for group in formed.groups]
        job.end_step(step)
    end = job.formed()
    assert (end.step, end.groups, end.finished) == (3, [], True)
    assert len(set(trained)) == 12
    total = job.nodes[0].counts()
    for node in job.nodes[1:]:
        total = total + node.counts()
    assert (total.issued, total.trained, total.outstanding) == (12, 12, 0)
    assert job.nodes[0].totals == total


def test_the_first_step_forms_without_an_end_of_step_before() -> None:
    assert Job(spec(1), 1).run_step(room=1).step == 0


def test_groups_are_divided_by_tokens() -> None:
    job = Job(spec(3), 2)
    job.say(Ask(3))
    job.pass_time(0.3)
    tickets = sorted(grant.ticket for grant in job.grants)
    for ticket, length in zip(tickets, (10, 90, 85), strict=True):
        job.finish(ticket, length)
    replica = {group.ticket: group.replica for group in job.formed().groups}
    assert replica[tickets[0]] == replica[tickets[2]] != replica[tickets[1]]


def test_asks_move_to_the_ledger_that_has_numbers_and_credits_to_the_ledger_that_has_asks() -> None:
    job = Job(spec(1, steps=5, tickets=2), 2)
    job.say(Ask(1), ledger=1)
    job.pass_time(0.3)
    assert [grant.ticket for grant in job.grants] == [1]
    job.say(Ask(1), ledger=1)
    job.finish(1)
    job.formed()
    job.end_step(0)
    job.pass_time(0.3)
    assert job.redirects == [Redirect(0, 1)]
    assert job.grants[1:] == [TicketGrant(0, 0, 1)]


def idle_rounds(job: Job, seconds: float, monkeypatch: pytest.MonkeyPatch) -> int:
    count = 0
    begin: Callable[[LedgerNode], None] = LedgerNode._begin_round

    def counted(self: LedgerNode) -> None:
        nonlocal count
        count += 1
        begin(self)

    with monkeypatch.context() as patch:
        patch.setattr(LedgerNode, "_begin_round", counted)
        job.pass_time(seconds)
    return count // len(job.nodes)


@pytest.mark.parametrize("ledgers", [1, 2, 4])
def test_idle_ledgers_back_off(ledgers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(spec(1), ledgers)
    job.pass_time(1.0)
    assert idle_rounds(job, 2.0, monkeypatch) <= 2.0 / LONGEST_PAUSE_S + 1


@pytest.mark.parametrize("ledgers", [1, 2, 5])
def test_a_round_begins_when_a_batch_can_be_formed_and_not_before(
    ledgers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(spec(50, 1), ledgers)
    for ledger in range(ledgers):
        job.say(Ask(100 // ledgers), ledger)
    job.pass_time(1.0)
    rounds = 0
    for grant in job.grants[:49]:
        job.finish(grant.ticket)
        rounds += idle_rounds(job, TICK_S, monkeypatch)
    assert rounds <= 1
    job.finish(job.grants[49].ticket)
    job.pass_time(0.05)
    assert all(node.take_formed() is not None for node in job.nodes)


def test_rounds_keep_their_distance(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(spec(1), 2)
    job.pass_time(1.0)
    rounds = 0
    for _ in range(20):
        job.nodes[0].unform([])
        rounds += idle_rounds(job, SHORTEST_PAUSE_S, monkeypatch)
    assert 15 <= rounds <= 21


def test_a_batch_is_shared_at_once() -> None:
    """One ledger alone needs no network: chosen and formed at one tick, without a pause between."""
    node = LedgerNode(spec(1), 0, [0], [1], lambda target, message: None)
    node.receive(Received(1, Ask(1)), 0.0)
    node.receive(Received(1, Finished([SampleMeta(0, 0, 0, 0, 1, 1, 0.0)], counters())), 0.0)
    node.tick(0.0)
    assert node.take_formed() is not None


def test_an_undone_step_is_formed_again_without_what_was_lost() -> None:
    job = Job(spec(2, 1), 2)
    first = job.run_step(room=4)
    lost = first.groups[0].ticket
    job.nodes[1].unform([lost])
    job.pass_time(0.3)
    second = job.nodes[0].take_formed()
    assert second == job.nodes[1].take_formed()
    assert second is not None
    assert (second.step, second.formation) == (0, 1)
    assert lost not in [group.ticket for group in second.groups]
    assert sum(node.counts().returned for node in job.nodes) + len(job.grants) == 1
    job.end_step(0, formation=1)
    assert all(node.counts().balanced for node in job.nodes)


def test_an_undone_step_is_waited_for_if_nothing_else_is_finished() -> None:
    job = Job(spec(1), 2)
    lost = job.run_step(room=1).groups[0].ticket
    job.say(Ask(1), ledger=lost % 2)
    job.nodes[0].unform([lost])
    job.pass_time(0.3)
    assert job.grants == [TicketGrant(lost, 1, 0)]
    job.say(Finished([SampleMeta(lost, 0, 1, 0, 1, 1, 0.0)], counters()), ledger=lost % 2)
    again = job.formed()
    assert [(group.ticket, group.attempt) for group in again.groups] == [(lost, 1)]


def test_no_replica_trains_before_all_have_their_data() -> None:
    job = Job(spec(1, 1), 2)
    lost = job.run_step(room=2).groups[0].ticket
    job.nodes[0].pulled(0)
    job.pass_time(1.0)
    assert not any(node.may_train for node in job.nodes)
    job.nodes[1].unform([lost])
    job.pass_time(0.3)
    assert all(node.take_formed() is not None for node in job.nodes), "undone and formed again, without a defect"
    job.nodes[0].pulled(0)
    job.nodes[1].pulled(1)
    job.pass_time(0.3)
    assert not any(node.may_train for node in job.nodes), "what was said of the void batch counts for nothing"
    job.nodes[0].pulled(1)
    job.pass_time(0.3)
    assert all(node.may_train for node in job.nodes)


def test_a_failure_is_kept_with_its_error() -> None:
    job = Job(spec(1), 1)
    job.say(Ask(2))
    job.say(Started([(0, 0, 0)]))
    job.say(Failed(0, 0, "reward_raised", "ValueError: no number"))
    job.pass_time(0.05)
    assert [grant.ticket for grant in job.grants] == [0, 1]
    assert [failure.text for failure in job.nodes[0].take_failures()] == ["ValueError: no number"]
    assert job.nodes[0].take_failures() == []
    assert job.nodes[0].counts().failed_reasons == {"reward_raised": 1}


def test_the_latest_counters_of_a_generator_are_kept() -> None:
    job = Job(spec(1), 1)
    job.say(Finished([], counters(1)))
    job.say(Finished([], counters(2)))
    job.pass_time(0.01)
    assert job.nodes[0].counters == {job.generator: counters(2)}


def test_describe_names_the_tickets_due_and_where_they_are() -> None:
    job = Job(spec(2), 2)
    job.say(Ask(2))
    job.pass_time(0.3)
    text = " ".join(node.describe() for node in job.nodes)
    assert "ledger 1, step 0, forming" in text
    for grant in job.grants:
        assert f"{grant.ticket}" in text
    assert f"at rank {job.generator}" in text
    lonely = LedgerNode(spec(1), 0, [4, 7], [9], lambda target, message: None)
    lonely.tick(0.0)
    assert "round 0 waits for ledger 1 at rank 7" in lonely.describe()


def test_only_generators_ask() -> None:
    node = LedgerNode(spec(1), 0, [0], [1], lambda target, message: None)
    with pytest.raises(LedgerRuleError, match="rank 3, no generator, sent Ask"):
        node.receive(Received(3, Ask(1)), 0.0)


def test_a_step_ends_once_and_only_when_formed() -> None:
    job = Job(spec(1), 1)
    with pytest.raises(LedgerRuleError, match="end of step 0"):
        job.nodes[0].end_step(0, published=True)
    job.run_step(room=1)
    with pytest.raises(LedgerRuleError, match="end of step 0"):
        job.nodes[0].end_step(0, published=True)
    job.end_step(0)
    with pytest.raises(LedgerRuleError, match="end of step 0"):
        job.nodes[0].end_step(0, published=True)


def test_the_state_is_that_of_the_last_end_of_step() -> None:
    job = Job(spec(1, 1), 1)
    start = job.nodes[0].state()
    job.run_step(room=1)
    assert job.nodes[0].state() is start
    job.end_step(0)
    assert job.nodes[0].state().step == 1
    assert job.nodes[0].state().trained == 1


def test_counts_of_several_ledgers_add_up() -> None:
    one, two = TicketCounts(5, 1, 0, 1, 2, 1, 0, {}, {"a": 1}), TicketCounts(3, 1, 0, 2, 0, 0, 4, {}, {"a": 1, "b": 1})
    assert one + two == TicketCounts(8, 2, 0, 3, 2, 1, 4, {}, {"a": 2, "b": 1})
    assert (one + two).balanced


@pytest.mark.parametrize("ledgers", [1, 2, 3])
@pytest.mark.parametrize("wait", [0.0, 0.002, 0.006, 0.011])
def test_a_request_to_end_is_kept_even_in_the_middle_of_a_round(ledgers: int, wait: float) -> None:
    job = Job(spec(2), ledgers)
    job.run_step(room=2)
    job.end_step(0)
    job.say(Ask(2))
    job.pass_time(wait)
    for node in job.nodes:
        node.end_run()
    job.pass_time(1.0)
    ends = [node.take_formed() for node in job.nodes]
    assert all(end is not None and end.finished and end.step == 1 for end in ends)


def test_a_run_that_is_resumed_beyond_its_last_step_has_no_credits() -> None:
    assert spec(4, steps=3).credits_at(3) == spec(4, steps=3).credits_at(5) == 0


def overdue_job(overdue: Overdue, by_sample: bool = False) -> Job:
    """Three groups are granted with D = 1; those of tickets 1 and 2 are finished, that of ticket 0 never is."""
    job = Job(LedgerSpec(1, 1, 1, 1, 100, overdue=overdue, by_sample=by_sample), 2)
    for ledger in range(2):
        job.say(Ask(1), ledger)
    job.pass_time(0.3)
    job.finish(1)
    assert [group.ticket for group in job.formed().groups] == [1]
    job.end_step(0)
    job.say(Ask(1))
    job.pass_time(0.3)
    job.finish(2, born=1)
    return job


def test_while_a_due_group_is_unfinished_everyone_waits_by_default() -> None:
    job = overdue_job("wait")
    job.pass_time(3.0)
    assert [node.take_formed() for node in job.nodes] == [None, None]
    assert job.late == [(0, 0)], "its generator is told, once"
    job.finish(0)
    assert [group.ticket for group in job.formed().groups] == [0]


def test_with_drop_the_others_go_on_and_the_generator_is_told() -> None:
    job = overdue_job("drop")
    assert [group.ticket for group in job.formed().groups] == [2]
    assert job.dropped == [(0, 0)]
    assert sum(node.counts().dropped for node in job.nodes) == 1


def test_with_mask_the_others_go_on_and_the_group_is_trained_later() -> None:
    job = overdue_job("mask")
    assert [group.ticket for group in job.formed().groups] == [2]
    assert job.late == [(0, 0)]
    job.end_step(1)
    job.say(Finished([SampleMeta(0, 0, 0, 0, 3, 4, 1.0, ((0, 1), (1, 3)))], counters()))
    group = job.formed().groups[0]
    assert (group.ticket, group.loss_tokens, group.born) == (0, 3, 1)


@pytest.mark.parametrize(("overdue", "by_sample"), [("cut", False), ("drop", True)])
def test_with_cut_the_generator_is_asked_for_what_there_is(overdue: Overdue, by_sample: bool) -> None:
    job = overdue_job(overdue, by_sample)
    job.pass_time(0.3)
    assert job.cut == [Cut([(0, 0)], keep=not by_sample)]
    job.finish(0)
    assert [group.ticket for group in job.formed().groups] == [0]


def test_a_silent_generator_hears_what_was_forgotten_and_gets_tickets_when_it_is_back() -> None:
    job = Job(LedgerSpec(1, 1, 1, 1, 100), 1)
    job.say(Ask(5))
    job.pass_time(0.1)
    assert len(job.grants) == 2
    job.tell_all(Silence(job.generator, over=False))
    job.say(Ask(1))
    job.pass_time(0.1)
    assert job.forgotten == [3]
    assert job.nodes[0].absent == {job.generator}
    assert len(job.grants) == 2
    job.tell_all(Silence(job.generator, over=True))
    job.pass_time(0.1)
    assert job.grants[2:] == [TicketGrant(0, 1, 0)]


def test_a_dead_generator_does_not_come_back_by_an_old_report() -> None:
    job = Job(LedgerSpec(1, 1, 1, 1, 100), 1)
    job.say(Ask(2))
    job.pass_time(0.1)
    job.nodes[0].died(job.generator)
    assert job.nodes[0].counts().returned == 2
    job.tell_all(Silence(job.generator, over=True))
    assert job.nodes[0].absent == {job.generator}
