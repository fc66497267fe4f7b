"""What the ledgers of a very large job cost: 8,192 generators, 512 trainers, 65,536 groups outstanding, simulated.

    python -m benchmarks.ledger_scale [--json] [--quick]

16,384 groups of 16 samples a step at S = 3. Every message to a ledger really goes through the wire format. Cases, all
of the worst rank, over steps in the middle of a run, and also at 1/8 and 1/64 of the size:

- `us_per_event`: CPU time per message about tickets (Ask, Started, Finished, …) at a ledger, its decoding and the
  answers' encoding included, in microseconds.
- `form_ms`: CPU time per step for everything that the ledgers do together: rounds, words to the watcher, choosing,
  sharing, partition; in milliseconds.
- `messages_per_group`: control messages over all ranks per trained group, those of the rounds and to the watcher
  included, and these apart (`of them together`). Not counted are messages that move data (pulls of samples, weights),
  and those that come with time (heartbeats) or once a step and rank (reports).
- `memory`: what a ledger holds at the end of the run, against some steps before, in MiB.

What all ledgers compute alike is computed anew only at every 64th of them, which are those that `form_ms` is measured
on; the others take the result, so that one machine can play 512.
"""

from __future__ import annotations

import argparse
import gc
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FunctionType, MethodType, ModuleType
from typing import Any

from benchmarks import report, report_value
from headrace.comm import wire
from headrace.comm.messages import Message, Progress, RoundPart
from headrace.comm.transport import Received
from headrace.ranks.contribution import Contribution
from headrace.ranks.forming import Decision, Standing
from headrace.ranks.node import LedgerNode
from headrace.ranks.simulator import MadeUpLengths, SimulatedJob, Simulation
from headrace.ranks.tickets import FormedGroup, LedgerSpec
from headrace.rollout.config import LatencyConfig

NAME = "ledger_scale"
GROUP_SIZE, SLOTS, GROUPS_PER_TRAINER = 16, 32, 32
TOKEN_S, MEDIAN, MAX_TOKENS, SIGMA = 0.01, 1024, 8192, 1.0
WARM, STEPS = 4, 4
TOGETHER = (RoundPart, Progress)
MEASURED_EVERY = 64


@dataclass
class Spent:
    """CPU time of one ledger, in nanoseconds."""

    events: int = 0
    """Messages about tickets."""
    on_events: int = 0
    together: int = 0


class Memo:
    """The newest results that all ledgers compute alike, by round."""

    def __init__(self) -> None:
        self._results: dict[tuple[str, int], Any] = {}

    def get(self, what: str, round: int, compute: Any) -> Any:
        if (what, round) not in self._results:
            self._results = {key: value for key, value in self._results.items() if key[1] >= round - 1}
            self._results[what, round] = compute()
        return self._results[what, round]


class ScaledNode(LedgerNode):
    """A ledger whose CPU time is measured; it may take from others what it would compute alike."""

    memo: Memo
    spent: Spent
    alone: bool

    ticked = False
    """The turn that comes with a message has been taken."""

    def take(self, frame: bytes, source: int, now: float) -> None:
        """Decode a message, receive it, take a turn: what the courier does with it. A round that begins by that is
        booked by itself."""
        begun, together = time.thread_time_ns(), self.spent.together
        message, _ = wire.decode(frame, source)
        self.receive(Received(source, message), now)
        super().tick(now)
        took = time.thread_time_ns() - begun - (self.spent.together - together)
        self.ticked = True
        if isinstance(message, TOGETHER):
            self.spent.together += took
        else:
            self.spent.on_events += took
            self.spent.events += 1

    def tick(self, now: float) -> None:
        if not self.ticked:
            self._book(super().tick, now)
        self.ticked = False

    def end_step(self, step: int, published: bool) -> None:
        self._book(super().end_step, step, published)

    def _begin_round(self) -> None:
        self._book(super()._begin_round)

    def _book(self, action: Callable[..., None], *what: Any) -> None:
        """Book what the action takes, itself or by what it calls, as done together."""
        begun, together = time.thread_time_ns(), self.spent.together
        action(*what)
        self.spent.together = together + time.thread_time_ns() - begun

    def _check_credits(self, standings: Sequence[Standing]) -> None:
        self._once("credits", lambda: super(ScaledNode, self)._check_credits(standings))

    def _moves(self, standings: Sequence[Standing]) -> list[int]:
        return self._once("moves", lambda: super(ScaledNode, self)._moves(standings))

    def _read(self, result: Sequence[bytes]) -> list[Contribution]:
        return self._once("read", lambda: super(ScaledNode, self)._read(result))

    def _decide(self, standings: Sequence[Standing]) -> Decision:
        return self._once("decide", lambda: super(ScaledNode, self)._decide(standings))

    def _place(self, contributions: Sequence[Contribution]) -> list[FormedGroup]:
        return self._once("place", lambda: super(ScaledNode, self)._place(contributions))

    def _once(self, what: str, compute: Any) -> Any:
        return compute() if self.alone else self.memo.get(what, self._rounds.round, compute)


