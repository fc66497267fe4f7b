"""A whole job in virtual time: the ledgers of the real job, with thousands of modelled generators and trainers.

    heap of (time, number, action): the earliest happens, and what follows from it is put in
        message arrives at a trainer ───▶ LedgerNode.receive, tick ──▶ messages, each with its delay
        a round is due at a trainer ────▶ LedgerNode.tick
        message arrives at a generator ─▶ grants start, or are held for their weights; samples are cut, dropped
        a sample ends ──────────────────▶ the next gets its slot; the last of a group: Finished; room: Ask
        a step is formed ───────────────▶ every trainer pulls; when all have, they train, publish, end the step
        a version arrives at a generator ▶ held grants start
        a fault: a generator dies, falls silent for a while, gets slower

A run is a function of the job and its seed. Modelled is time; real are `LedgerNode` and all below it, and `Intake`:
every decision about tickets, credits, batches and versions. Nothing happens per token, so thousands of ranks are cheap.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any

from headrace.comm.errors import WaitLimitError
from headrace.comm.messages import Message, Release, Silence
from headrace.comm.transport import Received
from headrace.ranks.node import LedgerNode
from headrace.ranks.simulated_generator import GroupTrace, SimulatedGenerator
from headrace.ranks.tickets import FormedStep, LedgerSpec
from headrace.rollout.config import LatencyConfig
from headrace.rollout.latency_engine import made_up_lengths


@dataclass(frozen=True)
class SimulatedJob:
    """What is simulated. Ranks 0 … ledgers - 1 are the trainers, the generators follow. Times in seconds."""

    spec: LedgerSpec
    generators: int
    length: Callable[[int, int], int]
    """(ticket, sample) → tokens of its response."""
    ledgers: int = 1
    slots: int = 32
    """Samples that one generator decodes at the same time."""
    token_s: Callable[[int], float] = lambda generator: 1e-3
    """(generator, counted from 0) → time of one token."""
    reward: Callable[[int, int], float] = lambda ticket, sample: float(sample % 2)
    train_s: float = 0.0
    publish_s: float = 0.0
    """Time for which a publication blocks the trainers."""
    weights_s: Callable[[int, random.Random], float] = lambda generator, rng: 0.0
    """Time from the end of a publication until a generator has the version."""
    message_s: Callable[[int, int, random.Random], float] = lambda source, target, rng: 0.0
    """(source, target) → time of one message; those of one pair keep their order all the same."""
    pull_s: Callable[[int, random.Random], float] = lambda trainer, rng: 0.0
    """Time in which a trainer gets the data of its groups."""
    memory_bytes: float = math.inf
    """Of one generator, for finished groups."""
    reissue_after_s: float = 60.0
    """A generator that has been silent for so long is taken for lost."""
    wait_limit_s: float = 1e5
    """The longest a step may take."""
    seed: int = 0


class MadeUpLengths:
    """(ticket, sample) → tokens: what the latency engine makes up, cut at `max_tokens`; drawn many at a time."""

    BLOCK = 256
    """Tickets drawn at once."""

    def __init__(self, config: LatencyConfig, group_size: int, max_tokens: int, seed: int = 0) -> None:
        self._config, self._size, self._longest, self._seed = config, group_size, max_tokens, seed
        self._blocks: dict[int, list[int]] = {}

    def __call__(self, ticket: int, sample: int) -> int:
        block, place = divmod(ticket, self.BLOCK)
        if block not in self._blocks:
            self._blocks[block] = self._draw(block * self.BLOCK)
        return self._blocks[block][place * self._size + sample]

    def _draw(self, first: int) -> list[int]:
        lengths = made_up_lengths(self._seed, range(first, first + self.BLOCK), self._size, self._config)
        return [min(length, self._longest) for length in lengths]


@dataclass(slots=True)
class StepTrace:
    """One optimizer step. Times in seconds."""

    formed: FormedStep
    chosen_at: float
    """When the first trainer had the batch."""
    pulled_at: float = math.nan
    trained_at: float = math.nan
    published_at: float = math.nan

    @property
    def ages(self) -> list[int]:
        """Of the oldest token in the loss of every group."""
        return [self.formed.step - group.born for group in self.formed.groups]


@dataclass(slots=True)
class Trace:
    """What has happened."""

    steps: list[StepTrace] = field(default_factory=list)
    groups: dict[tuple[int, int], GroupTrace] = field(default_factory=dict)
    """By (ticket, attempt)."""
    messages: Counter[str] = field(default_factory=Counter)
    """How many of each kind were sent."""

    def step_s(self, skip: int, until: int | None = None) -> float:
        """Mean time of the steps from `skip` on (> 0), before `until`."""
        ends = [step.published_at for step in self.steps[skip - 1 : until]]
        return (ends[-1] - ends[0]) / (len(ends) - 1)

    def of_step(self, step: StepTrace) -> list[GroupTrace]:
        return [self.groups[group.ticket, group.attempt] for group in step.formed.groups]


class Simulation:
    """Everything that happens in one simulated job."""

    node_type: type[LedgerNode] = LedgerNode

    def __init__(self, job: SimulatedJob) -> None:
        self.job, self.spec = job, job.spec
        self.now = 0.0
        self.trace = Trace()
        self.rng = random.Random(job.seed)
        self.over: set[int] = set()
        """Trainers that know that the run is over."""
        ranks = range(job.ledgers)
        generators = range(job.ledgers, job.ledgers + job.generators)
        self.nodes = [self.make_node(index, list(ranks), list(generators)) for index in ranks]
        self.generators = [SimulatedGenerator(self, index, rank) for index, rank in enumerate(generators)]
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._number = 0
        self._last_arrival: dict[tuple[int, int], float] = {}
        self._dead: set[int] = set()
        self._silent: dict[int, float] = {}
        self._ticks: list[float | None] = [None] * job.ledgers
        self._taken: list[FormedStep | None] = [None] * job.ledgers
        self._may_train: set[int] = set()
        self._trains = False
        self._chosen_at = 0.0
        for generator in self.generators:
            self.at(0.0, generator.ask)
        for index in ranks:
            self.at(0.0, self._turn, index)

    def make_node(self, index: int, ranks: list[int], generators: list[int]) -> LedgerNode:
        """The ledger of one trainer."""
        return self.node_type(
            self.spec, index, ranks, generators, lambda target, message: self.send(index, target, message)
        )

    def at(self, time: float, action: Callable[..., None], *what: Any) -> None:
        """Let something happen at that time; at one time, in the order of these calls."""
        self._number += 1
        heappush(self._events, (time, self._number, action, what))

    def run(self, steps: int | None = None) -> Trace:
        """Until so many steps have been trained, or (None) until the run is over.

        Raises:
            WaitLimitError: a step took longer than `wait_limit_s`; the text says what every ledger waits for.
        """
        while len(self.over) < self.job.ledgers and (steps is None or len(self.trace.steps) < steps):
            self.now, _, action, what = heappop(self._events)
            action(*what)
            if self.now - self._stepped_at > self.job.wait_limit_s:
                raise WaitLimitError("; ".join(node.describe() for node in self.nodes))
        return self.trace

    @property
    def _stepped_at(self) -> float:
        return self.trace.steps[-1].published_at if self.trace.steps else 0.0

    # Faults

    def kill(self, generator: int) -> None:
        """The generator (counted from 0) is gone for good, with all that it held."""
        rank = self.generators[generator].rank
        self._dead.add(rank)
        self.at(self.now + self.job.reissue_after_s, self._tell_silence, rank, False)

    def silence(self, generator: int, until: float) -> None:
        """Nothing gets to or from the generator before that time; then everything, in order. It goes on meanwhile."""
        rank = self.generators[generator].rank
        self._silent[rank] = until
        if self.now + self.job.reissue_after_s < until:
            self.at(self.now + self.job.reissue_after_s, self._tell_silence, rank, False)
            self.at(until, self._tell_silence, rank, True)

    def slow(self, generator: int, factor: float) -> None:
        """Every token of samples that start from now on takes `factor` times as long as before."""
        self.generators[generator].token_s *= factor

    def _tell_silence(self, rank: int, over: bool) -> None:
        for index in range(self.job.ledgers):
            self.receive(index, index, Silence(rank, over))

    # Messages

    def send(self, source: int, target: int, message: Message) -> None:
        self.trace.messages[type(message).__name__] += 1
        pair = (source, target)
        arrival = max(self.now + self.job.message_s(source, target, self.rng), self._last_arrival.get(pair, 0.0))
        self._last_arrival[pair] = arrival
        self.at(arrival, self._arrive, source, target, message)

    def _arrive(self, source: int, target: int, message: Message) -> None:
        held_until = max(self._silent.get(source, 0.0), self._silent.get(target, 0.0)) if self._silent else 0.0
        if source in self._dead or target in self._dead:
            return
        if held_until > self.now:
            self.at(held_until, self._arrive, source, target, message)
        elif target < self.job.ledgers:
            self.receive(target, source, message)
        else:
            self.generators[target - self.job.ledgers].receive(message)

    # Trainers

    def receive(self, index: int, source: int, message: Message) -> None:
        """A message arrives at a trainer's courier."""
        self.nodes[index].receive(Received(source, message), self.now)
        self._turn(index)

    def _turn(self, index: int) -> None:
        """One turn of a trainer's courier. The next comes with a message, or when the ledger has something to do."""
        node = self.nodes[index]
        node.tick(self.now)
        formed = node.take_formed()
        if formed is not None:
            self._take(index, formed)
        elif node.may_train:
            self._ready(index)
        tick = node.next_tick()
        if tick is not None and tick != self._ticks[index]:
            self.at(max(tick, self.now), self._tick, index, tick)
        self._ticks[index] = tick

    def _tick(self, index: int, planned: float) -> None:
        if self._ticks[index] == planned:
            self._ticks[index] = None
            self._turn(index)

    def _take(self, index: int, formed: FormedStep) -> None:
        self._taken[index] = formed
        if formed.finished:
            self.over.add(index)
        else:
            self._pull(index, formed)

    def _pull(self, index: int, formed: FormedStep) -> None:
        self.at(self.now + self.job.pull_s(index, self.rng), self._pull_ends, index, formed, self.now)

    def _pull_ends(self, index: int, formed: FormedStep, begun: float) -> None:
        """The data are here, unless their owner is gone; while that isn't known yet, they are waited for."""
        if self._taken[index] is not formed:
            return
        gone = self._gone_from(index, formed) if self._dead or self._silent else []
        if not gone:
            self._chosen_at = begun
            self.nodes[index].pulled(formed.formation)
            self._turn(index)
        elif all(owner in self.nodes[index].absent for _, owner in gone):
            self._taken[index] = None
            self.nodes[index].unform(ticket for ticket, _ in gone)
            self._turn(index)
        else:
            self.at(self.now + self.job.reissue_after_s / 16, self._pull_ends, index, formed, begun)

    def _gone_from(self, index: int, formed: FormedStep) -> list[tuple[int, int]]:
        """(ticket, owner) of this trainer's groups whose owners don't answer."""
        groups = [(group.ticket, group.owner) for group in formed.groups if group.replica == index]
        return [(t, owner) for t, owner in groups if owner in self._dead or self._silent.get(owner, 0.0) > self.now]

    def _ready(self, index: int) -> None:
        """All replicas may train; the last to hear of it sets the time."""
        formed = self._taken[index]
        self._may_train.add(index)
        if len(self._may_train) == self.job.ledgers and not self._trains and formed is not None:
            self._trains = True
            self._train(formed, self._chosen_at)

    def _train(self, formed: FormedStep, chosen_at: float) -> None:
        step = StepTrace(formed, chosen_at, pulled_at=self.now)
        step.trained_at = self.now + self.job.train_s
        last = formed.step + 1 == self.spec.steps
        published = last or (formed.step + 1) % self.spec.publish_every == 0
        step.published_at = step.trained_at + self.job.publish_s * published
        self.at(step.published_at, self._end_step, step, published)

    def _end_step(self, step: StepTrace, published: bool) -> None:
        self.trace.steps.append(step)
        self._release(step.formed)
        for generator in self.generators if published else []:
            arrival = self.now + self.job.weights_s(generator.index, self.rng)
            self.at(arrival, generator.take_version, step.formed.step + 1)
        self._may_train, self._trains = set(), False
        for index, node in enumerate(self.nodes):
            node.end_step(step.formed.step, published)
            self._turn(index)

    def _release(self, formed: FormedStep) -> None:
        """Tell the owners that these groups are trained; they know it at once."""
        self.trace.messages[Release.__name__] += len({(group.replica, group.owner) for group in formed.groups})
        for group in formed.groups:
            self.generators[group.owner - self.job.ledgers].release([(group.ticket, group.attempt)])
