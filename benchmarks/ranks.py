"""Runs a benchmark's own module on real MPI ranks."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from benchmarks import interleaved_medians
from headrace.launcher.mpi import choose_mpi

if TYPE_CHECKING:
    from mpi4py import MPI
    from torch.distributed import TCPStore

    from headrace.comm.courier import Courier

LIMIT_S = 600


def parse_options(description: str | None) -> argparse.Namespace:
    """--json, --quick, and --rank-of CASE, by which a benchmark starts itself as the ranks of a case."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    parser.add_argument("--quick", action="store_true", help="one round instead of five")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    return parser.parse_args()


def abort(error: BaseException) -> None:
    """End all ranks: an error of a courier must not leave its main thread waiting."""
    traceback.print_exception(error)
    os._exit(1)


def run_ranks(module: str, ranks: int, *arguments: object) -> Any:
    """Run `python -m MODULE ARGUMENTS` on so many ranks, one torch thread each; returns what one of them printed.

    The module prints one line of JSON, by one rank.

    Raises:
        SystemExit: a rank failed; with what all printed.
    """
    mpi = choose_mpi("auto", os.environ)
    command = [*mpi.command(ranks), sys.executable, "-m", "mpi4py", "-m", module, *map(str, arguments)]
    environment = os.environ | mpi.environment | {"OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    if ended.returncode:
        raise SystemExit(f"{module} ended with status {ended.returncode}:\n{ended.stdout}\n{ended.stderr}")
    return json.loads(ended.stdout)


def print_medians(world: MPI.Comm, courier: Courier, runs: Sequence[Callable[[], float]], rounds: int) -> None:
    """Measure on all ranks alike, after a round to warm up; rank 0 prints. All leave together: one has the store."""
    interleaved_medians(runs, 1)
    medians = interleaved_medians(runs, rounds)
    if world.Get_rank() == 0:
        print(json.dumps(medians))
    courier.stop(LIMIT_S)
    world.Barrier()


class Meeting:
    """Where all ranks meet between measurements; over a store, since MPI belongs to the courier."""

    def __init__(self, store: TCPStore, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._meetings = 0

    def timed(self, work: Callable[[], None], first: int) -> float:
        """All ranks work: seconds from the start of rank `first` to the end of the last one, by their common clock."""
        self.meet()
        begun = time.monotonic()
        work()
        times = self.meet((begun, time.monotonic()))
        return max(end for _, end in times) - times[first][0]

    def meet(self, mine: tuple[float, float] = (0.0, 0.0)) -> Sequence[tuple[float, float]]:
        """Every rank's pair, once all are here."""
        self._meetings += 1
        keys = [f"{self._meetings}/{rank}" for rank in range(self._size)]
        self._store.set(keys[self._rank], json.dumps(mine))
        self._store.wait(keys)
        return [json.loads(self._store.get(key)) for key in keys]
