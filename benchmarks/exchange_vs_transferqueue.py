"""The sample exchange against TransferQueue 0.1.11 (SimpleStorage), from the producer to the hands of another process.

    python -m benchmarks.exchange_vs_transferqueue [--json] [--quick]

TransferQueue runs in an environment of its own, which is made in `build/` (some 500 MB to download), on a local Ray of
its own with a HOME of its own. Cases: batches of 128 and 512 MiB of ragged samples, two under way at most (GB/s), and
samples of 1 kB that the producer hands over singly, 32 under way at most (samples/s). Under way is what was put and
isn't in the consumer's hands. Both sides are warm and take turns; medians. The load average at the end is printed too.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks import interleaved_medians, report
from benchmarks.ranks import parse_options
from headrace.comm.sample_exchange import Exchange, Schema, ragged
from headrace.launcher.mpi import choose_mpi

HERE = Path(__file__).parent
VENV = HERE.parent / "build" / "transferqueue"
PACKAGES = ("transferqueue==0.1.11", f"torch=={importlib.metadata.version('torch').partition('+')[0]}")
CONSUMER, PRODUCER = 0, 1
LIMIT_S = 300.0
NEWS_S = 60.0
NAP_S = 50e-6
END = "end"


class Case(NamedTuple):
    nbytes: int
    """Of a batch."""
    samples: int
    """Of a batch."""
    batches: int
    """A round."""
    in_flight: int
    """Batches."""


CASES = {
    "large 128 MiB": Case(128 << 20, 64, 8, 2),
    "large 512 MiB": Case(512 << 20, 64, 4, 2),
    "small 1 kB": Case(1000, 1, 1024, 32),
}


def batch_of(case: Case) -> list[dict[str, np.ndarray]]:
    """Ragged: sample n has n + 1 parts."""
    part = case.nbytes // 4 // (case.samples * (case.samples + 1) // 2)
    return [{"tokens": np.full(part * (n + 1), n, np.int32)} for n in range(case.samples)]


def produce(exchange: Exchange, case: Case, first: int, batch: list[dict[str, np.ndarray]]) -> None:
    """Hand over the batches of a round, each when there is room for it."""
    for key in range(first, first + case.batches):
        while exchange.statistics().groups >= case.in_flight:
            time.sleep(NAP_S)
        exchange.put(key, batch)


def consume(exchange: Exchange, case: Case) -> None:
    """Take the batches of a round, as many at once as there are."""
    left = case.batches
    while left:
        groups = exchange.consume(PRODUCER, "consumer", case.in_flight, wait_s=NEWS_S)
        for group in groups.values():
            assert [int(tokens[-1]) for tokens in group["tokens"]] == [*range(case.samples)]
        exchange.release(PRODUCER, groups)
        left -= len(groups)


def rank_main(case: Case) -> None:
    """What each of the two ranks runs: a round for every line that comes to the consumer, which tells the producer."""
    from mpi4py import MPI

    batch = batch_of(case)
    with Exchange(MPI.COMM_WORLD, Schema({"tokens": ragged(np.int32)}), LIMIT_S) as exchange:
        if exchange.rank == CONSUMER:
            for number, _ in enumerate(sys.stdin):
                begun = time.perf_counter()
                exchange.put(number, [])
                consume(exchange, case)
                print(time.perf_counter() - begun, flush=True)
            exchange.put(END, [])
            return
        while END not in (told := exchange.consume(CONSUMER, "producer", wait_s=NEWS_S)):
            for number in told:
                assert isinstance(number, int)
                produce(exchange, case, number * case.batches, batch)


def environment() -> Path:
    """The Python of TransferQueue's environment, made if need be."""
    python = VENV / "bin" / "python"
    ready = VENV / ".ready"
    if not ready.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", VENV], check=True)
        pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", *PACKAGES]
        subprocess.run(pip, check=True, stdout=sys.stderr)
        ready.touch()
    return python


class Side:
    """A program that runs a round for every line it gets, and prints the seconds it took."""

    def __init__(self, process: subprocess.Popen[str], per_round: float) -> None:
        self._process = process
        self._per_round = per_round

    def __call__(self) -> float:
        """What was passed per second."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self._process.args} ended with status {self._process.wait()}")
        return self._per_round / float(line)


@contextmanager
def running(command: list[str], variables: dict[str, str], per_round: float) -> Iterator[Side]:
    process = subprocess.Popen(
        command, env=os.environ | variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        yield Side(process, per_round)
        assert process.stdin is not None
        process.stdin.close()
        process.wait(LIMIT_S)


def compare(name: str, rounds: int) -> list[float]:
    """Ours and theirs: GB/s, or samples per second."""
    case = CASES[name]
    per_round = case.batches * (case.nbytes / 1e9 if case.samples > 1 else 1)
    mpi = choose_mpi("auto", os.environ)
    ranks = [sys.executable, "-m", "mpi4py", "-m", "benchmarks.exchange_vs_transferqueue", "--rank-of", name]
    with tempfile.TemporaryDirectory(prefix="tq-") as folder:
        theirs = [str(environment()), str(HERE / "transferqueue.py"), folder, *map(str, case)]
        home = {"HOME": folder, "PYTHONPATH": "", "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
        with (
            running([*mpi.command(2), *ranks], mpi.environment | {"OMP_NUM_THREADS": "1"}, per_round) as our_side,
            running(theirs, home, per_round) as their_side,
        ):
            interleaved_medians([our_side, their_side], 1)  # warm up
            return interleaved_medians([our_side, their_side], rounds)


def main() -> None:
    options = parse_options(__doc__)
    if options.rank_of:
        rank_main(CASES[options.rank_of])
        return
    for name, case in CASES.items():
        ours, theirs = compare(name, 1 if options.quick else 5)
        unit = "GB/s" if case.samples > 1 else "samples/s"
        report("exchange_vs_transferqueue", name, ours, theirs, unit, options.json)
    print(f"load average {os.getloadavg()[0]:.1f}", file=sys.stderr)


if __name__ == "__main__":
    main()
