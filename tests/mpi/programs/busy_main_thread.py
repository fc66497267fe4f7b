"""A courier thread answers while the main thread computes in pure Python, without ever giving way by itself."""

from __future__ import annotations

import threading
import time

from mpi4py import MPI

from headrace.comm.messages import Ask, Bye
from headrace.comm.mpi import MpiTransport

ROUNDS = 100


def echo_until_bye(transport: MpiTransport) -> None:
    """Rank 1 sends everything back; rank 0 sends the next number when the last has come back."""
    if transport.rank == 0:
        transport.send(1, Ask(0))
    while True:
        for item in transport.poll():
            if isinstance(item.message, Bye):
                return transport.close()
            assert isinstance(item.message, Ask)
            if transport.rank == 1:
                transport.send(0, item.message)
            elif item.message.room + 1 < ROUNDS:
                transport.send(1, Ask(item.message.room + 1))
            else:
                transport.send(1, Bye(0))
                return transport.close()
        time.sleep(20e-6)


def main() -> None:
    transport = MpiTransport(MPI.COMM_WORLD.Dup())
    courier = threading.Thread(target=echo_until_bye, args=(transport,))
    courier.start()
    turns = 0
    while courier.is_alive():
        turns += 1
    MPI.COMM_WORLD.Barrier()
    assert turns > ROUNDS
    print(f"rank {transport.rank}: {turns} turns", flush=True)


main()