class ScaledSimulation(Simulation):
    """Messages from and to ledgers go through the wire format, and what the ledgers do with them is timed."""

    node_type = ScaledNode

    def make_node(self, index: int, ranks: list[int], generators: list[int]) -> LedgerNode:
        node = super().make_node(index, ranks, generators)
        assert isinstance(node, ScaledNode)
        if index == 0:
            self.memo = Memo()
            self.outbox: list[tuple[int, int, Message]] = []
        node.memo, node.spent, node.alone = self.memo, Spent(), index % MEASURED_EVERY == 0
        return node

    def receive(self, index: int, source: int, message: Message) -> None:
        node = self.nodes[index]
        assert isinstance(node, ScaledNode)
        node.take(wire.encode(message), source, self.now)
        self._turn(index)

    def send(self, source: int, target: int, message: Message) -> None:
        """What a ledger sends it encodes, which is timed; the way through the network begins after its turn."""
        if source < self.job.ledgers:
            wire.encode(message)
            self.outbox.append((source, target, message))
        else:
            super().send(source, target, message)

    def _turn(self, index: int) -> None:
        super()._turn(index)
        for sent in self.outbox:
            super().send(*sent)
        self.outbox.clear()


def job(trainers: int) -> SimulatedJob:
    """16 generators and 32 groups a step for every trainer."""
    config = LatencyConfig(token_ms=1000 * TOKEN_S, median_tokens=MEDIAN, sigma=SIGMA)
    return SimulatedJob(
        LedgerSpec(GROUPS_PER_TRAINER * trainers, 3, 1, GROUP_SIZE, steps=10**6),
        generators=16 * trainers,
        length=MadeUpLengths(config, GROUP_SIZE, MAX_TOKENS),
        ledgers=trainers,
        slots=SLOTS,
        token_s=lambda generator: TOKEN_S,
        train_s=MEDIAN * math.exp(SIGMA**2 / 2) * TOKEN_S,
        message_s=lambda source, target, rng: rng.uniform(0.001, 0.005),
        pull_s=lambda trainer, rng: rng.uniform(0.1, 1.0),
    )


def held_bytes(node: LedgerNode) -> int:
    """The memory of everything that only this ledger refers to."""
    seen: set[int] = set()
    todo: list[Any] = [node.ledger, node._rounds, node._pace]
    total = 0
    while todo:
        thing = todo.pop()
        if id(thing) in seen or isinstance(thing, (type, ModuleType, FunctionType, MethodType, Simulation)):
            continue
        seen.add(id(thing))
        total += sys.getsizeof(thing)
        todo.extend(gc.get_referents(thing))
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    parser.add_argument("--quick", action="store_true", help="1/8 and 1/64 of the size only")
    options = parser.parse_args()
    gc.disable()
    for trainers in (8, 64) if options.quick else (8, 64, 512):
        measure(trainers, options.json)


def measure(trainers: int, as_json: bool) -> None:
    size = f"{16 * trainers} generators, {trainers} trainers"
    simulation = ScaledSimulation(job(trainers))
    simulation.run(WARM)
    nodes = [node for node in simulation.nodes if isinstance(node, ScaledNode)]
    held = max(held_bytes(node) for node in nodes[::MEASURED_EVERY])
    for node in nodes:
        node.spent = Spent()
    before = Counter(simulation.trace.messages)
    simulation.run(WARM + STEPS)
    messages = Counter(simulation.trace.messages) - before
    together = sum(messages[kind.__name__] for kind in TOGETHER)
    groups = STEPS * simulation.spec.groups_per_step
    events = max(node.spent.on_events / node.spent.events for node in nodes) / 1e3
    form = max(node.spent.together for node in nodes) / STEPS
    report_value(NAME, f"us_per_event, {size}", events, "us", as_json)
    report_value(NAME, f"form_ms, {size}", form / 1e6, "ms", as_json)
    report_value(NAME, f"messages_per_group, {size}", messages.total() / groups, "messages", as_json)
    report_value(NAME, f"messages_per_group, of them together, {size}", together / groups, "messages", as_json)
    now = max(held_bytes(node) for node in nodes[::MEASURED_EVERY])
    report(NAME, f"memory, {size}", now / 2**20, held / 2**20, "MiB", as_json)


if __name__ == "__main__":
    main()
