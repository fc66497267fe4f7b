"""The generator: takes tickets, makes groups, hands them over, and switches to new weights on the way.

    courier (GeneratorDesk)                        main thread (GeneratorLoop.step)
    ─────────────────────                          ────────────────────────────────
    Grants ──▶ grants ───────────────────────────▶ start those whose min_version is here; hold the others
                                                   engine.step() → chunks, each token labelled with its version
                                                   finished response → reward process → reward
    Ask / Started / Finished / Failed ◀── post ─── report to the ledger of the ticket
    Pull ──▶ SampleStore (comm.exchange) ◀──────── put the finished group
    WeightsReady … WeightsPart ──▶ subscriber ───▶ between two engine steps: take() → engine.load_weights
    Stop(1) ─────────────────────────────────────▶ drop what runs, take in the last version, evaluate, say Bye

A group lives here as `_Group` from its grant until the last of its samples has a reward. When a reward fails for good,
the whole group is given up and its ledger issues another ticket.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from headrace.comm.exchange import SampleStore
from headrace.comm.messages import (
    Ask,
    Failed,
    Finished,
    GeneratorCounters,
    Grants,
    Message,
    Redirect,
    SampleMeta,
    Started,
    Stop,
    TicketGrant,
)
from headrace.comm.trajectory import Trajectory, Unit
from headrace.comm.transport import Received, Transport
from headrace.comm.weights import Subscriber
from headrace.ranks.courier import Courier
from headrace.ranks.heartbeat import MainState
from headrace.ranks.tasks import Scorer, TaskSource
from headrace.ranks.topology import RoleMap
from headrace.rollout.engine import Chunk, Engine, Request, SamplingParams
from headrace.rollout.rewards import Scored
from headrace.rollout.task import Task


class GeneratorDesk:
    """The courier's side of a generator: brings grants in."""

    handles: ClassVar[tuple[type[Message], ...]] = (Grants, Redirect, Stop)

    def __init__(self, transport: Transport, roles: RoleMap) -> None:
        self.grants: deque[TicketGrant] = deque()
        self.stop: Stop | None = None
        self._transport = transport
        self._roles = roles

    def receive(self, received: Received, now: float) -> None:
        match received.message:
            case Grants(grants):
                self.grants.extend(grants)
            case Redirect(ledger, room):
                self._transport.send(self._roles.trainers[ledger], Ask(room))
            case Stop() as stop:
                self.stop = stop

    def tick(self, now: float) -> None:
        """Everything here is done as it comes in."""


@dataclass(slots=True)
class _Sample:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish: str = ""
    text: str = ""
    reward: float | None = None


@dataclass(slots=True)
class _Group:
    grant: TicketGrant
    task: Task
    prompt: npt.NDArray[np.int32]
    samples: list[_Sample]
    started: bool = False

    @property
    def key(self) -> tuple[int, int]:
        return self.grant.ticket, self.grant.attempt


