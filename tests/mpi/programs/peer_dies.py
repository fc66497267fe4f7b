"""The last rank dies with transfers to and from all others under way; they are told, and go on with each other."""

from __future__ import annotations

import os
import signal
import time

import numpy as np
from mpi4py import MPI

from headrace.comm.messages import Ask
from headrace.comm.mpi import MpiTransport, check_survival

BYTES = 50_000_000
LIMIT_S = 60.0


def main() -> None:
    check_survival()
    transport = MpiTransport(MPI.COMM_WORLD.Dup(), chunk_bytes=BYTES // 3, survives=True)
    victim = transport.size - 1
    told: list[int] = []
    transport.on_lost = told.append
    load = np.ones(BYTES, np.uint8)
    for target in range(transport.size):
        transport.send(target, Ask(1), [load])
    if transport.rank == victim:
        for _ in range(3):
            transport.poll()
        os.kill(os.getpid(), signal.SIGKILL)
    got: set[int] = set()
    deadline = time.monotonic() + LIMIT_S
    while not told or transport.pending or not got.issuperset(range(victim)):
        assert time.monotonic() < deadline, f"rank {transport.rank}: {told}, {transport.pending}, {got}"
        for received in transport.poll():
            assert received.source not in told, "a dead rank spoke"
            assert received.buffers[0].sum() == BYTES
            got.add(received.source)
        time.sleep(1e-3)
    assert told == [victim]
    transport.send(victim, Ask(1), [load])
    assert not transport.pending, "something waits to be sent to a dead rank"
    print(f"rank {transport.rank} goes on", flush=True)
    time.sleep(1)  # leaving looks like another death to the others
    os._exit(0)


main()
