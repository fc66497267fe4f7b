"""Ten thousand steps take no more memory than a thousand."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from archive_program import group
from scripted import Engine, Scorer, Subscriber, Tasks

from headrace.comm.columns import Group
from headrace.comm.courier import Courier
from headrace.comm.exchange import ExchangeConsumer, ExchangeOwner
from headrace.comm.simulated import SimulatedNetwork
from headrace.comm.trajectories import TRAJECTORY, GroupKey, TrajectoryStore
from headrace.ranks.archive import ArchiveFiles
from headrace.ranks.config import RanksConfig
from headrace.ranks.failed_groups import FailedGroups
from headrace.ranks.generator import GeneratorDesk, GeneratorLoop
from headrace.ranks.heartbeat import MainState
from headrace.ranks.memory import MemoryBound
from headrace.ranks.node import LedgerNode
from headrace.ranks.segments import Record
from headrace.ranks.tickets import LedgerSpec
from headrace.ranks.topology import plan_roles
from headrace.ranks.trainer import TrainerDesk
from headrace.rollout.engine import SamplingParams

T = TypeVar("T")

GROUPS, MEMORY = 2, 200
"""In a step; bytes for finished groups, enough for three of them."""


class AtOnce(Executor):
    """Does what it is given in the thread that gives it."""

    def submit(self, function: Callable[..., T], /, *arguments: Any, **_: Any) -> Future[T]:
        future: Future[T] = Future()
        future.set_result(function(*arguments))
        return future


class Disk:
    """Groups that were written, until they are trained."""

    def __init__(self, store: TrajectoryStore) -> None:
        self.groups: dict[GroupKey, Group[GroupKey]] = {}
        self._store, self._waiting = store, list[Group[GroupKey]]()
        store.spill_to(self.take, lambda: None, lambda key: self.groups[key])

    def take(self, group: Group[GroupKey]) -> None:
        self._waiting.append(group)

    def write(self) -> None:
        groups, self._waiting = self._waiting, []
        self.groups |= {each.key: each for each in groups}
        self._store.let_go([each.key for each in groups], written=True)


class Job:
    """A trainer that learns in no time, and a generator with little memory; by turns, in virtual time."""

    def __init__(self, steps: int) -> None:
        network = SimulatedNetwork(2)
        self.end, transport = network.transport(0), network.transport(1)
        roles = plan_roles(["a", "a"], RanksConfig(trainers=1, generators=1))
        self.node = LedgerNode(LedgerSpec(GROUPS, 2, 1, 1, steps), 0, [0], [1], self.end.send)
        self.consumer = ExchangeConsumer(self.end, TRAJECTORY)
        self.trainer = TrainerDesk(self.end, self.node, self.consumer, FailedGroups(self.node, 8), 0)
        self.store, self.subscriber = TrajectoryStore(MEMORY), Subscriber()
        self.store._reader = AtOnce()  # type: ignore[assignment]
        self.disk = Disk(self.store)
        desk = GeneratorDesk(transport, roles)
        self.courier = Courier(transport, [desk, ExchangeOwner(transport, self.store)], lambda error: None)
        self.generator = GeneratorLoop(
            rank=1,
            roles=roles,
            courier=self.courier,
            desk=desk,
            engine=Engine(4, {}, usual=1),  # type: ignore[arg-type]
            subscriber=self.subscriber,  # type: ignore[arg-type]
            store=self.store,
            tasks=Tasks(),  # type: ignore[arg-type]
            scorer=Scorer(),  # type: ignore[arg-type]
            params=SamplingParams(max_tokens=9),
            group_size=1,
            memory=MemoryBound(MEMORY, GROUPS),
            partial=True,
            oldest=2,
            seed=0,
            main=MainState(),
        )
        self.steps, self.now = 0, 0.0

    def turn(self) -> None:
        self.now += 0.1
        self.courier.pump()
        self.generator.step()
        self.disk.write()
        self.courier.pump()
        routes = {kind: service for service in (self.consumer, self.trainer) for kind in service.handles}
        for received in self.end.poll():
            routes.get(type(received.message), self.node).receive(received, self.now)  # type: ignore[attr-defined]
        for service in (self.node, self.consumer, self.trainer):
            service.tick(self.now)
        while self.trainer.batches:
            formed = self.trainer.batches.popleft().formed
            self.node.end_step(formed.step, published=True)
            self.trainer.release(formed)
            for each in formed.groups:
                del self.disk.groups[each.ticket, each.attempt]
            self.steps = self.subscriber.version = formed.step + 1

    def run(self, steps: int) -> int:
        """Until so many are trained; returns the blocks of memory that are in use then."""
        begun = time.monotonic()
        while self.steps < steps:
            self.turn()
            assert time.monotonic() < begun + 200
        gc.collect()
        return sys.getallocatedblocks()


def test_neither_ledger_nor_store_nor_exchange_grows_with_the_steps() -> None:
    job = Job(20_000)
    before = job.run(1_000)
    grown = job.run(10_000) - before
    assert grown < 1_000, "less than one block for nine steps"
    assert job.store.memory_use().spilled > 5_000, "of 20,000 groups"


def test_an_archive_does_not_grow_with_the_checkpoints(tmp_path: Path) -> None:
    files = ArchiveFiles(tmp_path, 0, 1)
    blocks = []
    for checkpoint in range(300):
        for ticket in range(2 * checkpoint, 2 * checkpoint + 2):
            files.add([Record(group(ticket, tokens=3), True)])
        if checkpoint % 3 == 1:
            files.merge()
        files.cover(lambda ticket, last=checkpoint: ticket <= 2 * last - 2)  # type: ignore[misc]
        if checkpoint in (99, 299):
            gc.collect()
            blocks.append(sys.getallocatedblocks())
    assert len(list(tmp_path.iterdir())) <= 3
    assert files.read((598, 0)).columns["tokens"].data.dtype == np.int32
    assert blocks[1] - blocks[0] < 100, "in 200 checkpoints"
