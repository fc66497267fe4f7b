"""The sample exchange: an owner keeps groups of samples, a consumer pulls the fields it needs from their owner.

    owner: a generator                                          consumer: a trainer, a scorer
    main thread ── put ──▶ GroupStore                           any thread ── pull(owner, keys) ──▶ ExchangeConsumer
                               ▲                                                                        │ tick
                          ExchangeOwner ◀───────────────── Pull(request, keys, fields) ─────────────────┤
                               ├─────── Pulled(request, header) + one buffer per large column ─────────▶│
                               │                                any thread ◀── take(request) ───────────┤
                               ◀──────────────────────── Release(keys) ──────────────────────────────── whoever knows

A group stays in the store until it is released; any number of consumers may pull it. Instead of keys, a consumer may
give a name under which it *consumes*: it gets groups that nobody has got under this name, and the owner keeps the
request for a while when there are none. A request is: queued → sent → answered → taken, or cancelled at any point; a
group that was consumed counts as consumed even so.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeVar

from headrace.comm import wire
from headrace.comm.columns import Group, pack_groups, unpack_groups
from headrace.comm.messages import Browse, Consume, Key, Message, Pull, Pulled, Release
from headrace.comm.schema import ExchangeError, Schema, plain_key
from headrace.comm.spilling import LostGroupsError
from headrace.comm.store import TRAIN, GroupStore
from headrace.comm.transport import Buffer, Received, Transport

EAGER_BYTES = 1 << 13
"""Columns smaller than this travel in the header: a copy costs less than a message of their own."""

Groups = dict[Key, Group[Key]]
_Packed = tuple[bytes, list[Buffer]]


@dataclass(frozen=True, slots=True)
class _Parked:
    """A consumer that waits for groups."""

    source: int
    consume: Consume
    until: float
    """By the courier's clock."""


class ExchangeOwner:
    """The service that hands out a store's groups."""

    handles: ClassVar[tuple[type[Message], ...]] = (Pull, Consume, Browse, Release)

    def __init__(self, transport: Transport, store: GroupStore[Any]) -> None:
        self._transport = transport
        self._store = store
        self._parked: list[_Parked] = []
        """The one that came first gets the next group."""
        self._recalling: list[tuple[int, Pull]] = []
        """Pulls of groups that are being read from the disk, with their sources."""

    def receive(self, received: Received, now: float) -> None:
        match received.message:
            case Pull() as pull:
                if not self._answer(received.source, pull):
                    self._recalling.append((received.source, pull))
            case Consume() as consume:
                self._parked.append(_Parked(received.source, consume, now + consume.patience_s))
            case Browse() as browse:
                self._reply(received.source, browse, lambda: self._names(browse.partition))
            case Release(keys):
                self._store.release(keys)

    def tick(self, now: float) -> None:
        """Answer the consumers for which there are groups by now, or that wait no longer."""
        if self._recalling:
            self._recalling = [(source, pull) for source, pull in self._recalling if not self._answer(source, pull)]
        if self._parked:
            self._parked = [parked for parked in self._parked if not self._serve(parked, now)]

    def _answer(self, consumer: int, pull: Pull) -> bool:
        """Whether the consumer has its answer."""

        def found() -> _Packed | None:
            if not self._store.recall(pull.keys):
                return None
            return self._store.pack(pull.keys, pull.fields, pull.rows, EAGER_BYTES)

        return self._reply(consumer, pull, found)

    def _serve(self, parked: _Parked, now: float) -> bool:
        """Whether the consumer has its answer."""
        consume = parked.consume

        def found() -> _Packed | None:
            groups = self._store.consume(
                consume.consumer, consume.count, consume.fields, consume.partition, consume.after
            )
            if not groups and now < parked.until:
                return None
            return pack_groups(self._store.schema, groups.values(), EAGER_BYTES)

        return self._reply(parked.source, consume, found)

    def _names(self, partition: str | None) -> _Packed:
        """The keys, on groups that are empty."""
        return pack_groups(self._store.schema, [Group(key, 0, {}, {}) for key in self._store.list(partition)])

    def _reply(self, consumer: int, question: Pull | Consume | Browse, pack: Callable[[], _Packed | None]) -> bool:
        """Send what `pack` gives, unless that is None, or say what is wrong: the consumer's mistake mustn't end the
        owner. Returns whether anything was sent."""
        schema = self._store.schema
        buffers: list[Buffer] = []
        if question.schema != schema.fingerprint:
            answer = Pulled(question.request, b"", schema=schema.encode())
        else:
            try:
                packed = pack()
            except LostGroupsError as error:
                answer = Pulled(question.request, b"", str(error), lost=error.keys)
            except ExchangeError as error:
                answer = Pulled(question.request, b"", str(error))
            else:
                if packed is None:
                    return False
                header, buffers = packed
                answer = Pulled(question.request, header)
        self._transport.send(consumer, answer, buffers)
        return True


