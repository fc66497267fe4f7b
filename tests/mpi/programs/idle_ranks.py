"""Ranks that only poll, with back-off from 20 µs to 10 ms: how much processor time do they take together?"""

from __future__ import annotations

import resource
import time

import numpy as np
from mpi4py import MPI

from headrace.comm.mpi import MpiTransport

SECONDS = 5.0


def processor_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    transport = MpiTransport(MPI.COMM_WORLD.Dup())
    before, end, nap = processor_seconds(), time.monotonic() + SECONDS, 20e-6
    while time.monotonic() < end:
        assert transport.poll() == []
        time.sleep(nap)
        nap = min(2 * nap, 10e-3)
    used = np.array([processor_seconds() - before])
    total = np.zeros(1)
    MPI.COMM_WORLD.Reduce(used, total, root=0)
    if transport.rank == 0:
        print(f"cores: {total[0] / SECONDS:.4f}", flush=True)


main()
