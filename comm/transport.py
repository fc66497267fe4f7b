"""What the protocol needs of a network. `comm.mpi` and `comm.simulated` are the two that exist.

A transport is used by one thread only (the courier). Messages between one pair of ranks arrive in the order in which
they were sent; nothing is promised between different pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from headrace.comm.messages import Message

Buffer = npt.NDArray[np.uint8]
"""Bulk data: one-dimensional, contiguous, bytes."""


@dataclass(slots=True)
class Received:
    """One message that has arrived whole, its buffers included."""

    source: int
    message: Message
    buffers: list[Buffer] = field(default_factory=list)


Placer = Callable[[int, Message, list[int]], Sequence[Buffer]]
"""(source, message, sizes of its buffers in bytes) → memory of these sizes that they are to arrive in."""


def nobody() -> None:
    """`wake` of a transport that nobody naps over."""


class Transport(Protocol):
    """Point-to-point messages between the ranks of one job."""

    wake: Callable[[], None]
    """Ends the nap of the thread that polls; for services that were given something to send by another thread."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def send(self, target: int, message: Message, buffers: Sequence[Buffer] = ()) -> None:
        """Send without waiting. The buffers must not change until `pending` no longer counts this message."""
        ...

    def place(self, kind: type[Message], placer: Placer) -> None:
        """Have the buffers of such messages arrive in memory of the receiver's choice, so that nobody has to copy them
        there. `poll` calls the placer once per message, before its buffers arrive, in the order of each source."""
        ...

    def poll(self) -> list[Received]:
        """Drive all transfers; return what has arrived whole since the last call. Never blocks."""
        ...

    @property
    def pending(self) -> int:
        """How many messages haven't left, or have begun to arrive and aren't whole: polling soon takes them further."""
        ...

    def close(self) -> None:
        """Finish what is pending, within a limit; then release the network."""
        ...
