"""Checkpoints of the whole job, and what a resumed job starts from.

    trainer 0 ── CheckpointBegin(step) ──▶ trainers     the folder is there
    every trainer: learner.save (its files)
    trainer i ── CheckpointPart(step, ledger) ──▶ trainer 0
    trainer 0: all parts there → CheckpointStore.commit: durable, renamed, marked, the oldest one deleted

The ledgers' states are those of the end of the same step, so weights, optimizer and ledger belong together.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from headrace.comm.courier import Courier
from headrace.comm.messages import CheckpointBegin, CheckpointPart, Covered
from headrace.ranks.heartbeat import MainState
from headrace.ranks.learner import Learner
from headrace.ranks.node import LedgerNode
from headrace.ranks.shutdown import until
from headrace.ranks.tickets import FormedStep, LedgerState
from headrace.ranks.topology import RoleMap
from headrace.ranks.trainer import LeaderDesk, TrainerDesk
from headrace.train.checkpoint import CheckpointStore, read_state

POLL_S = 0.005


class Checkpoints:
    """One trainer's part in writing checkpoints; all calls from its main thread."""

    def __init__(
        self,
        store: CheckpointStore,
        roles: RoleMap,
        courier: Courier,
        desk: TrainerDesk,
        leader: LeaderDesk | None,
        node: LedgerNode,
        learner: Learner,
        main: MainState,
        limit_s: float,
        start_step: int,
        on_durable: Callable[[int, list[LedgerState]], None],
    ) -> None:
        """`on_durable`: on trainer 0, called with the step and the ledgers' states after a checkpoint is durable."""
        self.written = start_step
        """The step of the newest checkpoint that this rank took part in; every trainer knows the same."""
        self._store = store
        self._roles = roles
        self._courier = courier
        self._desk = desk
        self._leader = leader
        self._node = node
        self._learner = learner
        self._main = main
        self._limit = limit_s
        self._on_durable = on_durable

    def write(self, step: int) -> None:
        """Write the checkpoint of `step` optimizer steps; every trainer calls it at the same step."""
        self._main.set(f"writing the checkpoint of step {step}")
        if self._leader is not None:
            self._begin(step, self._leader)
        else:
            self._wait(lambda: step in self._desk.checkpoints, lambda: f"trainer 0 to begin the checkpoint of {step}")
            self._desk.checkpoints.remove(step)
        with self._store.writing(step) as folder:
            self._learner.save(folder)
        ledger = msgspec.msgpack.encode(self._courier.call(self._node.state, self._limit))
        self._send(self._roles.trainers[0], CheckpointPart(step, ledger))
        if self._leader is not None:
            self._commit(step, self._leader)
        self.written = step

    def _begin(self, step: int, leader: LeaderDesk) -> None:
        self._store.begin(step)
        self._courier.call(leader.parts.clear, self._limit)
        for trainer in self._roles.trainers[1:]:
            self._send(trainer, CheckpointBegin(step))

    def _commit(self, step: int, leader: LeaderDesk) -> None:
        def missing() -> str:
            absent = [self._roles.name(r) for r in self._roles.trainers if r not in leader.parts]
            return f"the part of {', '.join(absent)} of the checkpoint of step {step}"

        self._wait(lambda: len(leader.parts) == len(self._roles.trainers), missing)
        states = [msgspec.msgpack.decode(leader.parts[rank], type=LedgerState) for rank in self._roles.trainers]
        self._store.commit(step, {"ledgers": states})
        self._on_durable(step, states)

    def _send(self, target: int, message: CheckpointBegin | CheckpointPart) -> None:
        self._courier.submit(lambda: self._courier.transport.send(target, message))

    def _wait(self, done: Callable[[], bool], what: Callable[[], str]) -> None:
        for _ in until(done, self._limit, what):
            time.sleep(POLL_S)


def covered_by(states: Sequence[LedgerState]) -> Covered:
    """What a checkpoint with these ledgers has settled."""
    whole = LedgerState.merge(states)  # without owners: all that isn't settled is returned
    return Covered([number for _, number in whole.next_numbers], [number for number, _ in whole.returned])


def read_ledgers(folder: Path) -> list[LedgerState]:
    """The ledgers' states of a checkpoint.

    Raises:
        DataError: a file of it isn't what was written.
    """
    return msgspec.convert(read_state(folder)["ledgers"], list[LedgerState], strict=False)


@dataclass(frozen=True, slots=True)
class Restored:
    """What a run starts from."""

    folder: Path | None = None
    """Of the checkpoint; None at the very beginning."""
    ledger: LedgerState | None = None
    """Of all ledgers together."""
    replay: Sequence[FormedStep] = ()
    """Steps that are trained again before the ledgers go on."""

    @property
    def step(self) -> int:
        """Where the ledgers go on."""
        return 0 if self.ledger is None else self.ledger.step
