"""What a new version costs both sides in the real loop: sent in the background, against a broadcast at which all meet.

    python -m benchmarks.weights_stall [--json] [--quick]

One trainer and two generators with the `torch` engine; a model made from nothing whose weights are large beside the
little text that it makes, so that handing over a version is a good part of a step. Two jobs by turns, alike but for
`weights.transport`; what their main threads did is read from their traces, without the first steps:

- `generator pause`: the time of a generator per version between two steps of its engine (ours: it loads what is there;
  theirs: it joins the broadcast, then loads). Milliseconds, medians over the versions.
- `whole sync`: that pause of ours against a whole blocking sync, from the trainer's begin of publishing to a
  generator having loaded.
- `trainer pause`: publishing (ours: the copy into the snapshot; theirs: the same copy, and the broadcast).
- `steps`: optimizer steps per second.
- `sync share`: publishing in theirs, as a share of a step; how much there was to win.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import report, report_value
from benchmarks.jobs import run_job, steps_per_s

STEPS, SKIP = 14, 4
ENVIRONMENT = Path(__file__).parents[1] / "examples" / "my_environment.py"


def job(transport: str) -> dict[str, Any]:
    return {
        "run": {"name": transport, "steps": STEPS, "trace": True},
        "model": {
            "tiny": {"characters": "0123456789+=", "layers": 8, "hidden": 768, "context": 16},
            "dtype": "float32",
        },
        "data": {"environment": f"{ENVIRONMENT}:addition", "chat": False},
        "ranks": {"generators": 2, "trainers": 1},
        "ledger": {"max_staleness": 2, "groups_per_step": 2},
        "rollout": {"group_size": 4, "max_tokens": 4, "slots": 16},
        "train": {"lr": 1e-5},
        "weights": {"transport": transport},
        "checkpoint": {"every": 0},
    }


@dataclass(frozen=True, slots=True)
class Measured:
    """One job; milliseconds, medians over its versions."""

    generator_ms: float
    trainer_ms: float
    whole_sync_ms: float
    steps_per_s: float
    sync_share: float


def measure(transport: str) -> Measured:
    with tempfile.TemporaryDirectory() as folder:
        metrics = run_job(job(transport), Path(folder))
        spans = [*read_spans(Path(folder) / "run" / "trace")]
    published = {version_of(span): span for span in spans if span["name"] == "publishing version"}
    pauses, syncs = [], []
    for taken, loaded in taken_in(spans):
        version = version_of(loaded)
        if version > SKIP:
            pauses.append((taken["dur"] + loaded["dur"]) / 1e3)
            syncs.append((loaded["ts"] + loaded["dur"] - published[version]["ts"]) / 1e3)
    publishing = [span["dur"] / 1e3 for version, span in published.items() if version > SKIP]
    step_ms = 1e3 * median(line["time/step"] for line in metrics[SKIP:])
    return Measured(
        generator_ms=median(pauses),
        trainer_ms=median(publishing),
        whole_sync_ms=median(syncs),
        steps_per_s=steps_per_s(metrics, SKIP),
        sync_share=median(publishing) / step_ms,
    )


def read_spans(folder: Path) -> Iterable[dict[str, Any]]:
    """Of all ranks, rank by rank."""
    for file in sorted(folder.glob("*.jsonl")):
        yield from (event for line in file.read_text().splitlines() if (event := json.loads(line))["ph"] == "X")


def taken_in(spans: list[dict[str, Any]]) -> Iterable[tuple[dict[str, Any], dict[str, Any]]]:
    """The spans in which a generator took in a version: waiting for its bytes, and loading it."""
    for before, span in pairwise(spans):
        if span["name"] == "loading version" and before["pid"] == span["pid"]:
            yield before, span


def version_of(span: dict[str, Any]) -> int:
    return int(span["args"]["state"].rpartition(" ")[2])


def middle(runs: list[Measured], name: str) -> float:
    return median(getattr(run, name) for run in runs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    parser.add_argument("--quick", action="store_true", help="one round instead of five")
    options = parser.parse_args()
    runs: dict[str, list[Measured]] = {"mpi": [], "collective": []}
    for _ in range(1 if options.quick else 5):
        for transport, measured in runs.items():
            measured.append(measure(transport))
    ours, theirs = runs["mpi"], runs["collective"]

    def tell(case: str, mine: float, other: float, unit: str, less: bool = False) -> None:
        report("weights_stall", case, mine, other, unit, options.json, less)

    tell("generator pause", middle(ours, "generator_ms"), middle(theirs, "generator_ms"), "ms", less=True)
    tell("whole sync", middle(ours, "generator_ms"), middle(theirs, "whole_sync_ms"), "ms", less=True)
    tell("trainer pause", middle(ours, "trainer_ms"), middle(theirs, "trainer_ms"), "ms", less=True)
    tell("steps", middle(ours, "steps_per_s"), middle(theirs, "steps_per_s"), "steps/s")
    report_value("weights_stall", "sync share", middle(theirs, "sync_share"), "of a step", options.json)


if __name__ == "__main__":
    main()
