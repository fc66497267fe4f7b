"""Memory for what arrives, used again once nobody looks at it any more.

Fresh memory costs more than the transfer into it: the kernel zeroes it page by page at the first touch, several times
slower than a copy. So large buffers come from a pool:

    idle ── take ──▶ in use: a `_Lease`, base of the array and of every view of it ── the last view is gone ──▶ idle
      └──▶ freed, those of the size asked for longest ago first, when there would be more memory in all than was ever
           in use at once
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Any

import numpy as np

from headrace.comm.transport import Buffer

SMALLEST = 1 << 16
"""Bytes; for less, `malloc` has warm memory of its own."""


class BufferPool:
    """Hands out uninitialised buffers. `take` belongs to one thread; the views may be dropped by any."""

    def __init__(self) -> None:
        self.used_bytes = 0
        """In use, as of the last `take`; buffers under `SMALLEST` aren't counted."""
        self.idle_bytes = 0
        self.peak_bytes = 0
        """Most that was in use at once."""
        self._idle: OrderedDict[int, list[Buffer]] = OrderedDict()
        """By capacity, the one that was asked for longest ago first."""
        self._given_back: deque[Buffer] = deque()
        """A lease may end in the middle of anything, `take` included: it only appends here, which needs no lock."""

    def take(self, nbytes: int) -> Buffer:
        """A writable buffer of `nbytes`; its contents are undefined."""
        if nbytes < SMALLEST:
            return np.empty(nbytes, np.uint8)
        self._collect()
        capacity = _capacity(nbytes)
        slab = self._find(capacity)
        self.used_bytes += capacity
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        self._free(self.used_bytes + self.idle_bytes - self.peak_bytes)
        return np.asarray(_Lease(np.empty(capacity, np.uint8) if slab is None else slab, nbytes, self._given_back))

    def _collect(self) -> None:
        while self._given_back:
            slab = self._given_back.popleft()
            self._idle.setdefault(slab.nbytes, []).append(slab)
            self.idle_bytes += slab.nbytes
            self.used_bytes -= slab.nbytes

    def _find(self, capacity: int) -> Buffer | None:
        slabs = self._idle.setdefault(capacity, [])
        self._idle.move_to_end(capacity)
        if not slabs:
            return None
        self.idle_bytes -= capacity
        return slabs.pop()

    def _free(self, nbytes: int) -> None:
        """Let go of so many idle bytes, or a little more."""
        while nbytes > 0:
            capacity, slabs = next(iter(self._idle.items()))
            if slabs:
                slabs.pop()
                self.idle_bytes -= capacity
                nbytes -= capacity
            else:
                del self._idle[capacity]


class _Lease:
    """Base of an array over the first bytes of a slab; numpy keeps it alive as long as any view of that array."""

    def __init__(self, slab: Buffer, nbytes: int, given_back: deque[Buffer]) -> None:
        self._slab, self._given_back = slab, given_back
        self.__array_interface__: dict[str, Any] = slab[:nbytes].__array_interface__

    def __del__(self) -> None:
        self._given_back.append(self._slab)


def _capacity(nbytes: int) -> int:
    """Rounded up by at most an eighth, so that buffers of nearly equal sizes can replace each other."""
    unit = 1 << (nbytes.bit_length() - 4)
    return -(-nbytes // unit) * unit
