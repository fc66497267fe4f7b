"""One buffer of more than 2 GiB, from a rank to itself: MPI counts in 32 bits, so it must travel in several chunks."""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

from headrace.comm.messages import Ask
from headrace.comm.mpi import MpiTransport

BYTES = (1 << 31) + 12_345


def main() -> None:
    transport = MpiTransport(MPI.COMM_WORLD.Dup())
    sent = np.zeros(BYTES, np.uint8)
    sent[:: 1 << 20] = np.arange(len(sent[:: 1 << 20]), dtype=np.uint64).astype(np.uint8)
    sent[-1] = 77
    transport.send(0, Ask(1), [sent])
    while not (received := transport.poll()):
        pass
    assert np.array_equal(received[0].buffers[0], sent)
    transport.close()


main()
