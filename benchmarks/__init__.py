"""Measurements, each run by `python -m benchmarks.NAME [--json] [--quick]` from the top of the repository.

With --json every result is one line: {"name", "case", "ours", "theirs", "unit", "ratio"}, or, where there is nothing to
compare with, {"name", "case", "value", "unit"}.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence


def report(
    name: str, case: str, ours: float, theirs: float, unit: str, as_json: bool, less_is_better: bool = False
) -> None:
    """Print one result; `ratio` is ours / theirs, or the reverse where less is better."""
    ratio = theirs / ours if less_is_better else ours / theirs
    if as_json:
        row = {"name": name, "case": case, "ours": round(ours, 4), "theirs": round(theirs, 4), "unit": unit}
        print(json.dumps(row | {"ratio": round(ratio, 3)}), flush=True)
    else:
        print(f"{name} {case}: ours {ours:.3g} {unit}, theirs {theirs:.3g} {unit}, ratio {ratio:.2f}", flush=True)


def report_value(name: str, case: str, value: float, unit: str, as_json: bool) -> None:
    """Print one result that stands for itself."""
    if as_json:
        print(json.dumps({"name": name, "case": case, "value": round(value, 4), "unit": unit}), flush=True)
    else:
        print(f"{name} {case}: {value:.3g} {unit}", flush=True)


def interleaved_medians(runs: Sequence[Callable[[], float]], repeats: int) -> list[float]:
    """The median of each measurement, taken in turns, so that other load on the machine meets all of them alike."""
    values = [[run() for run in runs] for _ in range(repeats)]
    return [statistics.median(column) for column in zip(*values, strict=True)]
