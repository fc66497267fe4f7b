"""Steps per second of asynchronous training against synchronous training, over real MPI with a modelled engine.

    python -m benchmarks.async_vs_sync [--json] [--quick]

16 ranks (15 generators, 1 trainer) exchange real messages; only decoding and training are sleeps. Response lengths are
lognormal with sigma 1. All generators together have as many slots as a step has samples, and a training step takes as
long as an average sample, so generation at full load and training are balanced. Cases `S=2` and `S=4` are compared with
S = 0 in the same run, interleaved; the figure of a job is its steps per second after the first steps.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import interleaved_medians, report
from benchmarks.jobs import run_job, steps_per_s

GENERATORS = 15
GROUP_SIZE = 8
GROUPS = 15
TOKEN_MS = 10.0
MEDIAN_TOKENS = 25.0
SIGMA = 1.0
STEPS = {0: 12, 2: 30, 4: 45}
SKIP = {0: 2, 2: 6, 4: 9}
"""First steps, left out: the run fills up."""


def job(staleness: int) -> dict[str, Any]:
    mean_s = TOKEN_MS / 1000 * MEDIAN_TOKENS * math.exp(SIGMA**2 / 2)
    latency = {"token_ms": TOKEN_MS, "median_tokens": MEDIAN_TOKENS, "sigma": SIGMA, "train_s": mean_s}
    return {
        "run": {"steps": STEPS[staleness], "name": f"S{staleness}"},
        "ranks": {"generators": GENERATORS, "trainers": 1},
        "ledger": {"max_staleness": staleness, "groups_per_step": GROUPS},
        "rollout": {
            "engine": "latency",
            "group_size": GROUP_SIZE,
            "max_tokens": 4096,
            "slots": GROUPS * GROUP_SIZE // GENERATORS,
            "latency": latency,
        },
        "checkpoint": {"every": 0},
    }


def speed(staleness: int) -> float:
    """Steps per second of one job."""
    with tempfile.TemporaryDirectory() as folder:
        return steps_per_s(run_job(job(staleness), Path(folder)), SKIP[staleness])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    parser.add_argument("--quick", action="store_true", help="one round instead of five")
    options = parser.parse_args()
    runs = [lambda staleness=staleness: speed(staleness) for staleness in STEPS]
    medians = dict(zip(STEPS, interleaved_medians(runs, 1 if options.quick else 5), strict=True))
    theirs = medians.pop(0)
    for staleness, ours in medians.items():
        report("async_vs_sync", f"S={staleness}", ours, theirs, "steps/s", options.json)


if __name__ == "__main__":
    main()
