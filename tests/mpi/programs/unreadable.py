"""Rank 1 sends a frame of another protocol: rank 0 must refuse it and name the source."""

from __future__ import annotations

from mpi4py import MPI

from headrace.comm.errors import HeadraceError
from headrace.comm.mpi import HEADER_TAG, MpiTransport


def main() -> None:
    comm = MPI.COMM_WORLD.Dup()
    if comm.Get_rank() == 1:
        comm.Send([b"\xff\x00", MPI.BYTE], 0, HEADER_TAG)
        return
    transport = MpiTransport(comm)
    try:
        while not transport.poll():
            pass
    except HeadraceError as error:
        print(f"refused: {error}", flush=True)


main()
