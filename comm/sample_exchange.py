"""The sample exchange by itself, for programs that are no headrace job: one object per rank.

    with Exchange(MPI.COMM_WORLD, schema) as exchange:
        exchange.put(key, samples)                                    this rank keeps them
        exchange.get(owner, keys, fields=["tokens"])                  another rank reads them
        exchange.consume(owner, "scorer", count=4)                    each group once per name
        exchange.release(owner, keys)                                 their owner forgets them

A courier thread answers the other ranks whatever this one does, until all have closed:

    close ── Bye(0) ──▶ rank 0, once it has heard all ── Bye(1) ──▶ all: nobody asks any more, the couriers end
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, ClassVar, TypeVar

from headrace.comm.columns import Group, Sample
from headrace.comm.courier import Courier
from headrace.comm.errors import WaitLimitError
from headrace.comm.exchange import ExchangeConsumer, ExchangeOwner, Groups, keys_of
from headrace.comm.messages import Bye, Key, Message
from headrace.comm.schema import ExchangeError, Field, Schema, fixed, ragged, text
from headrace.comm.service import Service
from headrace.comm.store import TRAIN, SampleStore, StoreStatistics
from headrace.comm.transport import Received, Transport

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Exchange", "ExchangeError", "Field", "Group", "Schema", "fixed", "ragged", "text"]

SILENT = "It has died, hasn't opened its exchange, or is only slow: look at the end of its output, or raise limit_s."

FULL = (
    "Groups stay until they are released: release them once all consumers have had them, from another rank or thread; "
    "or raise memory_bytes, or limit_s."
)

LOOK_S = 0.05
"""How often a waiting thread looks for what it waits for, at the least: another may have taken the news away."""

T = TypeVar("T")


class Exchange:
    """One rank's part of an exchange: the samples that it keeps, and its view of those of the others.

    Every method but `close` may be called by any thread.

    Args:
        comm: every rank of it makes an exchange, with the same schema, and closes it. It is duplicated. A thread of
            the exchange calls MPI while it is open; other calls meanwhile need `MPI_THREAD_MULTIPLE`, which mpi4py
            asks for.
        schema: what samples consist of.
        limit_s: how long an answer, or room for a group, may take, in seconds.
        memory_bytes: most that this rank keeps, in bytes of columns: `put` waits for room. None: whatever is put.

    Raises:
        ExchangeError: `memory_bytes` is less than 1.
    """

    def __init__(
        self, comm: MPI.Comm, schema: Schema, limit_s: float = 300.0, memory_bytes: float | None = None
    ) -> None:
        from headrace.comm.mpi import MpiTransport, check_threads

        check_threads()
        self._open(MpiTransport(comm.Dup()), schema, limit_s, memory_bytes)

    @classmethod
    def over(
        cls, transport: Transport, schema: Schema, limit_s: float = 300.0, memory_bytes: float | None = None
    ) -> Exchange:
        """The same over a transport that nothing else uses."""
        exchange = cls.__new__(cls)
        exchange._open(transport, schema, limit_s, memory_bytes)
        return exchange

    def _open(self, transport: Transport, schema: Schema, limit_s: float, memory_bytes: float | None) -> None:
        self.rank, self.size = transport.rank, transport.size
        self.schema = schema
        self._transport = transport
        self._limit_s = limit_s
        self._error: BaseException | None = None
        self._store = SampleStore(schema, memory_bytes)
        self._consumer = ExchangeConsumer(transport, schema)
        self._farewells = _Farewells(transport)
        services: list[Service] = [ExchangeOwner(transport, self._store), self._consumer, self._farewells]
        self._courier = Courier(transport, services, self._fail)
        self._courier.start()

    def put(self, key: Key, samples: Sample | Sequence[Sample], partition: str = TRAIN) -> None:
        """Keep one sample, or a group of them, on this rank: they are copied once, and may be changed afterwards.
        Returns when there is room beside what is kept, see `memory_bytes`; a group that is larger than all the room
        has it when nothing else is kept.

        Args:
            key: an integer, a string, or a tuple of integers; unique on this rank until it is released.
            samples: each maps the names of fields to arrays, numbers or strings.
            partition: a label to consume and list by.

        Raises:
            ExchangeError: the key is taken, or a sample doesn't fit the schema; the text names sample and field.
            WaitLimitError: there was no room within the limit; the text says what is kept and who hasn't read it.
        """
        self._check()
        group = self._store.gathered(key, samples)
        self._wait(lambda: self._store.offer(group, partition) or None, self._limit_s, lambda: self._full(group), FULL)
        self._transport.wake()

    def get(
        self,
        owner: int,
        keys: Iterable[Key],
        fields: Sequence[str] | None = None,
        rows: Sequence[int] | None = None,
    ) -> dict[Key, Group[Key]]:
        """Groups that a rank keeps.

        Args:
            owner: the rank.
            keys: of the groups.
            fields: only these are sent; None: all.
            rows: only these samples of each group are sent, by their places; None: all.

        Raises:
            ExchangeError: the owner lacks a group, or has another schema; there is no such field or sample.
            WaitLimitError: it hasn't answered within the limit.
        """
        wanted = keys_of(keys)
        asked = f"for {self.schema.names(wanted)}"
        return self._answer(owner, self._consumer.pull(owner, wanted, fields, rows), self._limit_s, asked)

    def consume(
        self,
        owner: int,
        consumer: str,
        count: int = 1,
        fields: Sequence[str] | None = None,
        partition: str = TRAIN,
        after: str | None = None,
        wait_s: float = 0.0,
    ) -> dict[Key, Group[Key]]:
        """The oldest groups of a rank that nobody has had under this name. They stay there until they are released.

        Args:
            owner: the rank.
            consumer: a name; ranks that use the same one share the groups among them.
            count: most groups.
            fields: only these are sent; None: all.
            partition: only groups of this one.
            after: only groups that this other consumer has had.
            wait_s: how long to wait if there is none, in seconds; then the result is empty.

        Raises:
            ExchangeError: `count` is less than 1, the owner has another schema, or there is no such field.
            WaitLimitError: it hasn't answered within the limit after `wait_s`.
        """
        number = self._consumer.consume(owner, consumer, count, fields, partition, after, wait_s)
        return self._answer(owner, number, self._limit_s + wait_s, f"by {consumer} for {count} groups")

    def list(self, owner: int, partition: str | None = None) -> list[Key]:
        """The keys of the groups that a rank keeps, of one partition or of all, the oldest first.

        Raises:
            ExchangeError: it has another schema.
            WaitLimitError: it hasn't answered within the limit.
        """
        return [*self._answer(owner, self._consumer.browse(owner, partition), self._limit_s, "for its groups")]

    def release(self, owner: int, keys: Iterable[Key]) -> None:
        """Tell a rank to forget groups, without waiting; what it lacks is passed over. Arrays that were got stay."""
        self._check()
        self._consumer.release(owner, keys)

    def statistics(self) -> StoreStatistics:
        """What this rank keeps."""
        return self._store.statistics()

    def close(self, limit_s: float | None = None) -> None:
        """Go on answering until every rank has called this; then end. Main thread.

        Args:
            limit_s: longest time without a message from anybody, in seconds; None: that of the exchange.

        Raises:
            WaitLimitError: the limit struck; names the ranks waited for.
        """
        limit = self._limit_s if limit_s is None else limit_s
        self._courier.submit(self._farewells.begin)
        self._wait(lambda: self._farewells.done or None, limit, self._farewells.describe, SILENT, anything=True)
        self._courier.stop(limit)

    def __enter__(self) -> Exchange:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close, unless an error is on its way: it should end the job (`python -m mpi4py`), not wait for the others."""
        if error is None:
            self.close()

    def _answer(self, owner: int, number: int, limit_s: float, asked: str) -> Groups:
        try:
            return self._wait(
                lambda: self._consumer.take(number),
                limit_s,
                lambda: f"rank {owner}, which was asked {asked}",
                SILENT,
            )
        except WaitLimitError:
            self._consumer.cancel(number)
            raise

    def _full(self, group: Group[Key]) -> str:
        """What a put waits for."""
        kept = self._store.statistics()
        unread = ", ".join(f"{count} by {consumer}" for consumer, count in kept.unread.items() if count)
        return (
            f"room for {self.schema.name(group.key)} ({group.nbytes:,} bytes) beside the {kept.groups} groups "
            f"({kept.bytes:,} bytes) that it keeps, of memory_bytes = {self._store.memory_bytes:,}; unread: "
            f"{unread or 'none by any consumer so far'}"
        )

    def _wait(
        self,
        take: Callable[[], T | None],
        limit_s: float,
        what: Callable[[], str],
        remedy: str,
        anything: bool = False,
    ) -> T:
        """What `take` gives, once it isn't None. `anything`: any message begins the limit anew."""
        news, begun = self._courier.news, time.monotonic()
        while (taken := take()) is None:
            self._check()
            if news.wait(LOOK_S):
                news.clear()
                begun = time.monotonic() if anything else begun
            if time.monotonic() - begun > limit_s:
                raise WaitLimitError(f"Rank {self.rank} waited {limit_s:g} s for {what()}. {remedy}")
        return taken

    def _check(self) -> None:
        """Raise what ended the courier."""
        if self._error is not None:
            raise self._error

    def _fail(self, error: BaseException) -> None:
        """The courier has ended. The main thread learns it at its next call; whoever looks at the output, now."""
        self._error = error
        print(f"headrace: the exchange of rank {self.rank} has ended: {error}", file=sys.stderr, flush=True)
        self._courier.news.set()


class _Farewells:
    """The service that learns when nobody asks for anything any more."""

    handles: ClassVar[tuple[type[Message], ...]] = (Bye,)

    def __init__(self, transport: Transport) -> None:
        self.done = False
        self._transport = transport
        self._open = set(range(transport.size))
        """At rank 0: who hasn't closed."""

    def begin(self) -> None:
        """This rank asks for nothing any more. In the courier."""
        self._transport.send(0, Bye(0))

    def describe(self) -> str:
        """Whom `done` waits for."""
        if self._transport.rank == 0:
            return f"ranks {sorted(self._open)} to close their exchange"
        return "rank 0 to say that all ranks have closed their exchange"

    def receive(self, received: Received, now: float) -> None:
        match received.message:
            case Bye(stage=0):
                self._open.discard(received.source)
                if not self._open:
                    for rank in range(self._transport.size):
                        self._transport.send(rank, Bye(1))
            case Bye():
                self.done = True

    def tick(self, now: float) -> None:
        """Nothing happens by itself."""
