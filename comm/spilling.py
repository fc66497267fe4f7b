"""A store whose groups may lie on the disk instead, so that they take no more memory than they may.

    add ──▶ in memory, being written ── let_go(written) ──▶ in memory and on the disk ── over half the memory ─┐
                 └── let_go(not written): the disk is full ──▶ in memory for good                               ▼
                                                             select ◀── read ◀── recall: a thread reads ── spilled
    release: forgotten, wherever it is

Whoever writes groups to the disk, as the archive does, is told of by `spill_to`. What is needed last is spilled first:
the newest group. A store that can't spill only counts; to make no more groups is its owner's part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from headrace.comm.columns import Group, K
from headrace.comm.messages import Key
from headrace.comm.schema import ExchangeError, Schema
from headrace.comm.store import TRAIN, GroupStore


class LostGroupsError(ExchangeError):
    """Groups that were spilled can't be read any more."""

    def __init__(self, text: str, keys: Sequence[Key]) -> None:
        super().__init__(text)
        self.keys = keys
        """Some of them, at least."""


class MemoryUse(NamedTuple):
    """What a store has in memory."""

    groups: int
    """That aren't released."""
    bytes: int
    """Of their columns, and of those of released groups that are still being written. (Groups that were read back for
    a consumer aren't counted: they go as soon as they are sent.)"""
    spilled: int
    """Groups that were spilled so far."""


class SpillingStore(GroupStore[K]):
    """See the module's docstring. `memory_bytes`: over half of it, groups are spilled, if they can be."""

    def __init__(self, schema: Schema, memory_bytes: float | None = None) -> None:
        super().__init__(schema, memory_bytes)
        self._half = math.inf if memory_bytes is None else memory_bytes / 2
        self._write: Callable[[Group[K]], None] | None = None
        self._hurry: Callable[[], None] = lambda: None
        self._read: Callable[[K], Group[K]]
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="recall")
        self._writing: dict[K, int] = {}
        """Groups that their writer refers to, and their bytes."""
        self._written: dict[K, None] = {}
        """Those in memory that are on the disk, in the order in which they got there."""
        self._spilled: set[K] = set()
        """In `_groups` they are without fields."""
        self._reading: dict[K, Future[Group[K]]] = {}
        """Spilled groups that somebody waits for."""
        self._spills = 0

    def spill_to(
        self, write: Callable[[Group[K]], None], hurry: Callable[[], None], read: Callable[[K], Group[K]]
    ) -> None:
        """From now on groups can be spilled.

        Args:
            write: takes every group that is put from now on; answered by `let_go`.
            hurry: asks for what is being written to be on the disk soon.
            read: gives a group that was written. A thread of the store's calls it. Raises `LostGroupsError`.
        """
        self._write, self._hurry, self._read = write, hurry, read
        self.on_put = self._begin_writing

    def let_go(self, keys: Iterable[K], written: bool) -> None:
        """The writer doesn't refer to these groups any more; `written`: they are on the disk for good."""
        with self._lock:
            for key in keys:
                nbytes = self._writing.pop(key, 0)
                if key not in self._groups:
                    self._bytes -= nbytes
                elif written:
                    self._written[key] = None
            self._spill()

    def recall(self, keys: Iterable[K]) -> bool:
        """Have the spilled ones among these groups read. Returns whether `select` will find them all, or know that they
        are lost."""
        with self._lock:
            away = [key for key in keys if key in self._spilled]
            for key in away:
                if key not in self._reading:
                    self._reading[key] = self._reader.submit(self._read, key)
            return all(self._reading[key].done() for key in away)

    def consume(
        self,
        consumer: str,
        count: int,
        fields: Iterable[str] | None = None,
        partition: str = TRAIN,
        after: str | None = None,
    ) -> dict[K, Group[K]]:
        """Not here.

        Raises:
            ExchangeError: always.
        """
        raise ExchangeError("Groups of a store that spills are read by key; they can't be consumed by name.")

    def memory_use(self) -> MemoryUse:
        with self._lock:
            return MemoryUse(len(self._groups) - len(self._spilled), self._bytes, self._spills)

    def _begin_writing(self, group: Group[K]) -> None:
        assert self._write is not None
        with self._lock:
            self._writing[group.key] = group.nbytes
            self._spill()
            crowded = self._bytes > self._half
        self._write(group)
        if crowded:
            self._hurry()

    def _spill(self) -> None:
        while self._bytes > self._half and self._written:
            key, _ = self._written.popitem()
            group = self._groups[key]
            self._groups[key] = Group(key, group.samples, {}, {})
            self._bytes -= group.nbytes
            self._spilled.add(key)
            self._spills += 1

    def _held(self, key: K) -> Group[K]:
        if key not in self._spilled:
            return super()._held(key)
        if key not in self._reading:
            raise ExchangeError(f"{self.schema.name(key)} is on the disk and wasn't recalled.")
        return self._reading.pop(key).result()

    def _forget(self, key: K) -> int:
        nbytes = super()._forget(key)
        if nbytes and key in self._writing:
            self._bytes += nbytes  # until its writer lets go of it
        self._written.pop(key, None)
        self._spilled.discard(key)
        self._reading.pop(key, None)
        return nbytes
