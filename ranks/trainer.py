"""The trainer: waits for a batch, trains, publishes, and tells its ledger that the step is over.

    courier (TrainerDesk, LedgerNode, ExchangeConsumer)      main thread (TrainerLoop.step)
    ───────────────────────────────────────────────────      ──────────────────────────────
    Ask, Started, Finished, Failed, RoundPart ▶ LedgerNode
    a step is formed ▶ Pull from the owners ▶ Pulled ──────▶ StepBatch → learner.learn
                                                              learner.export → publisher.publish(version)
    LedgerNode.end_step ◀── submit ───────────────────────── end of step: credits come back, grants go out
    Release ▶ owners                                          StepReport → trainer 0
    CheckpointBegin ────────────────────────────────────────▶ learner.save, CheckpointPart → trainer 0

`LeaderDesk` is what trainer 0 has besides: it gathers reports, parts of checkpoints, evaluations and good-byes.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import msgspec
from msgspec.structs import replace

from headrace.comm.courier import Courier
from headrace.comm.errors import WaitLimitError
from headrace.comm.exchange import ExchangeConsumer
from headrace.comm.messages import (
    Bye,
    CheckpointBegin,
    CheckpointPart,
    EvalResult,
    Evaluating,
    Message,
    Release,
    StepReport,
    Stop,
)
from headrace.comm.spilling import LostGroupsError
from headrace.comm.trajectories import trajectories_by_key
from headrace.comm.trajectory import Trajectory
from headrace.comm.transport import Received, Transport
from headrace.comm.weights import Publisher
from headrace.ranks.failed_groups import FailedGroups
from headrace.ranks.failure import complain
from headrace.ranks.heartbeat import MainState
from headrace.ranks.learner import Learner
from headrace.ranks.metrics import MetricsGatherer, batch_metrics, ticket_totals
from headrace.ranks.node import LedgerNode
from headrace.ranks.tickets import FormedGroup, FormedStep
from headrace.ranks.topology import RoleMap

Key = tuple[int, int]
"""(ticket, attempt)."""


@dataclass(slots=True)
class StepBatch:
    """A formed step with the data of the groups that this replica trains."""

    formed: FormedStep
    indices: list[int]
    """Places of `groups` in `formed.groups`."""
    groups: list[list[Trajectory]]


class TrainerDesk:
    """The courier's side of a trainer: pulls the data of a formed step, and hands the batch to the main thread when all
    replicas have theirs. If an owner falls silent before its data are here, or can't read them any more, the step is
    formed anew without them."""

    handles: ClassVar[tuple[type[Message], ...]] = (CheckpointBegin, Evaluating, Stop)

    def __init__(
        self,
        transport: Transport,
        node: LedgerNode,
        consumer: ExchangeConsumer,
        failed: FailedGroups,
        index: int,
    ) -> None:
        self.batches: deque[StepBatch] = deque()
        self.checkpoints: deque[int] = deque()
        self.stop: Stop | None = None
        self._transport = transport
        self._node = node
        self._consumer = consumer
        self._index = index
        self.evaluated_at = 0.0
        """When a generator last said that it is evaluating, by the monotonic clock."""
        self._failed = failed
        self._formed: FormedStep | None = None
        self._said = False
        """That all data of it are here."""
        self._requests: dict[int, int] = {}
        """Number of each pull that hasn't come → its owner."""
        self._data: dict[Key, list[Trajectory]] = {}

    def receive(self, received: Received, now: float) -> None:
        match received.message:
            case CheckpointBegin(step):
                self.checkpoints.append(step)
            case Evaluating():
                self.evaluated_at = now
            case Stop() as stop:
                self.stop = stop

    def tick(self, now: float) -> None:
        newer = self._node.take_formed()
        if newer is not None:
            self._forget()  # it was void, if there was one
            self._pull(newer)
        if self._formed is None:
            return
        try:
            arrived = self._arrived()
        except LostGroupsError as error:
            self._do_without(self._formed, error)
            return
        if not arrived:
            self._give_up_absent(self._formed)
        elif self._node.may_train or self._formed.finished:
            self._hand_over(self._formed)
        elif not self._said:
            self._said = True
            self._node.pulled(self._formed.formation)

    def release(self, formed: FormedStep) -> None:
        """Tell the owners of this replica's groups that they are trained."""
        for owner, keys in self._by_owner(formed).items():
            self._transport.send(owner, Release(keys))

    def describe(self) -> str:
        """What a batch is waited for, in one line."""
        waiting = [f"data of {len(keys)} groups from rank {rank}" for rank, keys, _ in self._consumer.waiting()]
        about = "; ".join(waiting) if waiting else self._node.describe()
        return about + self._failed.describe()

    def _by_owner(self, formed: FormedStep) -> dict[int, list[Key]]:
        keys: dict[int, list[Key]] = {}
        for group in formed.groups:
            if group.replica == self._index:
                keys.setdefault(group.owner, []).append((group.ticket, group.attempt))
        return keys

    def _pull(self, formed: FormedStep) -> None:
        self._formed, self._said = formed, False
        self._requests = {self._consumer.pull(owner, keys): owner for owner, keys in self._by_owner(formed).items()}

    def _arrived(self) -> bool:
        for request in list(self._requests):
            data = self._consumer.take(request)
            if data is not None:
                self._data |= trajectories_by_key(data)
                del self._requests[request]
        return not self._requests

    def _give_up_absent(self, formed: FormedStep) -> None:
        """Void the batch if data are still to come from a generator that is taken for lost."""
        absent = set(self._requests.values()) & set(self._node.absent)
        if absent:
            self._forget()
            self._node.unform(group.ticket for group in formed.groups if group.owner in absent)

    def _do_without(self, formed: FormedStep, error: LostGroupsError) -> None:
        """Void the batch: an owner can't read some of its groups any more. They are generated again."""
        complain(f"{error} They are generated again.")
        self._forget()
        self._node.unform(group.ticket for group in formed.groups if (group.ticket, group.attempt) in error.keys)

    def _forget(self) -> None:
        for request in self._requests:
            self._consumer.cancel(request)
        self._requests.clear()
        self._data.clear()
        self._formed = None

    def _hand_over(self, formed: FormedStep) -> None:
        mine = [(i, group) for i, group in enumerate(formed.groups) if group.replica == self._index]
        groups = [self._data.pop((group.ticket, group.attempt)) for _, group in mine]
        self.batches.append(StepBatch(formed, [i for i, _ in mine], groups))
        self._formed = None


