"""Ranks that only poll, with back-off from 20 µs to 10 ms: how much processor time do they take together?

The least of some windows: on a machine that does other things, too, a wake-up finds its cache cold."""

from __future__ import annotations

import resource
import time

import numpy as np
from mpi4py import MPI

from headrace.comm.mpi import MpiTransport

WINDOWS, SECONDS = 3, 2.0


def processor_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def idle(transport: MpiTransport) -> float:
    """Processor time of a window."""
    before, end, nap = processor_seconds(), time.monotonic() + SECONDS, 20e-6
    while time.monotonic() < end:
        assert transport.poll() == []
        time.sleep(nap)
        nap = min(2 * nap, 10e-3)
    return processor_seconds() - before


def main() -> None:
    transport = MpiTransport(MPI.COMM_WORLD.Dup())
    used = np.array([idle(transport) for _ in range(WINDOWS)])
    total = np.zeros(WINDOWS)
    MPI.COMM_WORLD.Reduce(used, total, root=0)
    if transport.rank == 0:
        print(f"cores: {total.min() / SECONDS:.4f}", flush=True)


main()
