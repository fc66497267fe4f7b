"""By a rank's lifeline the launcher sees when its process dies, before anybody else can know.

    all ranks on the launcher's host   FIFO `rank_NNN.alive`, made by the launcher, opened by the rank
    ranks on several hosts             TCP connection to the launcher, which tells in `lifelines.json` where it listens

Nothing is sent by it but the rank's number at the start. The kernel closes it while the process dies, of whatever.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
from pathlib import Path

import msgspec

OFFER = "lifelines.json"
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


def hold(folder: Path, rank: int) -> None:
    """Take hold of whatever the launcher has put there for this rank, until the process ends."""
    alive = folder / f"rank_{rank:03d}.alive"
    if alive.is_fifo():
        os.open(alive, os.O_RDWR)  # for reading too, so that it never blocks
    elif (folder / OFFER).is_file():
        offer = msgspec.json.decode((folder / OFFER).read_bytes(), type=Offer)
        threading.Thread(target=_connect, args=(offer, rank), name="lifeline", daemon=True).start()


def _connect(offer: Offer, rank: int) -> None:
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
            connection.detach()  # it stays open until the process ends
            return
        complaints.append(f"{address}: another program listens there")
    print(
        f"The launcher can't be reached ({'; '.join(complaints)}): should this rank die, it may name another.",
        file=sys.stderr,
        flush=True,
    )
