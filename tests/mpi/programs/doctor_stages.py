"""Stages of the doctor in which rank 1 fails, or doesn't come to the end."""

from __future__ import annotations

import sys
import time

from mpi4py import MPI

from headrace.comm.errors import HeadraceError
from headrace.comm.last_words import wait_until_read
from headrace.launcher.doctor.talk import Talk

talk = Talk(MPI.COMM_WORLD, limit_s=0.5)


def part() -> int:
    if talk.rank == 1 and sys.argv[1] == "raises":
        raise HeadraceError("the disk is full")
    if talk.rank == 1:
        time.sleep(30)
    return talk.rank


try:
    talk.stage("look at the disk", int, part)
except HeadraceError as error:
    print(f"rank {talk.rank}: {type(error).__name__}: {error}", flush=True)
    if sys.argv[1] == "sleeps":
        wait_until_read([sys.stdout])
        MPI.COMM_WORLD.Abort(3)
assert talk.stage("go on", int, lambda: talk.rank) == [0, 1, 2]
