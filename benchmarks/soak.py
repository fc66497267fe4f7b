"""The sample exchange under load for a long time: nothing may be lost, doubled or corrupted, and memory must stay flat.

    python -m benchmarks.soak [--seconds 600] [--json]

Real ranks, 64 producers and 8 consumers if not told otherwise; groups of 1 kB to 64 MB, all orders of magnitude as
likely, ragged and with optional fields. What the ranks do is in `soakranks.py`. The end is one line: groups, bytes,
GB/s, memory; and the status is 1, with a paragraph for each thing that is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress

import msgspec

from benchmarks.soakranks import FAULTS, NAMES, Plan, Report, report_file
from headrace.launcher.mpi import choose_mpi

START_LIMIT_S = 180
"""For the start and the end of all ranks."""
MOST_MEMORY = 24 << 30
"""Bytes of all ranks together."""
GROWTH = 1.1
"""How much larger the peak of all ranks may be in the last quarter of the run than in the one before, …"""
RANK_GROWTH = 1.25
"""… and that of one rank; …"""
SPARE = 32 << 20
"""… so many bytes more are nothing, nor are those of two groups of the largest size."""
TOLD = 5
"""Numbers of groups in a paragraph."""
LAST_WORDS = 2000
"""Characters."""


def judge(plan: Plan, ranks: int, reports: Sequence[Report]) -> Iterator[str]:
    """A paragraph for each thing that is wrong."""
    missing = sorted(set(range(ranks)) - {report.rank for report in reports})
    if missing:
        yield f"Ranks {missing} have left no report: they died, or didn't end in time."
        return
    producers, consumers = reports[: plan.producers], reports[plan.producers :]
    for report in reports:
        yield from report.complaints
    if not all(report.groups for report in consumers):
        yield "A consumer got nothing at all: give the soak more time."
    for name in NAMES:
        yield from judge_books(name, producers, consumers)
    yield from judge_memory(reports, SPARE + 2 * plan.most_bytes)


def judge_books(name: str, producers: Sequence[Report], consumers: Sequence[Report]) -> Iterator[str]:
    """Every group that was put has come once under a name, to one of the consumers."""
    for producer in producers:
        came = Counter(number for c in consumers for number in c.taken[name].get(producer.rank, ()))
        lost = [number for number in range(producer.groups) if number not in came]
        twice = [number for number, times in came.items() if times > 1]
        strange = [number for number in came if not 0 <= number < producer.groups]
        for numbers, what in (
            (lost, "have been lost: no {name} got them"),
            (twice, "came to {name}s more than once"),
            (strange, "came to {name}s, but were never put"),
        ):
            if numbers:
                first = ", ".join(map(str, sorted(numbers)[:TOLD]))
                yield (
                    f"{len(numbers)} of the {producer.groups} groups of producer {producer.rank} "
                    f"{what.format(name=name)}. The first: {first}."
                )


def judge_memory(reports: Sequence[Report], spare: int) -> Iterator[str]:
    """Flat, and no more than there may be. `spare`: bytes that don't count as growth."""
    total = peak_of_all(reports)
    if total > MOST_MEMORY:
        yield f"All ranks together used {total >> 20} MiB of memory; {MOST_MEMORY >> 20} are allowed."
    both = [(f"rank {report.rank}", report.peaks[-2], report.peaks[-1], RANK_GROWTH) for report in reports]
    before, after = (sum(report.peaks[window] for report in reports) for window in (-2, -1))
    for who, earlier, later, allowed in [*both, ("all ranks together", before, after, GROWTH)]:
        if later > allowed * earlier + spare:
            yield (
                f"The memory of {who} grows: at most {earlier >> 20} MiB in the third quarter of the run, "
                f"{later >> 20} MiB in the last."
            )


def peak_of_all(reports: Sequence[Report]) -> int:
    """Bytes: at most what the ranks had together at any time."""
    return sum(max(report.peaks) for report in reports) + max(report.shared for report in reports)


def run(plan: Plan, ranks: int) -> tuple[list[Report], str]:
    """Run the ranks; their reports, and in words how they ended if that wasn't well."""
    mpi = choose_mpi("auto", os.environ)
    program = [sys.executable, "-m", "mpi4py", "-m", "benchmarks.soakranks", msgspec.json.encode(plan).decode()]
    environment = os.environ | mpi.environment | {"OMP_NUM_THREADS": "1"}
    job = subprocess.Popen(
        [*mpi.command(ranks), *program], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    limit_s = plan.seconds + plan.patience_s + START_LIMIT_S
    try:
        output, _ = job.communicate(timeout=limit_s)
        told = f"The ranks ended with status {job.returncode}. They said last:\n{output[-LAST_WORDS:]}"
        ended = told if job.returncode else ""
    except subprocess.TimeoutExpired:
        job.terminate()
        with suppress(subprocess.TimeoutExpired):
            job.wait(10)
        job.kill()
        ended = f"The ranks hadn't ended after {limit_s:g} s, and were stopped."
    files = [report_file(plan.folder, rank) for rank in range(ranks)]
    return [msgspec.json.decode(file.read_bytes(), type=Report) for file in files if file.exists()], ended


def summary(plan: Plan, reports: Sequence[Report]) -> dict[str, object]:
    consumers = [report for report in reports if report.rank >= plan.producers]
    nbytes = sum(report.bytes for report in consumers)
    seconds = max((report.seconds for report in consumers), default=0.0)
    return {
        "name": "soak",
        "ranks": len(reports),
        "seconds": round(seconds, 1),
        "groups": sum(report.groups for report in consumers),
        "bytes": nbytes,
        "GB/s": round(nbytes / seconds / 1e9, 3) if seconds else 0.0,
        "largest_rank_mib": max((max(r.peaks) + r.shared for r in reports), default=0) >> 20,
        "all_ranks_mib": peak_of_all(reports) >> 20 if reports else 0,
        "growth": round(sum(r.peaks[-1] for r in reports) / max(1, sum(r.peaks[-2] for r in reports)), 3),
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--producers", type=int, default=64)
    parser.add_argument("--consumers", type=int, default=8)
    parser.add_argument("--most-mb", type=float, default=64, help="size of the largest group")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--patience", type=float, default=60, help=argparse.SUPPRESS)
    parser.add_argument("--fault", choices=FAULTS, default="", help=argparse.SUPPRESS)
    return parser.parse_args()


def command() -> int:
    options = parse()
    ranks = options.producers + options.consumers
    with tempfile.TemporaryDirectory(prefix="headrace-soak-") as folder:
        plan = Plan(
            folder, options.seconds, options.producers, int(options.most_mb * 1e6), options.patience, options.fault
        )
        reports, ended = run(plan, ranks)
    wrong = [ended] if ended else [*judge(plan, ranks, reports)]
    result = summary(plan, reports) | {"wrong": wrong}
    if options.json:
        print(json.dumps(result), flush=True)
    else:
        print(", ".join(f"{name} {value}" for name, value in result.items() if name != "wrong"), flush=True)
    for paragraph in wrong:
        print(f"soak: {paragraph}", file=sys.stderr, flush=True)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(command())
