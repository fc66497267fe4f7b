"""The launcher's ends of the ranks' lifelines (see `headrace.ranks.lifeline`): in which order did the ranks end?

mpirun and srun end the others within a millisecond, so looking at them one after the other would come too late. MPICH's
own words name any of the dead, and srun tells of ends in the order in which their nodes report. The kernel closes a
lifeline while its process dies, before MPI's connections, so before anybody else can know. One epoll object keeps the
order.
"""

from __future__ import annotations

import os
import resource
import secrets
import select
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import msgspec

from headrace.comm.network import outer_addresses
from headrace.ranks.lifeline import OFFER, WELCOME, Offer

SPARE_FILES = 256
"""Open files of the launcher beside its lifelines."""

GREETING_BYTES = 64


class Lifelines(Protocol):
    """Tells in which order the ranks of an attempt ended."""

    deaths: list[int]
    """Ranks, first dead first."""

    def fileno(self) -> int:
        """Readable when there is news."""

    def poll(self) -> None:
        """Take in deaths."""

    def close(self) -> None: ...


class Fifos:
    """Of ranks on this host."""

    def __init__(self, folder: Path, ranks: int) -> None:
        """Make the FIFOs `rank_NNN.alive`; before the ranks start."""
        self.deaths: list[int] = []
        self._fifos = [folder / f"rank_{rank:03d}.alive" for rank in range(ranks)]
        self._epoll = select.epoll()
        self._ranks: dict[int, int] = {}
        """Rank by file descriptor."""
        for rank, path in enumerate(self._fifos):
            os.mkfifo(path)
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            self._ranks[fd] = rank
            self._epoll.register(fd, 0)  # hang-ups are always told; there is none before a writer has come

    def fileno(self) -> int:
        return self._epoll.fileno()

    def poll(self) -> None:
        for fd, _ in self._epoll.poll(0, max(1, len(self._ranks))):
            self._epoll.unregister(fd)
            os.close(fd)
            self.deaths.append(self._ranks.pop(fd))

    def close(self) -> None:
        for path in self._fifos:
            path.unlink(missing_ok=True)
        for fd in self._ranks:
            os.close(fd)
        self._epoll.close()


@dataclass(slots=True)
class _Line:
    """One connection."""

    socket: socket.socket
    rank: int | None = None
    """Whose; None until it has said so."""
    heard: bytes = b""


@dataclass
class Connections:
    """Of ranks on several hosts."""

    folder: Path
    ranks: int
    deaths: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Listen, and say where; before the ranks start. They aren't told if there are too many."""
        self._listener = socket.create_server(("", 0), backlog=socket.SOMAXCONN)
        self._listener.setblocking(False)
        self._offer = Offer(tuple(outer_addresses()), self._listener.getsockname()[1], secrets.token_hex(8))
        self._lines: dict[int, _Line] = {}
        self._epoll = select.epoll()
        self._epoll.register(self._listener, select.EPOLLIN)
        if _may_open(self.ranks + SPARE_FILES):
            (self.folder / OFFER).write_bytes(msgspec.json.encode(self._offer) + b"\n")

    def fileno(self) -> int:
        return self._epoll.fileno()

    def poll(self) -> None:
        for fd, _ in self._epoll.poll(0, len(self._lines) + 1):
            if fd == self._listener.fileno():
                self._accept()
            elif self._read(self._lines[fd]):
                self._drop(fd)

    def close(self) -> None:
        for fd in list(self._lines):
            self._drop(fd)
        self._listener.close()
        self._epoll.close()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):  # it has gone away meanwhile
            return
        connection.setblocking(False)
        self._lines[connection.fileno()] = _Line(connection)
        # By edges: whatever was told before would keep its old place in epoll's order until somebody looks again.
        self._epoll.register(connection, select.EPOLLIN | select.EPOLLET)

    def _read(self, line: _Line) -> bool:
        """Take in all that has come; whether the connection is over."""
        while True:
            try:
                data = line.socket.recv(GREETING_BYTES)
            except BlockingIOError:
                return False
            except OSError:  # the host has been started anew
                data = b""
            if not data:
                self.deaths += [] if line.rank is None else [line.rank]
                return True
            line.heard += data
            if line.rank is None and not self._greeted(line):
                return True

    def _greeted(self, line: _Line) -> bool:
        """Whether it may still be a rank of this attempt."""
        if not line.heard.endswith(b"\n"):
            return len(line.heard) < GREETING_BYTES
        line.rank = next((rank for rank in range(self.ranks) if self._offer.greeting(rank) == line.heard), None)
        if line.rank is not None:
            line.socket.send(WELCOME)
        return line.rank is not None

    def _drop(self, fd: int) -> None:
        self._epoll.unregister(fd)
        self._lines.pop(fd).socket.close()


def _may_open(wanted: int) -> bool:
    """Raise this process's limit of open files, as far as the system lets it; returns whether it is high enough."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return True
    if hard != resource.RLIM_INFINITY and hard < wanted:
        return False
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return True