class GeneratorLoop:
    """The main thread of a generator."""

    def __init__(
        self,
        rank: int,
        roles: RoleMap,
        courier: Courier,
        desk: GeneratorDesk,
        engine: Engine,
        subscriber: Subscriber,
        store: SampleStore,
        tasks: TaskSource,
        scorer: Scorer,
        params: SamplingParams,
        group_size: int,
        seed: int,
        main: MainState,
    ) -> None:
        self.engine = engine
        self._roles = roles
        self._home = roles.home_ledger(roles.index(rank))
        self._courier = courier
        self._desk = desk
        self._subscriber = subscriber
        self._store = store
        self._tasks = tasks
        self._scorer = scorer
        self._params = params
        self._group_size = group_size
        self._seed = seed
        self._main = main
        self._groups: dict[tuple[int, int], _Group] = {}
        self._held: deque[TicketGrant] = deque()
        self._has_weights = False
        self._asked = 0
        self._generating = 0
        self._started_at = time.monotonic()
        self._turned_at = self._started_at
        self._worked = False
        self._busy_s = 0.0
        self._tokens = 0
        self._finished = 0
        self._reward_sum = 0.0

    def step(self) -> bool:
        """One turn of the loop; returns whether anything was done."""
        self._account()
        self._main.set("generating")
        busy = self.switch_version()
        busy |= self._start_granted()
        self._ask_for_more()
        chunks = self.engine.step()
        self._report_starts(chunks)
        for chunk in chunks:
            self._advance(chunk)
        scored = self._scorer.poll()
        self._settle(scored)
        self._worked = self._generating > 0
        return busy or self._worked or bool(scored)

    def switch_version(self) -> bool:
        """Take in the newest whole version, if one is there."""
        version = self._subscriber.take()
        if version is None:
            return False
        self._main.set(f"loading version {version.version}")
        self.engine.load_weights(version.version, version.tensors)
        version.release()
        self._has_weights = True
        self._main.version = self.engine.version
        return True

    def reached(self, version: int) -> bool:
        """Whether the engine holds that version, or a newer one, from the trainers; takes it in when it has come.

        The engine calls the weights of the model folder version 0, too, but they come before the warm start."""
        self.switch_version()
        self.engine.step()
        return self._has_weights and self.engine.version >= version

    def post(self, target: int, message: Message) -> None:
        """Have the courier send a message; messages to one rank keep their order."""
        self._courier.submit(lambda: self._courier.transport.send(target, message))

    @property
    def waits(self) -> bool:
        """Whether something will come that the courier doesn't announce: a reward, or a version coming into force."""
        return bool(self._groups) or bool(self._held)

    def drop_all(self) -> None:
        """Give up whatever runs: the run is over."""
        for group in self._groups.values():
            self._abort(group)
        self._groups.clear()
        self._held.clear()
        self._desk.grants.clear()

    def _account(self) -> None:
        """Count the time since the last turn as busy if samples were being generated in it."""
        now = time.monotonic()
        if self._worked:
            self._busy_s += now - self._turned_at
        self._turned_at = now

    def _ask_for_more(self) -> None:
        """Ask until every slot has work: some samples of the last group wait in the engine for slots that get free, or
        slots would stand idle until a whole group fits."""
        free = self.engine.capacity().slots - self._generating - (self._asked + len(self._held)) * self._group_size
        if free > 0:
            room = math.ceil(free / self._group_size)
            self._asked += room
            self.post(self._home, Ask(room))

    def _start_granted(self) -> bool:
        """Start every granted group whose oldest allowed version is here; the others wait for the weights."""
        while self._desk.grants:
            self._held.append(self._desk.grants.popleft())
            self._asked -= 1
        version = self.engine.version
        ready = [grant for grant in self._held if grant.min_version <= version]
        self._held = deque(grant for grant in self._held if grant.min_version > version)
        for grant in ready:
            self._start(grant)
        return bool(ready)

    def _start(self, grant: TicketGrant) -> None:
        task = self._tasks.task(grant.ticket)
        prompt = self._tasks.encode(task)
        group = _Group(grant, task, prompt, [_Sample() for _ in range(self._group_size)])
        self._groups[group.key] = group
        for index in range(self._group_size):
            unit = Unit(grant.ticket, index, grant.attempt)
            self.engine.add(Request(unit, prompt, self._params, (self._seed, grant.ticket, index)))
        self._generating += self._group_size

    def _report_starts(self, chunks: list[Chunk]) -> None:
        """Tell the ledgers which version the first token of a group was sampled with: it fixes the deadline."""
        starts: dict[int, list[tuple[int, int, int]]] = {}
        for chunk in chunks:
            group = self._group_of(chunk.id)
            if group is not None and not group.started:
                group.started = True
                born = (group.grant.ticket, group.grant.attempt, chunk.version)
                starts.setdefault(self._ledger_of(group.grant.ticket), []).append(born)
        for ledger, entries in starts.items():
            self.post(ledger, Started(entries))

    def _advance(self, chunk: Chunk) -> None:
        """Append new tokens to their sample; send a finished response to its reward."""
        group = self._group_of(chunk.id)
        if group is None:
            return
        assert isinstance(chunk.id, Unit)
        sample = group.samples[chunk.id.sample]
        sample.tokens.extend(chunk.tokens)
        sample.logprobs.extend(chunk.logprobs)
        sample.versions.extend([chunk.version] * len(chunk.tokens))
        self._tokens += len(chunk.tokens)
        if chunk.finish is not None:
            self._generating -= 1
            sample.finish = chunk.finish
            sample.text = self._tasks.decode(sample.tokens)
            self._scorer.submit(chunk.id, group.task, sample.text)

    def _settle(self, scored: list[Scored]) -> None:
        """Record rewards; hand over the groups that are complete, give up those whose reward failed."""
        complete: list[_Group] = []
        for score in scored:
            group = self._group_of(score.key)
            if group is None:
                continue
            assert isinstance(score.key, Unit)
            if score.reward is None:
                self._give_up(group, score)
                continue
            group.samples[score.key.sample].reward = score.reward
            self._finished += 1
            self._reward_sum += score.reward
            if all(sample.reward is not None for sample in group.samples):
                complete.append(group)
        self._hand_over(complete)

    def _hand_over(self, groups: list[_Group]) -> None:
        """Put the data where trainers pull it from, then tell the ledgers."""
        metas: dict[int, list[SampleMeta]] = {}
        for group in groups:
            trajectories = [_trajectory(group, index) for index in range(self._group_size)]
            self._store.put(*group.key, trajectories)
            metas.setdefault(self._ledger_of(group.grant.ticket), []).extend(_meta(t) for t in trajectories)
            del self._groups[group.key]
        for ledger, samples in metas.items():
            self.post(ledger, Finished(samples, self._counters()))

    def _give_up(self, group: _Group, score: Scored) -> None:
        self._abort(group)
        del self._groups[group.key]
        failed = Failed(*group.key, score.reason or "reward_failed", score.error or "")
        self.post(self._ledger_of(group.grant.ticket), failed)

    def _abort(self, group: _Group) -> None:
        for index, sample in enumerate(group.samples):
            if not sample.finish:
                self.engine.abort(Unit(group.grant.ticket, index, group.grant.attempt))
                self._generating -= 1

    def _group_of(self, id: Hashable) -> _Group | None:
        """The group a chunk or a reward belongs to; None when it was given up meanwhile."""
        return self._groups.get((id.ticket, id.attempt)) if isinstance(id, Unit) else None

    def _ledger_of(self, ticket: int) -> int:
        return self._roles.trainers[ticket % len(self._roles.trainers)]

    def _counters(self) -> GeneratorCounters:
        wall = time.monotonic() - self._started_at
        return GeneratorCounters(
            self._tokens, self._finished, self._reward_sum, self._busy_s, wall, self.engine.version
        )


def _trajectory(group: _Group, index: int) -> Trajectory:
    """The columns of one finished sample: the prompt's rows are masked out."""
    sample = group.samples[index]
    prompt, length = len(group.prompt), len(group.prompt) + len(sample.tokens)
    tokens, mask = np.empty(length, np.int32), np.zeros(length, np.uint8)
    logprobs, versions = np.zeros(length, np.float32), np.full(length, -1, np.int32)
    tokens[:prompt], tokens[prompt:] = group.prompt, sample.tokens
    mask[prompt:], logprobs[prompt:], versions[prompt:] = 1, sample.logprobs, sample.versions
    assert sample.reward is not None
    return Trajectory(
        unit=Unit(group.grant.ticket, index, group.grant.attempt),
        tokens=tokens,
        loss_mask=mask,
        logprobs=logprobs,
        versions=versions,
        reward=sample.reward,
        finish=sample.finish,
        prompt_text=str(group.task.question),
        response_text=sample.text,
    )


def _meta(trajectory: Trajectory) -> SampleMeta:
    response = trajectory.response_length
    return SampleMeta(*trajectory.unit, trajectory.born, len(trajectory.tokens) - response, response, trajectory.reward)
