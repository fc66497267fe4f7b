"""Rank 1 keeps a large group for the others, and fails when its data have begun to leave: owner_fails.py kill|stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence

import numpy as np
from mpi4py import MPI

from headrace.comm.messages import Message, Pulled
from headrace.comm.mpi import MpiTransport
from headrace.comm.sample_exchange import Exchange, Schema, ragged
from headrace.comm.transport import Buffer

OWNER = 1
STOP_S = 2
SCHEMA = Schema({"tokens": ragged(np.int64)})
TOKENS = 30_000_000


class Failing(MpiTransport):
    """The second answer with data is the moment: the first may be on its way, too."""

    answers = 0

    def send(self, target: int, message: Message, buffers: Sequence[Buffer] = ()) -> None:
        super().send(target, message, buffers)
        if isinstance(message, Pulled) and buffers:
            self.answers += 1
            if self.answers == 2:
                self.fail()

    def fail(self) -> None:
        if sys.argv[1] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        subprocess.Popen(["sh", "-c", f"sleep {STOP_S}; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)


def main() -> None:
    comm = MPI.COMM_WORLD.Dup()
    owner = comm.Get_rank() == OWNER
    with Exchange.over((Failing if owner else MpiTransport)(comm, chunk_bytes=1 << 24), SCHEMA, limit_s=30) as exchange:
        if owner:
            exchange.put("large", {"tokens": np.arange(TOKENS)})
            return
        groups = exchange.consume(OWNER, f"rank {exchange.rank}", wait_s=30)
        assert (groups["large"]["tokens"][0] == np.arange(TOKENS)).all()
        assert exchange.consume(OWNER, f"rank {exchange.rank}") == {}
        sys.stdout.write(f"rank {exchange.rank} has it all\n")
        sys.stdout.flush()


main()
