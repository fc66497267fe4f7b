"""A generator in virtual time: what `ranks.generator.GeneratorLoop` does, without tokens; see `ranks.simulator`."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from headrace.comm.messages import (
    Ask,
    Cut,
    Dropped,
    Finished,
    Forgotten,
    GeneratorCounters,
    Grants,
    Late,
    Message,
    Redirect,
    Returned,
    SampleMeta,
    Started,
)
from headrace.ranks.intake import Intake, Key
from headrace.ranks.memory import MemoryBound

if TYPE_CHECKING:
    from headrace.ranks.simulator import Simulation

PROMPT_TOKENS = 16
TOKEN_BYTES = 13
"""Of the columns of a trajectory."""


@dataclass(slots=True)
class GroupTrace:
    """One attempt at a ticket, as its generator sees it. Times in seconds; NaN: didn't happen."""

    ticket: int
    attempt: int
    generator: int
    granted: float
    started: float = math.nan
    born: int = -1
    """Version with which it was started."""
    finished: float = math.nan
    sample_s: float = 0.0
    """Sum of the times that its samples took."""
    longest_s: float = 0.0


@dataclass(slots=True)
class _Group:
    """A group that a generator makes."""

    key: Key
    trace: GroupTrace
    waiting: int
    """Samples that wait for a slot."""
    running: dict[int, tuple[float, float]] = field(default_factory=dict)
    """Sample → when it got its slot, time of a token."""
    metas: list[SampleMeta] = field(default_factory=list)
    late: bool = False
    """Its ledger has said that it is overdue."""


