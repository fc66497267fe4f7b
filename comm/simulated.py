"""A network inside one process, with a virtual clock: the real wire format, and one run for one seed.

    transport(a).send ──▶ encode ──▶ in flight, until its arrival time ──▶ transport(b).poll ──▶ decode
                                     (the caller moves `now` by `advance`)

Thousands of ranks, arbitrary delays between pairs and faults are cheap here, so the protocol is tested on it. Without
a delay a message is there at once and nobody needs to move the clock: so run all ranks of `headrace debug`.
"""

from __future__ import annotations

import heapq
import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from headrace.comm import wire
from headrace.comm.messages import Message
from headrace.comm.transport import Buffer, Placer, Received, nobody

Delay = Callable[[int, int, random.Random], float]
"""(source, target, the network's random numbers) → seconds until one message arrives."""


def no_delay(source: int, target: int, rng: random.Random) -> float:
    return 0.0


class _Flight(NamedTuple):
    """One message under way; compared by arrival, then by the order of sending."""

    arrival: float
    number: int
    source: int
    target: int
    frame: bytes
    buffers: list[Buffer]


class SimulatedNetwork:
    """All ranks of a job in one process. Safe for transports in several threads.

    Args:
        size: number of ranks.
        seed: of the random numbers that `delay` gets.
        delay: of each message. Those of one pair keep their order all the same: none overtakes an earlier one.
    """

    def __init__(self, size: int, seed: int = 0, delay: Delay = no_delay) -> None:
        self.size = size
        self.now = 0.0
        """The virtual clock, in seconds."""
        self._rng = random.Random(seed)
        self._delay = delay
        self._sent = 0
        self._flights: list[_Flight] = []
        self._inboxes: list[deque[_Flight]] = [deque() for _ in range(size)]
        self._last_arrival: dict[tuple[int, int], float] = {}
        self._dead: set[int] = set()
        self._silent_until: dict[int, float] = {}
        self._lock = threading.Lock()

    def transport(self, rank: int) -> SimulatedTransport:
        """The transport of one rank."""
        return SimulatedTransport(self, self._checked(rank))

    def advance(self, seconds: float) -> None:
        """Move the clock; what becomes due is there at the next `poll` of its target."""
        with self._lock:
            self.now += seconds

    def advance_to(self, time: float) -> None:
        """Move the clock forward to `time`, exactly; a time in the past changes nothing."""
        with self._lock:
            self.now = max(self.now, time)

    def next_event_time(self) -> float | None:
        """When the next message arrives: `now` if one waits to be polled, None if none is under way."""
        with self._lock:
            self._settle()
            if any(self._inboxes):
                return self.now
            return self._flights[0].arrival if self._flights else None

    def kill(self, rank: int) -> None:
        """The rank is gone for good: what is under way from it or to it vanishes, and it polls nothing any more."""
        with self._lock:
            self._settle()
            self._dead.add(self._checked(rank))
            self._inboxes[rank].clear()

    def silence(self, rank: int, until: float) -> None:
        """Nothing passes to or from the rank before the clock shows `until`; then everything arrives, in order."""
        with self._lock:
            self._settle()
            self._silent_until[self._checked(rank)] = until
            for flight in self._inboxes[rank]:
                heapq.heappush(self._flights, flight)
            self._inboxes[rank].clear()

    def _send(self, source: int, target: int, frame: bytes, buffers: Sequence[Buffer]) -> None:
        pair = (source, self._checked(target))
        with self._lock:
            due = self.now + self._delay(source, target, self._rng)
            arrival = max(due, self._last_arrival.get(pair, 0.0))
            self._last_arrival[pair] = arrival
            flight = _Flight(arrival, self._sent, source, target, frame, [buffer.copy() for buffer in buffers])
            self._sent += 1
            heapq.heappush(self._flights, flight)

    def _take(self, rank: int) -> list[_Flight]:
        with self._lock:
            self._settle()
            taken = list(self._inboxes[rank])
            self._inboxes[rank].clear()
            return taken

    def _settle(self) -> None:
        """Move what is due into the inboxes; what a fault holds back is put off, what it swallows is dropped."""
        while self._flights and self._flights[0].arrival <= self.now:
            flight = heapq.heappop(self._flights)
            held_until = max(self._silent_until.get(rank, 0.0) for rank in (flight.source, flight.target))
            if flight.source in self._dead or flight.target in self._dead:
                continue
            if held_until > self.now:
                heapq.heappush(self._flights, flight._replace(arrival=held_until))
            else:
                self._inboxes[flight.target].append(flight)

    def _checked(self, rank: int) -> int:
        if not 0 <= rank < self.size:
            raise ValueError(f"there is no rank {rank} in a network of {self.size}")
        return rank


class SimulatedTransport:
    """A `Transport` on a `SimulatedNetwork`. Buffers are copied when sent, so nothing is ever pending."""

    pending = 0

    def __init__(self, network: SimulatedNetwork, rank: int) -> None:
        self.wake: Callable[[], None] = nobody
        """See `Transport.wake`."""
        self.rank = rank
        self.size = network.size
        self._network = network
        self._placers: dict[type[Message], Placer] = {}

    def place(self, kind: type[Message], placer: Placer) -> None:
        """See `Transport.place`."""
        self._placers[kind] = placer

    def send(self, target: int, message: Message, buffers: Sequence[Buffer] = ()) -> None:
        """Send without waiting; see `Transport.send`."""
        self._network._send(self.rank, target, wire.encode(message, wire.sizes_of(buffers)), buffers)

    def poll(self) -> list[Received]:
        """What has arrived by now; nothing for a rank that is dead or silent.

        Raises:
            WireError: a frame can't be read.
        """
        return [self._received(flight) for flight in self._network._take(self.rank)]

    def close(self) -> None:
        """Nothing is pending, so there is nothing to finish."""

    def _received(self, flight: _Flight) -> Received:
        message, sizes = wire.decode(flight.frame, flight.source)
        if sizes != [buffer.nbytes for buffer in flight.buffers]:
            raise wire.WireError(f"Rank {flight.source} sent buffers of other sizes than its header names.")
        placer = self._placers.get(type(message))
        if placer is None:
            return Received(flight.source, message, flight.buffers)
        places = wire.checked_places(placer(flight.source, message, sizes), sizes, flight.source)
        for place, buffer in zip(places, flight.buffers, strict=True):
            place[:] = buffer
        return Received(flight.source, message, places)
