"""Memory that the processes of one node share, of which no name and no file can be left behind.

    one rank:    SharedSlab.room ─▶ memfd (no name in any folder) ─▶ mapped, read and write
                          └─ segment ─▶ by a message ─┐
    the others:           map_segment(segment) ◀──────┘  /proc/PID/fd/N opened ─▶ mapped, read only

Why not a shared window of MPI: to allocate one is a collective call that blocks, and how large it must be is known only
with the first version, when the courier makes all MPI calls and must not block; and a window doesn't survive the death
of a rank, as `launch.repair` does. Why not `/dev/shm`: containers often have 64 MiB there, and its files have to be
unlinked by somebody. A memfd is freed by the kernel when the last process that maps it has ended, however it ended.

What it needs: processes of one user that see each other in /proc, thus no container of its own for each of them.
"""

from __future__ import annotations

import errno
import mmap
import os
import secrets
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.comm.transport import Buffer
from headrace.comm.weights import Slab


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of shared memory, as its owner tells others of it."""

    pid: int
    descriptor: int
    """Of the owner's; -1 where there are no bytes."""
    name: str
    """Random, so that nobody maps another process's memory for it."""
    nbytes: int


class SharedSlab(Slab):
    """A slab that other processes of the node can map."""

    def __init__(self) -> None:
        super().__init__()
        self._name = f"headrace-{secrets.token_hex(8)}"
        self._descriptor = -1
        self._close: Callable[[], object] = lambda: None

    @property
    def segment(self) -> Segment:
        """What others need to map all of it. It is another one once the slab has had to grow."""
        return Segment(os.getpid(), self._descriptor, self._name, self._memory.size)

    def _allocate(self, nbytes: int) -> Buffer:
        self._close()
        self._descriptor = os.memfd_create(self._name)
        self._close = weakref.finalize(self, os.close, self._descriptor)
        os.ftruncate(self._descriptor, nbytes)
        return np.frombuffer(mmap.mmap(self._descriptor, nbytes), np.uint8)


class _ReadOnly:
    """Base of an array over memory that can only be read. The array says that it can be written: torch makes tensors of
    no other ones without a copy. Whoever writes all the same ends its process, instead of changing what others read."""

    def __init__(self, memory: mmap.mmap) -> None:
        view = np.frombuffer(memory, np.uint8)
        self._memory = memory
        self.__array_interface__: dict[str, Any] = view.__array_interface__ | {"data": (view.ctypes.data, False)}


def map_segment(segment: Segment) -> Buffer:
    """The bytes of another process's slab, not to be written.

    Raises:
        OSError: this process can't see them, or the other one has ended.
    """
    if segment.nbytes == 0:
        return np.empty(0, np.uint8)
    path = f"/proc/{segment.pid}/fd/{segment.descriptor}"
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if f"memfd:{segment.name} " not in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ESTALE, "It belongs to another process", path)
        return np.asarray(_ReadOnly(mmap.mmap(descriptor, segment.nbytes, prot=mmap.PROT_READ)))
    finally:
        os.close(descriptor)
