"""By a rank's lifeline the launcher sees when its process dies, before anybody else can know.

    all ranks on the launcher's host   FIFO `rank_NNN.alive`, made by the launcher, opened by the rank
    ranks on several hosts             TCP connection to the launcher, which tells in `lifelines.json` where it listens

Nothing is sent by it but the rank's number at the start. The kernel closes it while the process dies, of whatever. A
rank that fails closes it before it aborts the others.
"""

from __future__ import annotations

import fcntl
import os
import resource
import socket
import sys
import threading
from pathlib import Path

import msgspec

OFFER = "lifelines.json"
TABLE = 1024
"""File descriptors that a process may have where nobody has raised the limit."""

CONNECT_S = 5.0
"""How long one address of the launcher may take to answer."""

WELCOME = b"\n"
"""The launcher's answer to a rank that it knows."""


class Offer(msgspec.Struct, frozen=True):
    """Where a launcher waits for its ranks."""

    addresses: tuple[str, ...]
    port: int
    token: str
    """Tells ranks of this attempt from any others."""

    def greeting(self, rank: int) -> bytes:
        return f"{self.token} {rank}\n".encode()


class Lifeline:
    """A rank's hold on whatever the launcher has put into the folder of the attempt for it."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._held: int | None = None
        """File descriptor; none while there is no connection."""
        self._ending = False
        alive = folder / f"rank_{rank:03d}.alive"
        if alive.is_fifo():
            self._held = _high(os.open(alive, os.O_RDWR))  # for reading too, so that it never blocks
        elif (folder / OFFER).is_file():
            offer = msgspec.json.decode((folder / OFFER).read_bytes(), type=Offer)
            threading.Thread(target=self._connect, args=(offer, rank), name="lifeline", daemon=True).start()

    def let_go(self) -> None:
        """Tell the launcher that this rank is about to end, before it has the others ended."""
        self._ending = True
        held, self._held = self._held, None
        if held is not None:
            os.close(held)

    def _connect(self, offer: Offer, rank: int) -> None:
        """The start needn't wait for it, and without it just the naming of a dead rank may be off."""
        complaints = []
        for address in offer.addresses:
            try:
                connection = socket.create_connection((address, offer.port), CONNECT_S)
                connection.sendall(offer.greeting(rank))
                welcome = connection.recv(1)
            except OSError as error:
                complaints.append(f"{address}: {error}")
                continue
            if welcome == WELCOME:
                self._held = _high(connection.detach())
                if self._ending:
                    self.let_go()
                return
            complaints.append(f"{address}: another program listens there")
        print(
            f"The launcher can't be reached ({'; '.join(complaints)}): should this rank die, it may name another.",
            file=sys.stderr,
            flush=True,
        )


def _high(fd: int) -> int:
    """Move a file descriptor to the end of the table: Linux closes a dying process's files from there, and on a busy
    machine others may hear of the death before it comes to the last ones."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    table = TABLE if soft == resource.RLIM_INFINITY else min(soft, TABLE)
    high = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, table - 16)  # the first of these that is free
    os.close(fd)
    return high
