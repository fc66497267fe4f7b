"""How near to its floor the ledger keeps a step, in simulated jobs of the real ledger.

    python -m benchmarks.ledger_efficiency [--json] [--quick]

64 groups of 16 samples a step; lognormal response lengths with median 1,024 and at most 32,768 tokens; as many slots as
a step has samples, and training takes as long as an average sample, so that generation at full load and training are
balanced. Of every run, after its first steps, over 200 steps:

    floor = max(generation, training, (longest + training + publication) / (S + 1))

`generation`: time in which all slots together make the samples of a step; `longest`: time of the longest sample of a
step, mean over the steps; `publication`: until the generators have a new version. Cases:

- `S=… sigma=…`: steps per hour, against those that the floor allows (the ratio is floor / mean time of a step).
- `bound S=… sigma=…`: the same against the tightest bound known instead of the floor: step v can't be published before
  step v - S - 1 was and its longest sample has been made since. It differs from the floor where the longest samples of
  steps differ much, since a run is held up by the longest of several steps, not by their mean.
- `uncut S=… sigma=…`: without the limit of 32,768 tokens.
- `delay=…`: weights that arrive so many (undelayed) steps late: steps per hour against those that the floor of the
  delayed run allows; `cost of delay=…`: time of a step with the delay (`ours`) against without (`theirs`).
- `staleness`: mean age of groups at S = 8, sigma 0.6, of our ledger (`ours`) against taking groups in the order in
  which they were finished (`theirs`), `first finished` (as far as the bound allows) and `unbounded` (waiting for no
  group, whatever its age); `largest staleness`: the largest age; `speed`: steps per hour of the same two runs.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks import report
from headrace.ranks.contribution import Phase
from headrace.ranks.forming import Decision, Standing
from headrace.ranks.ledger import Ledger
from headrace.ranks.node import LedgerNode
from headrace.ranks.outstanding import Stage, Ticket
from headrace.ranks.simulator import MadeUpLengths, SimulatedJob, Simulation, Trace
from headrace.ranks.tickets import LedgerSpec
from headrace.rollout.config import LatencyConfig

NAME = "ledger_efficiency"
GROUPS, GROUP_SIZE = 64, 16
GENERATORS, SLOTS = 64, 16
MEDIAN, MAX_TOKENS = 1024, 32 * 1024
TOKEN_S = 0.01
SKIP, STEPS = 24, 200
UNCUT = 10**9


@dataclass(frozen=True)
class Case:
    """One simulated run."""

    staleness: int
    sigma: float
    max_tokens: int = MAX_TOKENS
    delay_s: float = 0.0

    @property
    def job(self) -> SimulatedJob:
        config = LatencyConfig(token_ms=1000 * TOKEN_S, median_tokens=MEDIAN, sigma=self.sigma)
        spec = LedgerSpec(GROUPS, self.staleness, 1, GROUP_SIZE, steps=10**6)
        return SimulatedJob(
            spec,
            GENERATORS,
            MadeUpLengths(config, GROUP_SIZE, self.max_tokens),
            slots=SLOTS,
            token_s=lambda generator: TOKEN_S,
            train_s=MEDIAN * math.exp(self.sigma**2 / 2) * TOKEN_S,
            weights_s=lambda generator, rng: self.delay_s,
            message_s=lambda source, target, rng: rng.uniform(0.001, 0.01),
        )


class Run:
    """A simulated run and what is measured of it. Times in seconds."""

    def __init__(self, case: Case, steps: int, simulation: type[Simulation] = Simulation) -> None:
        self.case = case
        self.trace: Trace = simulation(case.job).run(SKIP + steps)
        measured = self.trace.steps[SKIP:]
        groups = [self.trace.of_step(step) for step in measured]
        self.step_s = self.trace.step_s(SKIP)
        self.train_s = case.job.train_s
        self.generation_s = sum(g.sample_s for step in groups for g in step) / (GENERATORS * SLOTS) / len(groups)
        self.longest_s = [max(group.longest_s for group in step) for step in groups]
        ages = [s.formed.step - group.born for s in measured for group in self.trace.of_step(s)]
        self.mean_age, self.oldest = sum(ages) / len(ages), max(ages)

    @property
    def floor_s(self) -> float:
        longest = sum(self.longest_s) / len(self.longest_s)
        chain = (longest + self.train_s + self.case.delay_s) / (self.case.staleness + 1)
        return max(self.generation_s, self.train_s, chain)

    @property
    def bound_s(self) -> float:
        """The longest chain of samples and trainings that must follow each other, per step."""
        window = self.case.staleness + 1
        published = [step.published_at for step in self.trace.steps[SKIP - window : SKIP]]
        begin = published[-1]
        for longest in self.longest_s:
            begun = published[-window] + longest + self.case.delay_s
            published.append(max(published[-1], begun) + self.train_s)
        return max(self.generation_s, (published[-1] - begin) / len(self.longest_s))


class Queue(Ledger):
    """A ledger that hands out finished groups in the order in which they were finished, and credits as they come."""

    def __init__(self, *args: Any) -> None:
        self._order: dict[int, int] = {}
        super().__init__(*args)

    def adapt(self, left: int) -> None:
        """Whatever is left over: every credit is dealt."""

    def first(self, count: int, bounded: bool) -> dict[int, int]:
        """Deadline → how many of the first `count` finished groups have it. Bounded: with as many of those that are due
        first as the bound needs."""
        finished = [ticket for ticket in self._tickets.values() if ticket.stage is Stage.FINISHED]
        finished.sort(key=lambda ticket: self._order[ticket.number])
        needed: list[Ticket] = []
        by_deadline = sorted(self._tickets.values(), key=self._outstanding.deadline)
        for place, ticket in enumerate(by_deadline if bounded else ()):
            over = place + 1 - len(needed) - (self._outstanding.deadline(ticket) - self.step) * count
            if over > 0:
                needed += [t for t in by_deadline[: place + 1] if t in finished and t not in needed][:over]
        rest = [ticket for ticket in finished if ticket not in needed]
        return Counter(self._outstanding.deadline(ticket) for ticket in [*needed, *rest][:count])

    def _move(self, ticket: Ticket, stage: Stage, reserved: int) -> None:
        super()._move(ticket, stage, reserved)
        if stage is Stage.FINISHED:
            self._order[ticket.number] = len(self._order)

    def contribute(self, escrow: bool) -> Standing:
        standing = super().contribute(escrow)
        in_order = {deadline: sorted(told, key=self._order.__getitem__) for deadline, told in self._offered.items()}
        self._offered = in_order
        return standing


class FirstFinishedFirst(LedgerNode):
    """One ledger that trains groups in the order in which they are finished, as far as the bound allows."""

    ledger_type = Queue
    bounded = True

    @property
    def _queue(self) -> Queue:
        assert isinstance(self.ledger, Queue)
        return self.ledger

    def _decide(self, standings: Sequence[Standing]) -> Decision:
        if not self._is_formable(super()._decide(standings)):
            return Decision(None)
        return Decision([self._queue.first(self.spec.groups_per_step, self.bounded)])

    def _is_formable(self, decision: Decision) -> bool:
        return decision.taken is not None


class Unbounded(FirstFinishedFirst):
    """Waits for no group in particular."""

    bounded = False

    def tick(self, now: float) -> None:
        self._pace.urgent |= self._has_enough()
        super().tick(now)

    def _is_formable(self, decision: Decision) -> bool:
        return self._has_enough() and self._contributed is Phase.FORMING

    def _has_enough(self) -> bool:
        enough = sum(self._queue.standing().finished.values()) >= self.spec.groups_per_step
        return enough and self.phase is Phase.FORMING


class FirstFinishedSimulation(Simulation):
    node_type = FirstFinishedFirst


class UnboundedSimulation(Simulation):
    node_type = Unbounded


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    parser.add_argument("--quick", action="store_true", help="20 steps instead of 200")
    options = parser.parse_args()
    steps = 20 if options.quick else STEPS
    cases = [Case(staleness, sigma) for sigma in (0.6, 1.0, 1.3) for staleness in (1, 2, 4, 8)]
    for case in cases:
        text, run = f"S={case.staleness} sigma={case.sigma}", Run(case, steps)
        report_against_floor(text, run, options.json)
    for case in [replace(case, max_tokens=UNCUT) for case in cases if case.sigma >= 1]:
        text, run = f"uncut S={case.staleness} sigma={case.sigma}", Run(case, steps)
        report_against_floor(text, run, options.json)
    report_delays(steps, options.json)
    report_staleness(steps, options.json)


def report_against_floor(text: str, run: Run, as_json: bool) -> None:
    report(NAME, text, 3600 / run.step_s, 3600 / run.floor_s, "steps/h", as_json)
    report(NAME, f"bound {text}", 3600 / run.step_s, 3600 / run.bound_s, "steps/h", as_json)


def report_delays(steps: int, as_json: bool) -> None:
    for staleness in (1, 2, 4):
        case = Case(staleness, 1.0)
        base = Run(case, steps)
        for delay in (0.1, 0.5, 1.5):
            run = Run(replace(case, delay_s=delay * base.step_s), steps)
            text = f"delay={delay} S={staleness}"
            report(NAME, text, 3600 / run.step_s, 3600 / run.floor_s, "steps/h", as_json)
            report(NAME, f"cost of {text}", run.step_s, base.step_s, "s", as_json)


def report_staleness(steps: int, as_json: bool) -> None:
    case = Case(8, 0.6)
    ours = Run(case, steps)
    for text, simulation in (("first finished", FirstFinishedSimulation), ("unbounded", UnboundedSimulation)):
        theirs = Run(case, steps, simulation)
        report(NAME, f"staleness, {text}", ours.mean_age, theirs.mean_age, "steps", as_json)
        report(NAME, f"largest staleness, {text}", ours.oldest, theirs.oldest, "steps", as_json)
        report(NAME, f"speed, {text}", 3600 / ours.step_s, 3600 / theirs.step_s, "steps/h", as_json)


if __name__ == "__main__":
    main()