class LeaderDesk:
    """Trainer 0 gathers here what the others send it."""

    handles: ClassVar[tuple[type[Message], ...]] = (StepReport, CheckpointPart, EvalResult, Bye)

    def __init__(self, metrics: MetricsGatherer) -> None:
        self.metrics = metrics
        self.parts: dict[int, bytes] = {}
        """Ledger states of the checkpoint that is being written, by rank."""
        self.evaluations: dict[str, dict[int, EvalResult]] = {}
        self.evaluated: set[str] = set()
        """Labels of the evaluations that are over."""
        self.gone: set[int] = set()
        self.on_evaluation: Callable[[str], None] = lambda label: None

    def receive(self, received: Received, now: float) -> None:
        match received.message:
            case StepReport() as report:
                self.metrics.report(received.source, report)
            case CheckpointPart(_, ledger):
                self.parts[received.source] = ledger
            case EvalResult(label=label) as result:
                self.evaluations.setdefault(label, {})[received.source] = result
                self.on_evaluation(label)
            case Bye():
                self.gone.add(received.source)

    def tick(self, now: float) -> None:
        """Everything here is done as it comes in."""

    def do_without(self, generator: int) -> None:
        """A generator has died: evaluations that waited for its share are over."""
        for label in self.evaluations:
            self.on_evaluation(label)


def mask_older(groups: list[list[Trajectory]], version: int) -> list[list[Trajectory]]:
    """The same samples with the tokens of versions before `version` out of the loss."""
    return [[replace(t, loss_mask=t.loss_mask * (t.versions >= version)) for t in group] for group in groups]


