"""One line of metrics per optimizer step, put together on trainer 0 from what every trainer reports.

trainer i ── StepReport(step, tickets, times, counters) ──▶ LeaderDesk (courier of trainer 0)
trainer 0 ── record(step, …) at its own end of step ──────▶ LeaderDesk
all of a step there → one object in metrics.jsonl, the same scalars in TensorBoard
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from headrace.comm.files import write_whole
from headrace.comm.messages import GeneratorCounters, StepReport
from headrace.ranks.tickets import NO_VARIANCE, OVERDUE, FormedGroup, FormedStep, TicketCounts

MIB = 1 << 20

TICKETS = ("issued", "trained", "dropped", "failed", "outstanding", "returned")


def ticket_totals(counts: TicketCounts) -> dict[str, int]:
    """The running totals that a step reports; dropped tickets by reason, too."""
    totals = {name: getattr(counts, name) for name in TICKETS}
    return totals | {f"dropped_{reason}": counts.dropped_reasons.get(reason, 0) for reason in (OVERDUE, NO_VARIANCE)}


class MetricsFile:
    """`metrics.jsonl` and the TensorBoard events of a run."""

    def __init__(self, folder: Path, start_step: int) -> None:
        from tensorboard.summary import Writer

        path = folder / "metrics.jsonl"
        cut_after(path, start_step)
        self._file = path.open("a", encoding="utf-8")
        self._board = Writer(str(folder / "tensorboard"))

    def write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        for name, value in line.items():
            if name != "step" and value is not None:
                self._board.add_scalar(name, value, line["step"])
        self._board.flush()

    def close(self) -> None:
        self._file.close()
        self._board.close()


def cut_after(path: Path, step: int) -> None:
    """Forget the lines of steps that will be done again after a resume, and a line that was cut off by a crash."""
    keep_lines(path, lambda line: line["step"] <= step)


def keep_lines(path: Path, wanted: Callable[[dict[str, Any]], bool]) -> None:
    """Drop the lines that aren't wanted, and one without its end, from a file of JSON objects, if there is one. A line
    that holds none, as after a crash of the machine, is named and dropped: such a file tells of the run, but the run
    doesn't need it."""
    if not path.exists():
        return
    kept = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        row = _object(line)
        if row is None:
            print(f"{path}, line {number} isn't what was written; it is dropped.", file=sys.stderr, flush=True)
        elif wanted(row):
            kept.append(line + b"\n")
    write_whole(path, b"".join(kept))


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


@dataclass(slots=True)
class _Pending:
    reports: dict[int, StepReport] = field(default_factory=dict)
    record: dict[str, Any] | None = None
    groups: Sequence[FormedGroup] = ()


class MetricsGatherer:
    """Completes the lines; lives in the courier of trainer 0."""

    def __init__(self, file: MetricsFile, trainers: int, start_step: int) -> None:
        self.written = start_step - 1
        """Last step (0, 1, …) whose line is written."""
        self.on_written: Callable[[int, Sequence[FormedGroup], list[StepReport]], None] = lambda *_: None
        """Called after that with the step, its batch and the reports of all trainers, by index."""
        self._file = file
        self._trainers = trainers
        self._steps: dict[int, _Pending] = {}
        self._seen: dict[int, GeneratorCounters] = {}
        self._last_time = time.monotonic()

    def close(self) -> None:
        self._file.close()

    def record(self, step: int, line: dict[str, Any], groups: Sequence[FormedGroup] = ()) -> None:
        pending = self._steps.setdefault(step, _Pending())
        pending.record, pending.groups = line, groups
        self._complete(step)

    def report(self, source: int, report: StepReport) -> None:
        self._steps.setdefault(report.step, _Pending()).reports[source] = report
        self._complete(report.step)

    def _complete(self, step: int) -> None:
        pending = self._steps[step]
        if pending.record is None or len(pending.reports) < self._trainers:
            return
        reports = [report for _, report in sorted(pending.reports.items())]
        self._file.write(pending.record | self._merge(reports))
        self.written = step
        del self._steps[step]
        self.on_written(step, pending.groups, reports)

    def _merge(self, reports: Sequence[StepReport]) -> dict[str, Any]:
        now = time.monotonic()
        names = reports[0].tickets
        line: dict[str, Any] = {f"tickets/{name}": sum(r.tickets[name] for r in reports) for name in names}
        times = {name: float(np.mean([r.times[name] for r in reports])) for name in reports[0].times}
        wall = times.pop("wall")
        line |= {f"time/{name}": value for name, value in times.items()}
        line["time/step"] = wall
        line["idle/trainer"] = min(1.0, times["wait"] / wall) if wall > 0 else 0.0
        tokens = sum(r.tokens for r in reports)
        line["staleness/mean"] = sum(r.age_sum for r in reports) / tokens if tokens else 0.0
        line |= self._generation(reports, now - self._last_time)
        self._last_time = now
        return line

    def _generation(self, reports: Sequence[StepReport], elapsed: float) -> dict[str, Any]:
        """What the generators did since the last line, from the difference of their running totals."""
        newest = dict(self._seen)
        for report in reports:
            for rank, counters in report.counters.items():
                if rank not in newest or counters.wall_s > newest[rank].wall_s:
                    newest[rank] = counters
        zero = GeneratorCounters(0, 0, 0.0, 0.0, 0.0, -1)
        change = [(counters, self._seen.get(rank, zero)) for rank, counters in newest.items()]
        tokens = sum(new.generated_tokens - old.generated_tokens for new, old in change)
        samples = sum(new.finished_samples - old.finished_samples for new, old in change)
        rewards = sum(new.reward_sum - old.reward_sum for new, old in change)
        busy = sum(new.busy_s - old.busy_s for new, old in change)
        wall = sum(new.wall_s - old.wall_s for new, old in change)
        self._seen = newest
        return {
            "tokens/generated_per_s": tokens / elapsed if elapsed > 0 else 0.0,
            "reward/generated_mean": rewards / samples if samples else None,
            "idle/generator": max(0.0, 1.0 - busy / wall) if wall > 0 else 0.0,
            "groups/kept_mb": max((counters.kept_bytes for counters in newest.values()), default=0) / MIB,
            "groups/spilled": sum(counters.spilled for counters in newest.values()),
        }


def batch_metrics(formed: FormedStep, step_s: float) -> dict[str, Any]:
    """What the metadata of the whole batch says, the same on every trainer."""
    groups = formed.groups
    samples = sum(group.samples for group in groups)
    trained = sum(group.tokens for group in groups)
    return {
        "reward/mean": sum(group.reward_sum for group in groups) / samples,
        "response_length/mean": sum(group.response_tokens for group in groups) / samples,
        "response_length/max": max(group.longest for group in groups),
        "staleness/max": max((formed.step - group.born for group in groups if group.sequences), default=0),
        "tokens/trained_per_s": trained / step_s if step_s > 0 else 0.0,
    }
