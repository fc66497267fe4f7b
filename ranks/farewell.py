"""The end of a rank in a job that may have lost others: MPI can't be finalized then.

    every rank ── here (FAREWELL) ──▶ rank 0       waits for all that are alive, leaves the job's status in a file
    rank 0     ── go   (FAREWELL) ──▶ every rank   ends at once; so do the others

Whoever ends without having finalized MPI looks dead to the others; by then nobody minds. The couriers have ended:
the main thread calls MPI here.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from headrace.comm.errors import WaitLimitError
from headrace.comm.files import write_whole
from headrace.comm.mpi import MpiTransport

if TYPE_CHECKING:
    from mpi4py import MPI

LOSSES = "lost_generators.txt"
"""File of an attempt: a line about every generator that the job went on without."""
STATUS = "end_status"
"""File of an attempt: the exit status of the job, once nothing can change it. mpirun's own says nothing."""

FAREWELL_TAG = 3
POLL_S = 0.002


def add_line(file: Path, line: str) -> None:
    with file.open("a", encoding="utf-8") as opened:
        opened.write(line + "\n")


def leave_without_mpi(comm: MPI.Comm, transport: MpiTransport, attempt: Path, status: int, limit_s: float) -> NoReturn:
    """End this process once all living ranks are here.

    Raises:
        WaitLimitError: they weren't within the limit.
    """
    if comm.Get_rank() == 0:
        others = [rank for rank in range(1, comm.Get_size()) if rank not in transport.lost]
        _await(lambda: all(_has_come(comm, rank) for rank in others), limit_s, "Other ranks haven't come to the end")
        write_whole(attempt / STATUS, f"{status}\n".encode())
        for rank in others:
            _send(comm, rank)
    else:
        _send(comm, 0)
        _await(lambda: _has_come(comm, 0), limit_s, "Rank 0 hasn't ended the job")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _has_come(comm: MPI.Comm, rank: int) -> bool:
    """Whether a word of the rank is here, or it is dead, which ends the wait for it as well."""
    from mpi4py import MPI

    try:
        return comm.Iprobe(rank, FAREWELL_TAG)
    except MPI.Exception as error:
        if error.Get_error_class() != MPI.ERR_PROC_FAILED:
            raise
        return True


def _send(comm: MPI.Comm, rank: int) -> None:
    """Empty, so it leaves at once; a dead rank needs no word."""
    from mpi4py import MPI

    try:
        comm.Isend([bytearray(), MPI.BYTE], rank, FAREWELL_TAG)
    except MPI.Exception as error:
        if error.Get_error_class() != MPI.ERR_PROC_FAILED:
            raise


def _await(done: Callable[[], bool], limit_s: float, complaint: str) -> None:
    deadline = time.monotonic() + limit_s
    while not done():
        if time.monotonic() > deadline:
            raise WaitLimitError(f"{complaint} within {limit_s:.0f} s; look at the ends of their logs.")
        time.sleep(POLL_S)
