"""A service is what the courier thread runs: it gets messages of its types, and a tick now and then."""

from __future__ import annotations

from typing import ClassVar, Protocol

from headrace.comm.messages import Message
from headrace.comm.transport import Received


class Service(Protocol):
    """One part of a rank's protocol. All methods are called by the courier thread only."""

    handles: ClassVar[tuple[type[Message], ...]]
    """The message types that come to this service; no two services of a rank share one."""

    def receive(self, received: Received, now: float) -> None:
        """Take one message. `now` is the courier's clock, in seconds."""
        ...

    def tick(self, now: float) -> None:
        """Called after every poll of the network: every few tens of ms at the most while the courier runs, unless a
        service keeps it longer."""
        ...
