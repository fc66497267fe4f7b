"""The groups that one rank keeps for others, until they are released.

put ──▶ held, in a partition ── read by key, as often as anybody likes
                │            └─ consumed: once by every name that consumes
                └── release ──▶ forgotten
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from itertools import islice, takewhile
from typing import Generic, NamedTuple

from headrace.comm.buffers import BufferPool
from headrace.comm.columns import Group, K, Sample, gather, pack_groups, select
from headrace.comm.messages import Key
from headrace.comm.schema import ExchangeError, Schema, plain_key
from headrace.comm.transport import Buffer

TRAIN = "train"
"""The partition where none is named."""


class StoreStatistics(NamedTuple):
    """What a store holds, and has held."""

    groups: int
    samples: int
    bytes: int
    """Of the columns of the groups held now."""
    peak_bytes: int
    partitions: dict[str, int]
    """Groups held in each."""
    unread: dict[str, int]
    """Groups held that each consumer hasn't had, in the partitions that it has asked for."""


class GroupStore(Generic[K]):
    """Groups of one schema. Every method may be called by any thread.

    Args:
        schema: of the groups.
        memory_bytes: `offer` keeps no more than this, in bytes of columns; None: as much as comes.

    Raises:
        ExchangeError: `memory_bytes` is less than 1.
    """

    def __init__(self, schema: Schema, memory_bytes: float | None = None) -> None:
        if memory_bytes is not None and memory_bytes < 1:
            raise ExchangeError(f"memory_bytes is {memory_bytes:g}: nothing could be kept. Give some, or None.")
        self.schema = schema
        self.memory_bytes = memory_bytes
        self.on_put: Callable[[Group[K]], None] = lambda group: None
        """Called with every group that is put, by the thread that puts it."""
        self._groups: dict[K, Group[K]] = {}
        self._partitions: dict[str, dict[K, None]] = {}
        """The keys of each, in the order in which they were put."""
        self._unread: dict[tuple[str, str], dict[K, None]] = {}
        """By consumer and partition, in the same order."""
        self._bytes = 0
        self._peak_bytes = 0
        self._lock = threading.Lock()
        self._pool = BufferPool()
        self._pool_lock = threading.Lock()

    def room(self, nbytes: int) -> Buffer:
        """Memory for a column, used again once the group is released and nobody reads it any more."""
        with self._pool_lock:
            return self._pool.take(nbytes)

    def add(self, group: Group[K], partition: str = TRAIN) -> None:
        """Keep a group that was made by `columns.gather` with the store's schema.

        Raises:
            ExchangeError: its key is there already.
        """
        with self._lock:
            self._check_new(group)
            self._keep(group, partition)
        self.on_put(group)

    def offer(self, group: Group[K], partition: str = TRAIN) -> bool:
        """`add`, if there is room for the group beside what is kept; one that is larger than all the room has it when
        nothing else is kept. Returns whether it was.

        Raises:
            ExchangeError: its key is there already.
        """
        with self._lock:
            self._check_new(group)
            full = self.memory_bytes is not None and self._bytes + group.nbytes > self.memory_bytes
            if full and self._groups:
                return False
            self._keep(group, partition)
        self.on_put(group)
        return True

    def select(
        self, keys: Iterable[K], fields: Iterable[str] | None = None, rows: Sequence[int] | None = None
    ) -> dict[K, Group[K]]:
        """Groups, with these fields and these samples of each only (None: all). Their columns are read-only.

        Raises:
            ExchangeError: a group isn't here, or there is no such field or sample.
        """
        wanted = [*dict.fromkeys(keys)]
        with self._lock:
            missing = [key for key in wanted if key not in self._groups]
            if missing:
                raise ExchangeError(f"Not in the store (never put, or released already): {self.schema.names(missing)}.")
            groups = [self._held(key) for key in wanted]
        return {group.key: select(self.schema, group, fields, rows) for group in groups}

    def pack(
        self,
        keys: Iterable[K],
        fields: Iterable[str] | None = None,
        rows: Sequence[int] | None = None,
        eager_bytes: int = 0,
    ) -> tuple[bytes, list[Buffer]]:
        """What `select` finds, for the wire: header and buffers, which stay valid after a release. See `pack_groups`.

        Raises:
            ExchangeError: as `select`.
        """
        return pack_groups(self.schema, self.select(keys, fields, rows).values(), eager_bytes)

    def recall(self, keys: Iterable[K]) -> bool:
        """Whether `select` can have these groups at once; if not, they are being fetched, and it can later."""
        return True

    def consume(
        self,
        consumer: str,
        count: int,
        fields: Iterable[str] | None = None,
        partition: str = TRAIN,
        after: str | None = None,
    ) -> dict[K, Group[K]]:
        """The oldest groups of a partition, at most `count`, that this consumer hasn't had. They stay until released.

        Args:
            consumer: any name.
            count: at least 1.
            fields: None: all.
            partition: of the groups.
            after: only groups that this other consumer has had.

        Raises:
            ExchangeError: `count` is less than 1, or there is no such field.
        """
        if count < 1:
            raise ExchangeError(f"Consumer {consumer} asked for {count} groups; it takes at least 1.")
        wanted = self.schema.check_fields(fields)
        with self._lock:
            unread = self._unread_by(consumer, partition)
            # Everybody reads in the order of putting, so what the other has had comes before what it hasn't.
            held_back: dict[K, None] = {} if after is None else self._unread_by(after, partition)
            keys = [*islice(takewhile(lambda key: key not in held_back, unread), count)]
            groups = [self._groups[key] for key in keys]
            for key in keys:
                del unread[key]
        return {group.key: select(self.schema, group, wanted, None) for group in groups}

    def list(self, partition: str | None = None) -> list[K]:
        """The groups held, of one partition or of all, in the order in which they were put."""
        with self._lock:
            return [*self._groups] if partition is None else [*self._partitions.get(partition, {})]

    def release(self, keys: Iterable[K]) -> None:
        """Forget groups. Those that aren't here are passed over: a release may come twice, or for a lost attempt."""
        with self._lock:
            for key in keys:
                self._forget(key)

    def statistics(self) -> StoreStatistics:
        with self._lock:
            samples = sum(group.samples for group in self._groups.values())
            unread: dict[str, int] = {}
            for (consumer, _), keys in self._unread.items():
                unread[consumer] = unread.get(consumer, 0) + len(keys)
            partitions = {name: len(keys) for name, keys in self._partitions.items() if keys}
            return StoreStatistics(len(self._groups), samples, self._bytes, self._peak_bytes, partitions, unread)

    def _check_new(self, group: Group[K]) -> None:
        if group.key in self._groups:
            raise ExchangeError(
                f"{self.schema.name(group.key)} is in the store already; release it before another is put."
            )

    def _keep(self, group: Group[K], partition: str) -> None:
        self._groups[group.key] = group
        self._partitions.setdefault(partition, {})[group.key] = None
        for (_, read), unread in self._unread.items():
            if read == partition:
                unread[group.key] = None
        self._bytes += group.nbytes
        self._peak_bytes = max(self._peak_bytes, self._bytes)

    def _held(self, key: K) -> Group[K]:
        return self._groups[key]

    def _forget(self, key: K) -> int:
        """Returns the bytes that it had in memory."""
        group = self._groups.pop(key, None)
        if group is None:
            return 0
        self._bytes -= group.nbytes
        for each in (*self._partitions.values(), *self._unread.values()):
            each.pop(key, None)
        return group.nbytes

    def _unread_by(self, consumer: str, partition: str) -> dict[K, None]:
        if (consumer, partition) not in self._unread:
            self._unread[consumer, partition] = dict(self._partitions.get(partition, {}))
        return self._unread[consumer, partition]


class SampleStore(GroupStore[Key]):
    """A store of samples of any schema."""

    def put(self, key: Key, samples: Sample | Sequence[Sample], partition: str = TRAIN) -> None:
        """Keep one sample, or a group of them, copied into contiguous columns.

        Raises:
            ExchangeError: the key is taken, or a sample doesn't fit the schema.
        """
        self.add(self.gathered(key, samples), partition)

    def gathered(self, key: Key, samples: Sample | Sequence[Sample]) -> Group[Key]:
        """The group that `put` would keep.

        Raises:
            ExchangeError: a sample doesn't fit the schema.
        """
        each = samples if isinstance(samples, Sequence) else [samples]
        return gather(self.schema, plain_key(key), each, self.room)

    def get(
        self, keys: Iterable[Key], fields: Iterable[str] | None = None, rows: Sequence[int] | None = None
    ) -> dict[Key, Group[Key]]:
        """See `select`."""
        return self.select(keys, fields, rows)
