"""Rank 0 sends more than the network holds to a rank that doesn't poll: its end must be limited and name that rank."""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

from headrace.comm.errors import WaitLimitError
from headrace.comm.messages import Ask
from headrace.comm.mpi import MpiTransport

BYTES = 50_000_000


def main() -> None:
    transport = MpiTransport(MPI.COMM_WORLD.Dup())
    if transport.rank == 0:
        transport.send(1, Ask(1), [np.ones(BYTES, np.uint8)])
        try:
            transport.close(limit=0.5)
        except WaitLimitError as error:
            print(f"limit: {error}", flush=True)
    MPI.COMM_WORLD.Barrier()
    if transport.rank == 1:
        while not (received := transport.poll()):
            pass
        assert received[0].buffers[0].sum() == BYTES
    transport.close()
    MPI.COMM_WORLD.Barrier()


main()
