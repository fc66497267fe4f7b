"""What came of a run, as `submit_job(...).result()` gives it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from typing_extensions import Self

from headrace.launcher.metrics import Row, last_rows, read_rows
from headrace.launcher.record import LAUNCHER
from headrace.launcher.status import State, attempts, read_status


@dataclass(frozen=True, slots=True)
class RunSummary:
    """What came of a run."""

    run: Path
    """The run folder, from the root."""
    status: State
    """As `headrace status` names it: `ended` for a run that has done all its steps."""
    steps: int
    """Optimizer steps done."""
    version: int
    """Of the weights after the last step."""
    metrics: Row
    """The last line of `metrics.jsonl`; empty if no step was done."""
    evaluations: list[Row]
    """All lines of `evaluations.jsonl`, with `label`, `version` and `accuracy`."""
    seconds: float
    """From the start of each attempt to its end, added up; what lay between them doesn't count."""
    attempts: int
    """How often the ranks were started."""

    @classmethod
    def read(cls, run: Path) -> Self:
        """The summary of any run, also one that goes on or has failed, from the files in its folder."""
        tried, rows = attempts(run), last_rows(run / "metrics.jsonl")
        last = rows[-1] if rows else {}
        return cls(
            run=run.absolute(),
            status=read_status(run).state,
            steps=last.get("step", 0),
            version=last.get("version", 0),
            metrics=last,
            evaluations=read_rows(run / "evaluations.jsonl"),
            seconds=sum(map(_seconds, tried)),
            attempts=len(tried),
        )


def _seconds(attempt: Path) -> float:
    """By the times of its files: the launcher's is written first, its outcome last."""
    began = attempt / LAUNCHER
    return max(0.0, _written(attempt.iterdir()) - _written([began])) if began.is_file() else 0.0


def _written(files: Iterable[Path]) -> float:
    return max(file.stat().st_mtime for file in files)