class TrainerLoop:
    """The main thread of a trainer."""

    def __init__(
        self,
        roles: RoleMap,
        rank: int,
        courier: Courier,
        desk: TrainerDesk,
        node: LedgerNode,
        learner: Learner,
        publisher: Publisher,
        main: MainState,
        steps: int,
        start_step: int,
        publish_every: int,
        mask_age: int | None,
        wait_limit_s: float,
        on_step: Callable[[StepBatch, int], None],
        on_end: Callable[[int], None],
        record: Callable[[int, dict[str, object], Sequence[FormedGroup]], None] | None,
        journals: bool,
    ) -> None:
        """`mask_age`: tokens older than so many optimizer steps are masked out of the loss; None masks none.
        `record`: on trainer 0, takes its part of a line of metrics, and the batch. `journals`: report the ledger's
        state after every step, too."""
        self.done = False
        self.version = start_step
        self._roles = roles
        self._rank = rank
        self._courier = courier
        self._desk = desk
        self._node = node
        self._learner = learner
        self._publisher = publisher
        self._main = main
        self._steps = steps
        self._publish_every = publish_every
        self._mask_age = mask_age
        self._wait_limit = wait_limit_s
        self._start_step = start_step
        self._on_step = on_step
        self._on_end = on_end
        self._record = record
        self._journals = journals
        self._ended_at = self._free_at = time.monotonic()

    def start(self) -> None:
        """Publish the weights that the run starts with; generators hold their tickets until these are there."""
        self._publish(self.version)
        self._ended_at = self._free_at = time.monotonic()
        if self.version >= self._steps:
            self.done = True

    def step(self) -> bool:
        """Train on a batch if there is one; returns whether there was."""
        self._main.set("waiting for a batch")
        if not self._desk.batches:
            self._check_wait()
            return False
        batch = self._desk.batches.popleft()
        if batch.formed.finished:
            self._finish()
        else:
            self._train(batch)
        return True

    def _check_wait(self) -> None:
        waited = time.monotonic() - max(self._free_at, self._desk.evaluated_at)
        if waited > self._wait_limit:
            about = self._courier.call(self._desk.describe, self._wait_limit)
            raise WaitLimitError(
                f"{self._roles.name(self._rank)} has waited {waited:.0f} s for the batch of step {self.version} "
                f"(run.wait_limit_s): {about}."
            )

    def _train(self, batch: StepBatch) -> None:
        begin = time.monotonic()
        step = batch.formed.step
        assert step == self.version, f"step {step} was formed for version {self.version}"
        self._main.set(f"training step {step}")
        if self._mask_age is not None:
            batch.groups = mask_older(batch.groups, step - self._mask_age)
        stats = self._learner.learn(batch.formed, batch.groups, batch.indices, step)
        trained = time.monotonic()
        self.version = step + 1
        last = self.version >= self._steps
        published = last or self.version % self._publish_every == 0
        if published:
            self._publish(self.version)
        synced = time.monotonic()
        self._courier.submit(lambda: self._end_step(batch, step, published))
        times = {
            "wait": begin - self._free_at,
            "train": trained - begin,
            "sync": synced - trained,
            "wall": synced - self._ended_at,
        }
        self._ended_at = synced
        self._report(batch, step, times, stats)
        self._on_step(batch, step)
        self._free_at = time.monotonic()
        if last:
            self.done = True
            self._on_end(self.version)

    def _finish(self) -> None:
        """The run ends before its last step: the data are used up, or it was asked to stop."""
        self.done = True
        if self.version % self._publish_every and self.version > self._start_step:
            self._publish(self.version)
        self._on_end(self.version)

    def _publish(self, version: int) -> None:
        self._main.set(f"publishing version {version}")
        self._main.version = version
        self._publisher.publish(version, self._learner.export(version))

    def _end_step(self, batch: StepBatch, step: int, published: bool) -> None:
        """In the courier: settle the step."""
        self._node.end_step(step, published)
        self._desk.release(batch.formed)

    def _report(self, batch: StepBatch, step: int, times: dict[str, float], stats: dict[str, float | None]) -> None:
        ages = [step - t.versions[t.loss_mask > 0] for group in batch.groups for t in group]

        def send() -> None:
            report = StepReport(
                step,
                ticket_totals(self._node.counts()),
                times,
                float(sum(age.sum() for age in ages)),
                sum(len(age) for age in ages),
                dict(self._node.counters),
                msgspec.msgpack.encode(self._node.state()) if self._journals else b"",
            )
            self._courier.transport.send(self._roles.trainers[0], report)

        self._courier.submit(send)
        if self._record is not None:
            line = {"step": step + 1, "version": self.version} | batch_metrics(batch.formed, times["wall"]) | stats
            self._record(step, line, batch.formed.groups)
