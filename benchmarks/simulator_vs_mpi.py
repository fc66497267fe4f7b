"""The time of a step in the simulator against real ranks: the same job, the same lengths.

    python -m benchmarks.simulator_vs_mpi [--json] [--quick]

32 ranks (31 generators, 1 trainer) run the latency engine over MPI, and the simulator plays the same config: slots,
token time, training time, lengths by ticket and sample. Messages take between 0 and 20 ms, as couriers nap so long.
Cases S = 0, 1, 2; medians of interleaved runs; `ours` is the simulator.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import interleaved_medians, report
from benchmarks.jobs import run_job, steps_per_s
from headrace.comm.courier import LONGEST_NAP_S
from headrace.ranks.simulator import MadeUpLengths, SimulatedJob, Simulation
from headrace.ranks.tickets import LedgerSpec
from headrace.rollout.config import LatencyConfig

GENERATORS = 31
GROUPS, GROUP_SIZE, SLOTS = 31, 8, 8
TOKEN_MS, MEDIAN, SIGMA, MAX_TOKENS = 20.0, 25.0, 0.6, 800
TRAIN_S = TOKEN_MS / 1000 * MEDIAN * math.exp(SIGMA**2 / 2)
LATENCY = {"token_ms": TOKEN_MS, "median_tokens": MEDIAN, "sigma": SIGMA, "train_s": TRAIN_S}
STEPS = {0: 8, 1: 14, 2: 20}
SKIP = {0: 2, 1: 4, 2: 5}
"""First steps, left out: the run fills up."""


def real(staleness: int) -> float:
    """Seconds per step of a job of 32 ranks."""
    config: dict[str, Any] = {
        "run": {"steps": STEPS[staleness], "name": f"S{staleness}"},
        "ranks": {"generators": GENERATORS, "trainers": 1},
        "ledger": {"max_staleness": staleness, "groups_per_step": GROUPS},
        "rollout": {
            "engine": "latency",
            "group_size": GROUP_SIZE,
            "max_tokens": MAX_TOKENS,
            "slots": SLOTS,
            "latency": LATENCY,
        },
        "checkpoint": {"every": 0},
    }
    with tempfile.TemporaryDirectory() as folder:
        return 1 / steps_per_s(run_job(config, Path(folder)), SKIP[staleness])


def simulated(staleness: int) -> float:
    """Seconds per step of the same job in virtual time."""
    lengths = MadeUpLengths(LatencyConfig.model_validate(LATENCY), GROUP_SIZE, MAX_TOKENS)
    job = SimulatedJob(
        LedgerSpec(GROUPS, staleness, 1, GROUP_SIZE, STEPS[staleness]),
        GENERATORS,
        lengths,
        slots=SLOTS,
        token_s=lambda generator: TOKEN_MS / 1000,
        train_s=TRAIN_S,
        weights_s=lambda generator, rng: rng.uniform(0, 2 * LONGEST_NAP_S),
        message_s=lambda source, target, rng: rng.uniform(0, LONGEST_NAP_S),
        pull_s=lambda trainer, rng: 2 * LONGEST_NAP_S,
    )
    return Simulation(job).run().step_s(SKIP[staleness])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    parser.add_argument("--quick", action="store_true", help="one round instead of three")
    options = parser.parse_args()
    runs = [partial(run, staleness) for staleness in STEPS for run in (simulated, real)]
    medians = interleaved_medians(runs, 1 if options.quick else 3)
    for place, staleness in enumerate(STEPS):
        ours, theirs = medians[2 * place : 2 * place + 2]
        report("simulator_vs_mpi", f"S={staleness}", ours, theirs, "s", options.json)


if __name__ == "__main__":
    main()
