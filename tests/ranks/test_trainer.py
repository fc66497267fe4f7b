"""What a trainer does around training: pulls from silent owners, tokens too old for the loss."""

from __future__ import annotations

from collections import deque

import numpy as np

from headrace.comm.exchange import ExchangeConsumer, ExchangeOwner
from headrace.comm.simulated import SimulatedNetwork
from headrace.comm.spilling import LostGroupsError
from headrace.comm.trajectories import TRAJECTORY, TrajectoryStore
from headrace.comm.trajectory import Trajectory, Unit
from headrace.ranks.failed_groups import FailedGroups
from headrace.ranks.tickets import FormedGroup, FormedStep
from headrace.ranks.trainer import TrainerDesk, mask_older


def trajectory(ticket, sample, versions, prompt=2):
    sampled = [-1] * prompt + versions
    length = len(sampled)
    return Trajectory(
        unit=Unit(ticket, sample, 0),
        tokens=np.arange(length, dtype=np.int32),
        loss_mask=np.array([version >= 0 for version in sampled], np.uint8),
        logprobs=np.zeros(length, np.float32),
        versions=np.array(sampled, np.int32),
        reward=1.0,
        finish="stop",
    )


def test_tokens_older_than_the_bound_leave_the_loss_and_nothing_else_changes():
    store = TrajectoryStore()
    store.put(0, 0, [trajectory(0, 0, [3, 3, 4, 6]), trajectory(0, 1, [1])])
    (group,) = store.get([(0, 0)]).values()
    (masked,) = mask_older([group], 4)
    assert [sample.loss_mask.tolist() for sample in masked] == [[0, 0, 0, 0, 1, 1], [0, 0, 0]]
    assert [sample.loss_mask.dtype for sample in masked] == [np.uint8] * 2
    assert [sample.loss_mask.tolist() for sample in group] == [[0, 0, 1, 1, 1, 1], [0, 0, 1]], "the data are shared"
    for before, after in zip(group, masked, strict=True):
        assert after.versions is before.versions
        assert (after.born, after.response_length) == (before.born, before.response_length)
    assert [sample.loss_mask.tolist() for sample in mask_older([group], 1)[0]] == [[0, 0, 1, 1, 1, 1], [0, 0, 1]]


class Node:
    """The side of a `LedgerNode` that the desk sees."""

    def __init__(self):
        self.formed, self.absent, self.unformed = deque(), set(), []
        self.said, self.may_train, self.barrier = [], False, False

    def take_formed(self):
        return self.formed.popleft() if self.formed else None

    def unform(self, tickets):
        self.unformed += tickets

    def pulled(self, formation):
        self.said.append(formation)
        self.may_train = not self.barrier


class Bench:
    """A trainer (rank 0) that pulls from generators 1 and 2, whose couriers run only when they are `awake`."""

    def __init__(self):
        network = SimulatedNetwork(3)
        self.transport, self.node, self.awake = network.transport(0), Node(), {1, 2}
        self.consumer = ExchangeConsumer(self.transport, TRAJECTORY)
        self.desk = TrainerDesk(self.transport, self.node, self.consumer, FailedGroups(self.node, 8), 0)
        self.stores = {rank: TrajectoryStore(memory_bytes=1) for rank in (1, 2)}
        self.owners = {
            rank: (network.transport(rank), ExchangeOwner(network.transport(rank), self.stores[rank]))
            for rank in (1, 2)
        }

    def form(self, owners, formation=0):
        """A step of one group from each owner."""
        groups = []
        for ticket, owner in enumerate(owners, 10 * formation):
            self.stores[owner].put(ticket, 0, [trajectory(ticket, 0, [0])])
            groups.append(
                FormedGroup(
                    ticket=ticket,
                    attempt=0,
                    owner=owner,
                    ledger=0,
                    replica=0,
                    deadline=0,
                    born=0,
                    samples=1,
                    tokens=3,
                    response_tokens=1,
                    longest=1,
                    loss_tokens=1,
                    sequences=1,
                    reward_sum=1.0,
                )
            )
        self.node.formed.append(FormedStep(0, formation, groups, finished=False))

    def turn(self, times=3):
        for _ in range(times):
            for received in self.transport.poll():
                self.consumer.receive(received, 0.0)
            self.desk.tick(0.0)
            self.consumer.tick(0.0)
            for rank in self.awake:
                transport, owner = self.owners[rank]
                for received in transport.poll():
                    owner.receive(received, 0.0)
                owner.tick(0.0)

    def batches(self):
        return [[sample.unit.ticket for group in batch.groups for sample in group] for batch in self.desk.batches]


def test_a_batch_whose_owner_is_absent_is_void_and_its_late_data_are_ignored():
    bench = Bench()
    bench.awake = {1}
    bench.form([1, 2, 2])
    bench.turn()
    assert bench.node.unformed == []
    bench.node.absent = {2}
    bench.turn()
    assert bench.node.unformed == [1, 2], "just the tickets of the absent owner"
    bench.awake = {1, 2}
    bench.turn()
    assert bench.batches() == []
    bench.node.absent = set()
    bench.form([1, 2], formation=1)
    bench.turn()
    assert bench.batches() == [[10, 11]]
    assert bench.node.unformed == [1, 2]


def test_an_absence_after_the_data_have_come_changes_nothing():
    bench = Bench()
    bench.form([1, 2])
    bench.turn()
    bench.node.absent = {2}
    bench.turn()
    assert bench.batches() == [[0, 1]]
    assert bench.node.unformed == []


def test_a_batch_is_handed_over_when_all_replicas_have_their_data():
    bench = Bench()
    bench.node.barrier = True
    bench.form([1, 2])
    bench.turn()
    assert (bench.node.said, bench.batches()) == ([0], [])
    bench.node.may_train = True
    bench.turn()
    assert bench.batches() == [[0, 1]]
    assert bench.node.said == [0], "said once"


def test_a_batch_that_another_replica_had_to_undo_gives_way_to_the_next():
    bench = Bench()
    bench.node.barrier = True
    bench.form([1, 2])
    bench.turn()
    bench.form([2, 1], formation=1)
    bench.turn()
    assert (bench.node.said, bench.batches()) == ([0, 1], [])
    bench.node.may_train = True
    bench.turn()
    assert bench.batches() == [[10, 11]]


def test_a_batch_whose_owner_has_lost_a_group_is_void_and_formed_anew(capsys):
    bench = Bench()
    bench.form([1, 2, 2])
    store = bench.stores[2]

    def gone(key):
        raise LostGroupsError(f"ticket {key[0]} has gone.", [key])

    store.spill_to(lambda group: None, lambda: None, gone)
    store.let_go([(2, 0)], written=True)
    while not bench.node.unformed:
        bench.turn()
    assert bench.node.unformed == [2]
    assert bench.batches() == []
    assert "Rank 2 has lost groups: ticket 2 has gone. They are generated again." in capsys.readouterr().err
    bench.form([1, 2], formation=1)
    bench.turn()
    assert bench.batches() == [[10, 11]]
