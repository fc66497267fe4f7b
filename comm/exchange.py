"""The sample exchange: a generator keeps its finished groups, a trainer pulls the fields it needs from their owner.

    generator                                                   trainer
    main thread ── put ──▶ SampleStore                          any thread ── pull(owner, keys) ──▶ ExchangeConsumer
                               ▲                                                                        │ tick
                          ExchangeOwner ◀──────────────── Pull(request, tickets, fields) ───────────────┤
                               ├───────────── Pulled(request, header) + one buffer per column ─────────▶│
                               │                                any thread ◀── take(request) ───────────┤
                               ◀──────────────────────── Release(tickets) ────────────────────────────── whoever knows

A group stays in the store until it is released; any number of consumers may pull it. A request is: queued → sent →
answered → taken, or cancelled at any point.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from headrace.comm.columns import (
    ExchangeError,
    Group,
    GroupKey,
    make_group,
    pack_groups,
    select,
    trajectories_of,
    unpack_groups,
)
from headrace.comm.messages import Message, Pull, Pulled, Release
from headrace.comm.trajectory import Trajectory
from headrace.comm.transport import Buffer, Received, Transport


class StoreStatistics(NamedTuple):
    """What a store holds, and has held."""

    groups: int
    samples: int
    bytes: int
    """Of the columns of the groups held now."""
    peak_bytes: int


class SampleStore:
    """The finished groups of one rank. Every method may be called by any thread."""

    def __init__(self) -> None:
        self.on_put: Callable[[Group], None] = lambda group: None
        """Called with every group that is put, by the thread that puts it."""
        self._groups: dict[GroupKey, Group] = {}
        self._bytes = 0
        self._peak_bytes = 0
        self._lock = threading.Lock()

    def put(self, ticket: int, attempt: int, trajectories: Sequence[Trajectory]) -> None:
        """Keep the samples of one group, copied into contiguous columns.

        Raises:
            ExchangeError: the group is there already, or a sample doesn't fit the schema or the group.
        """
        group = make_group(ticket, attempt, trajectories)
        with self._lock:
            if group.key in self._groups:
                raise ExchangeError(f"Ticket {ticket}, attempt {attempt}, is in the store already.")
            self._groups[group.key] = group
            self._bytes += group.nbytes
            self._peak_bytes = max(self._peak_bytes, self._bytes)
        self.on_put(group)

    def get(self, keys: Iterable[GroupKey], fields: Sequence[str] | None = None) -> dict[GroupKey, list[Trajectory]]:
        """The samples of groups; their columns are read-only views. A field that wasn't asked for is empty.

        Raises:
            ExchangeError: a group isn't here, or there is no such field.
        """
        return {group.key: trajectories_of(group) for group in self._select(keys, fields)}

    def pack(self, keys: Iterable[GroupKey], fields: Sequence[str] | None = None) -> tuple[bytes, list[Buffer]]:
        """The same for the wire: header and buffers, which stay valid after a release.

        Raises:
            ExchangeError: as `get`.
        """
        return pack_groups(self._select(keys, fields))

    def list(self) -> list[GroupKey]:
        """The groups held, in the order in which they were put."""
        with self._lock:
            return [*self._groups]

    def release(self, keys: Iterable[GroupKey]) -> None:
        """Forget groups. Those that aren't here are passed over: a release may come twice, or for a lost attempt."""
        with self._lock:
            for key in keys:
                group = self._groups.pop(key, None)
                self._bytes -= group.nbytes if group is not None else 0

    def statistics(self) -> StoreStatistics:
        with self._lock:
            samples = sum(len(group.samples) for group in self._groups.values())
            return StoreStatistics(len(self._groups), samples, self._bytes, self._peak_bytes)

    def _select(self, keys: Iterable[GroupKey], fields: Sequence[str] | None) -> Sequence[Group]:
        wanted = [*dict.fromkeys(keys)]
        with self._lock:
            missing = [key for key in wanted if key not in self._groups]
            groups = [self._groups[key] for key in wanted if key in self._groups]
        if missing:
            names = ", ".join(f"ticket {ticket} attempt {attempt}" for ticket, attempt in missing)
            raise ExchangeError(f"Not in the store (never put, or released already): {names}.")
        return [select(group, fields) for group in groups]


