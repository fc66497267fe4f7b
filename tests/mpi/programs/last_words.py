"""Rank 0 ends the job with a line on each stream while its launcher's process on this node is busy with something else
for a second, here made by stopping that process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from mpi4py import MPI

from headrace.comm.last_words import wait_until_read

if MPI.COMM_WORLD.Get_rank() == 0:
    proxy = os.getppid()
    subprocess.Popen(["sh", "-c", f"sleep 1; kill -CONT {proxy}"])
    os.kill(proxy, signal.SIGSTOP)
    print("last words", flush=True)
    print("and a reason", file=sys.stderr, flush=True)
    wait_until_read((sys.stdout, sys.stderr))
    MPI.COMM_WORLD.Abort(3)
MPI.COMM_WORLD.Barrier()