class SimulatedGenerator:
    """A rank that generates: it asks, holds, starts, ends, cuts and forgets groups."""

    def __init__(self, simulation: Simulation, index: int, rank: int) -> None:
        job = simulation.job
        self.index, self.rank = index, rank
        self.token_s = job.token_s(index)
        self.version = 0
        self._sim, self._job = simulation, job
        self._size = job.spec.group_size
        self._intake = Intake(job.slots, self._size)
        self._memory = MemoryBound(job.memory_bytes, job.spec.groups_per_step)
        self.kept: dict[Key, int] = {}
        """Finished groups that are in memory, and their bytes. (Nothing is spilled.)"""
        self._home = index % job.ledgers
        self._versions: list[tuple[float, int]] = [(0.0, 0)]
        """Since when it has had which version."""
        self._groups: dict[tuple[int, int], _Group] = {}
        self._queue: deque[_Group] = deque()
        """Groups with samples that wait for a slot."""
        self._free = job.slots
        self._finished = self._tokens = 0

    def ask(self) -> None:
        """Ask until every slot has work, as far as memory allows."""
        room = self._intake.ask(self._memory.at_work(len(self.kept), sum(self.kept.values())))
        if room:
            self._sim.send(self.rank, self._home, Ask(room))

    def receive(self, message: Message) -> None:
        match message:
            case Grants(grants):
                self._intake.granted(grants)
            case Redirect(ledger, room):
                self._sim.send(self.rank, ledger, Ask(room))
            case Cut(keys, keep):
                for key in keys:
                    self._cut(key, keep)
            case Late(keys):
                for key in keys:
                    if key in self._groups:
                        self._groups[key].late = True
            case Dropped(keys):
                self._intake.withdraw(keys)
                self.release(keys)
                for key in keys:
                    self._drop(key)
            case Forgotten(room):
                self._intake.forgotten(room)
        self._work()

    def release(self, keys: Iterable[Key]) -> None:
        """These groups are trained, or count no more."""
        for key in keys:
            self.kept.pop(key, None)
        self.ask()

    def take_version(self, version: int) -> None:
        """New weights are here: they make the next token of every sample."""
        if version > self.version:
            self.version = version
            self._versions.append((self._sim.now, version))
            self._work()

    def _work(self) -> None:
        """Start what may start, give free slots to waiting samples, ask for what is still free."""
        for grant in self._intake.start(self.version) if self._intake.held else ():
            trace = GroupTrace(grant.ticket, grant.attempt, self.index, self._sim.now)
            group = _Group((grant.ticket, grant.attempt), trace, self._size)
            self._sim.trace.groups[group.key] = trace
            self._groups[group.key] = group
            self._queue.append(group)
        self._fill()
        self.ask()

    def _fill(self) -> None:
        while self._free and self._queue:
            group = self._queue[0]
            if not group.waiting:  # all have started, or were dropped
                self._queue.popleft()
                continue
            if math.isnan(group.trace.started):
                group.trace.started, group.trace.born = self._sim.now, self.version
                self._sim.send(self.rank, self._ledger_of(group.key), Started([(*group.key, self.version)]))
            self._start(group, self._size - group.waiting)

    def _start(self, group: _Group, sample: int) -> None:
        self._free -= 1
        group.waiting -= 1
        group.running[sample] = (self._sim.now, self.token_s)
        length = self._job.length(group.key[0], sample)
        self._sim.at(self._sim.now + length * self.token_s, self._sample_ends, group, sample, length)

    def _sample_ends(self, group: _Group, sample: int, length: int) -> None:
        if sample in group.running:
            self._end(group, sample, length)
            if not group.waiting and not group.running:
                self._hand_over(group)
            self._work()

    def _end(self, group: _Group, sample: int, length: int) -> None:
        begun, token_s = group.running.pop(sample)
        self._free += 1
        self._intake.sampled()
        self._finished += 1
        self._tokens += length
        ticket, attempt = group.key
        spans = self._spans(begun, token_s, length)
        reward = self._job.reward(ticket, sample)
        told = spans if len(spans) > 1 else ()  # as a real one does
        group.metas.append(SampleMeta(ticket, sample, attempt, spans[0][0], PROMPT_TOKENS, length, reward, told))
        group.trace.sample_s += length * token_s
        group.trace.longest_s = max(group.trace.longest_s, length * token_s)

    def _spans(self, begun: float, token_s: float, length: int) -> tuple[tuple[int, int], ...]:
        """(version, tokens) of a sample of `length` tokens, in order."""
        spans: list[tuple[int, int]] = []
        left = length
        for since, version in reversed(self._versions):
            before = 0 if since <= begun else min(left, int((since - begun) / token_s))
            if left > before:
                spans.append((version, left - before))
                left = before
            if not left:
                break
        return tuple(reversed(spans))

    def _hand_over(self, group: _Group, cut: bool = False) -> None:
        """The group has ended; samples that have no data are left out."""
        group.trace.finished = self._sim.now
        del self._groups[group.key]
        self._intake.ended(late=cut or group.late)
        if group.metas:
            tokens = sum(meta.prompt_tokens + meta.response_tokens for meta in group.metas)
            self.kept[group.key] = tokens * TOKEN_BYTES
            self._memory.finished(tokens * TOKEN_BYTES)
        done = {meta.sample for meta in group.metas}
        left_out = [(group.key[0], sample, group.key[1]) for sample in range(self._size) if sample not in done]
        counters = GeneratorCounters(self._tokens, self._finished, 0.0, 0.0, self._sim.now, self.version)
        self._sim.send(self.rank, self._ledger_of(group.key), Finished(group.metas, counters, left_out))

    def _cut(self, key: Key, keep: bool) -> None:
        """End a group now, with the tokens that are there; hand it back if there are none."""
        group = self._groups.get(key)
        if group is None:
            if self._intake.withdraw([key]):
                self._return(key)
            return
        lengths = {s: int((self._sim.now - begun) / token_s) for s, (begun, token_s) in group.running.items()}
        if keep and not group.metas and not any(lengths.values()):
            self._drop(key)
            self._return(key)
            return
        for sample, length in lengths.items() if keep else ():
            if length:
                self._end(group, sample, length)
        self._abort(group)
        self._hand_over(group, cut=True)

    def _return(self, key: Key) -> None:
        self._sim.send(self.rank, self._ledger_of(key), Returned([key]))

    def _drop(self, key: Key) -> None:
        group = self._groups.pop(key, None)
        if group is not None:
            self._abort(group)
            self._intake.ended(late=True)

    def _abort(self, group: _Group) -> None:
        """The unfinished samples end without data."""
        self._free += len(group.running)
        self._intake.sampled(len(group.running) + group.waiting)
        group.running, group.waiting = {}, 0

    def _ledger_of(self, key: Key) -> int:
        return key[0] % self._job.ledgers