class ExchangeOwner:
    """The service that hands out a store's groups."""

    handles: ClassVar[tuple[type[Message], ...]] = (Pull, Release)

    def __init__(self, transport: Transport, store: SampleStore) -> None:
        self._transport = transport
        self._store = store

    def receive(self, received: Received, now: float) -> None:
        match received.message:
            case Pull() as pull:
                self._answer(received.source, pull)
            case Release(tickets):
                self._store.release(tickets)

    def tick(self, now: float) -> None:
        """Nothing happens by itself."""

    def _answer(self, consumer: int, pull: Pull) -> None:
        """Send the groups, or say what is wrong: the consumer's mistake mustn't end the owner."""
        try:
            header, buffers = self._store.pack(pull.tickets, pull.fields)
        except ExchangeError as error:
            self._transport.send(consumer, Pulled(pull.request, b"", str(error)))
        else:
            self._transport.send(consumer, Pulled(pull.request, header), buffers)


@dataclass(slots=True)
class _Request:
    """A pull and, once it has come, its answer."""

    owner: int
    keys: list[GroupKey]
    fields: list[str] | None
    sent: float | None = None
    """When, by the courier's clock; None while it is queued."""
    answer: dict[GroupKey, list[Trajectory]] | ExchangeError | None = None


class Waiting(NamedTuple):
    """A pull that the owner hasn't answered."""

    owner: int
    keys: list[GroupKey]
    since: float
    """When it was sent, by the courier's clock."""


class ExchangeConsumer:
    """The service that pulls groups. `pull`, `take`, `cancel` and `waiting` may be called by any thread."""

    handles: ClassVar[tuple[type[Message], ...]] = (Pulled,)

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._requests: dict[int, _Request] = {}
        self._queued: list[int] = []
        self._next = 0
        self._lock = threading.Lock()

    def pull(self, owner: int, keys: Iterable[GroupKey], fields: Sequence[str] | None = None) -> int:
        """Ask a rank for groups (at the next tick); returns the number under which to take them."""
        request = _Request(owner, [*dict.fromkeys(keys)], None if fields is None else [*fields])
        with self._lock:
            number = self._next
            self._next += 1
            self._requests[number] = request
            self._queued.append(number)
        return number

    def take(self, number: int) -> dict[GroupKey, list[Trajectory]] | None:
        """The groups of a request, once: None while they haven't come. Their columns are views of what arrived.

        Raises:
            ExchangeError: the owner refused, or what it sent can't be used.
            KeyError: there is no such request, or it was taken or cancelled.
        """
        with self._lock:
            answer = self._requests[number].answer
            if answer is not None:
                del self._requests[number]
        if isinstance(answer, ExchangeError):
            raise answer
        return answer

    def cancel(self, number: int) -> None:
        """Forget a request, for instance because its owner died; an answer that still comes is dropped."""
        with self._lock:
            self._requests.pop(number, None)

    def waiting(self) -> list[Waiting]:
        """The requests that were sent and not answered."""
        with self._lock:
            return [
                Waiting(item.owner, item.keys, item.sent)
                for item in self._requests.values()
                if item.sent is not None and item.answer is None
            ]

    def receive(self, received: Received, now: float) -> None:
        match received.message:
            case Pulled(request=number) as pulled:
                with self._lock:
                    request = self._requests.get(number)
                    if request is not None:
                        request.answer = _read(received.source, request, pulled, received.buffers)

    def tick(self, now: float) -> None:
        """Send what was queued: only the courier may use the transport."""
        with self._lock:
            queued = [(number, self._requests[number]) for number in self._queued if number in self._requests]
            self._queued.clear()
            for _, request in queued:
                request.sent = now
        for number, request in queued:
            self._transport.send(request.owner, Pull(number, request.keys, request.fields))


def _read(
    source: int, request: _Request, pulled: Pulled, buffers: Sequence[Buffer]
) -> dict[GroupKey, list[Trajectory]] | ExchangeError:
    """What `take` will return or raise."""
    try:
        if source != request.owner:
            raise ExchangeError(f"rank {source} answered for rank {request.owner}.")
        if pulled.error is not None:
            raise ExchangeError(pulled.error)
        groups = unpack_groups(pulled.header, buffers)
        if set(groups) != set(request.keys):
            raise ExchangeError(f"The answer holds the groups {sorted(groups)}, asked for were {sorted(request.keys)}.")
    except ExchangeError as error:
        return ExchangeError(f"Pulling samples from rank {request.owner} failed: {error}")
    return groups