@dataclass(slots=True)
class _Request:
    """A question and, once it has come, its answer."""

    owner: int
    message: Pull | Consume | Browse
    sent: float | None = None
    """When, by the courier's clock; None while it is queued."""
    answer: Groups | ExchangeError | None = None

    @property
    def keys(self) -> Sequence[Any]:
        return self.message.keys if isinstance(self.message, Pull) else []


class Waiting(NamedTuple):
    """A request that the owner hasn't answered."""

    owner: int
    keys: Sequence[Any]
    """Of a pull; those of other requests aren't known."""
    since: float
    """When it was sent, by the courier's clock."""


class ExchangeConsumer:
    """The service that pulls groups. Every method but `receive` and `tick` may be called by any thread."""

    handles: ClassVar[tuple[type[Message], ...]] = (Pulled,)

    def __init__(self, transport: Transport, schema: Schema) -> None:
        self._transport = transport
        self._schema = schema
        self._requests: dict[int, _Request] = {}
        self._outbox: list[tuple[int, int | Release]] = []
        """Owner, and the number of a request or a release; in order."""
        self._next = 0
        self._lock = threading.Lock()

    def pull(
        self,
        owner: int,
        keys: Iterable[Key],
        fields: Sequence[str] | None = None,
        rows: Sequence[int] | None = None,
    ) -> int:
        """Ask a rank for groups (at the next tick); returns the number under which to take them.

        Args:
            owner: the rank.
            keys: of the groups.
            fields: only these travel; None: all.
            rows: only these samples of each group, by their places; None: all.

        Raises:
            ExchangeError: this can't be asked: there is no such rank, or an argument is of another type.
        """
        names, places = _list(fields, "fields"), _list(rows, "rows")
        wanted = keys_of(keys)
        return self._ask(owner, lambda number: Pull(number, wanted, self._schema.fingerprint, names, places))

    def consume(
        self,
        owner: int,
        consumer: str,
        count: int,
        fields: Sequence[str] | None = None,
        partition: str = TRAIN,
        after: str | None = None,
        patience_s: float = 0.0,
    ) -> int:
        """Ask a rank for the oldest groups that nobody has had under a name; returns the number as `pull` does.

        Args:
            owner: the rank.
            consumer: the name.
            count: most groups.
            fields: only these travel; None: all.
            partition: of the groups.
            after: only groups that were had under this other name.
            patience_s: how long the owner waits for a group, in seconds, before it answers that there is none.
        """
        fingerprint, wanted = self._schema.fingerprint, _list(fields, "fields")
        return self._ask(
            owner, lambda number: Consume(number, consumer, count, partition, fingerprint, wanted, after, patience_s)
        )

    def browse(self, owner: int, partition: str | None = None) -> int:
        """Ask a rank for the keys of its groups, which come on empty groups. Returns the number as `pull` does."""
        return self._ask(owner, lambda number: Browse(number, self._schema.fingerprint, partition))

    def release(self, owner: int, keys: Iterable[Key]) -> None:
        """Tell a rank (at the next tick) to forget groups. Raises as `pull`."""
        message = Release(keys_of(keys))
        self._check_question(owner, message)
        with self._lock:
            self._outbox.append((owner, message))
        self._transport.wake()

    def take(self, number: int) -> Groups | None:
        """The groups of a request, once: None while they haven't come. Their columns are views of what arrived.

        Raises:
            LostGroupsError: the owner can't read them any more.
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
                        request.answer = self._read(request, received, pulled)

    def tick(self, now: float) -> None:
        """Send what was queued: only the courier may use the transport."""
        if not self._outbox:
            return
        with self._lock:
            outbox, self._outbox = self._outbox, []
            ready = [(owner, self._stamped(item, now)) for owner, item in outbox]
        for owner, message in ready:
            if message is not None:
                self._transport.send(owner, message)

    def _check_question(self, owner: int, message: Message) -> None:
        """A mistake of this rank's program mustn't end the courier, here or at the owner."""
        if not isinstance(owner, int) or not 0 <= owner < self._transport.size:
            raise ExchangeError(
                f"There is no rank {owner!r}; the exchange has the ranks 0 to {self._transport.size - 1}."
            )
        try:
            wire.check(message)
        except (TypeError, ValueError) as error:
            raise ExchangeError(f"This can't be asked of rank {owner}: {error}. It was: {message}.") from None

    def _ask(self, owner: int, message: Callable[[int], Pull | Consume | Browse]) -> int:
        self._check_question(owner, message(0))
        with self._lock:
            number = self._next
            self._next += 1
            self._requests[number] = _Request(owner, message(number))
            self._outbox.append((owner, number))
        self._transport.wake()
        return number

    def _stamped(self, item: int | Release, now: float) -> Message | None:
        """The message to send; None for a request that was cancelled."""
        if isinstance(item, Release):
            return item
        request = self._requests.get(item)
        if request is None:
            return None
        request.sent = now
        return request.message

    def _read(self, request: _Request, received: Received, pulled: Pulled) -> Groups | ExchangeError:
        """What `take` will return or raise."""
        try:
            if received.source != request.owner:
                raise ExchangeError(f"rank {received.source} answered for rank {request.owner}.")
            if pulled.schema:
                raise ExchangeError(
                    f"its schema is another than this rank's: {self._schema.difference(pulled.schema)}. "
                    "All ranks must make their exchange with the same schema."
                )
            if pulled.lost:
                return LostGroupsError(f"Rank {request.owner} has lost groups: {pulled.error}", pulled.lost)
            if pulled.error is not None:
                raise ExchangeError(pulled.error)
            groups = unpack_groups(self._schema, pulled.header, received.buffers)
            self._check(request.message, groups)
        except ExchangeError as error:
            return ExchangeError(f"Pulling samples from rank {request.owner} failed: {error}")
        return groups

    def _check(self, question: Pull | Consume | Browse, groups: Groups) -> None:
        """Make sure that the answer is what was asked for."""
        if isinstance(question, Pull) and set(groups) != set(question.keys):
            asked = self._schema.names(question.keys)
            raise ExchangeError(f"The answer holds {self._schema.names(groups) or 'nothing'}, asked for: {asked}.")
        fields = set() if isinstance(question, Browse) else set(self._schema.check_fields(question.fields))
        for group in groups.values():
            if group.fields != fields:
                raise ExchangeError(
                    f"{self._schema.name(group.key)} came with the fields {', '.join(sorted(group.fields)) or 'none'}, "
                    f"asked for: {', '.join(sorted(fields)) or 'none'}."
                )


_T = TypeVar("_T")


def keys_of(keys: Iterable[Key]) -> list[Key]:
    """The keys, each once."""
    if isinstance(keys, str) or not isinstance(keys, Iterable):
        raise ExchangeError(f"{keys!r} isn't a list of keys: give one also for a single group, as [{keys!r}].")
    each = [plain_key(key) for key in keys]
    try:
        return [*dict.fromkeys(each)]
    except TypeError as error:
        raise ExchangeError(f"{each!r} holds what can't be the key of a group: {error}.") from None


def _list(values: Iterable[_T] | None, what: str) -> list[_T] | None:
    if values is None:
        return None
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise ExchangeError(f"{values!r} isn't a list of {what}.")
    return [plain_key(value) for value in values]
