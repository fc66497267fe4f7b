"""How the ranks of the doctor's world compare what they found, with a limit on every wait.

    stage: each rank does its part ── Said(data or error) ──▶ rank 0 ── all of them ──▶ every rank

So every rank knows the same after a stage, judges alike, and goes on to the same next stage; also when the part of one
of them has failed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import msgspec
import numpy as np

from headrace.comm.errors import HeadraceError, WaitLimitError

if TYPE_CHECKING:
    from mpi4py import MPI

NAP_S = 0.001
FIRST_TAG = 100
"""Tags of stages count up from here; those below are for the parts themselves."""

T = TypeVar("T")


class LostError(WaitLimitError):
    """Ranks didn't come to the end of a stage: there is no going on."""


class Said(msgspec.Struct, frozen=True):
    """What one rank has to say at the end of a stage."""

    data: msgspec.Raw = msgspec.Raw(b"null")
    error: str | None = None


class Talk:
    """All ranks, by MPI point-to-point messages and broadcasts that don't block.

    Args:
        limit_s: of one stage, in seconds.
    """

    def __init__(self, comm: MPI.Comm, limit_s: float) -> None:
        self.comm = comm
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()
        self.limit_s = limit_s
        self._tag = FIRST_TAG

    def stage(self, what: str, kind: type[T], part: Callable[[], T]) -> list[T]:
        """Let every rank do its part; returns what all ranks have found, in their order, on every rank.

        Args:
            what: for errors, what is done, as in `rank 3 failed to {what}`.
            kind: type of what a part returns; it travels as JSON.

        Raises:
            HeadraceError: the part of a rank failed; the same on every rank.
            LostError: ranks didn't come to the end of the stage; on rank 0 it names them.
        """
        said = msgspec.json.decode(self._exchange(what, msgspec.json.encode(_said(part))), type=list[Said])
        errors: dict[str, list[int]] = {}
        for rank, one in enumerate(said):
            if one.error is not None:
                errors.setdefault(one.error, []).append(rank)
        if errors:
            told = "; ".join(f"ranks {_short(ranks)}: {error}" for error, ranks in errors.items())
            raise HeadraceError(f"failed to {what}: {told}")
        return [msgspec.json.decode(one.data, type=kind) for one in said]

    def finish(self, request: MPI.Request, what: str) -> None:
        """Wait for a transfer, without a nap: it may be one that is measured."""
        deadline = time.monotonic() + self.limit_s
        while not request.Test():
            if time.monotonic() > deadline:
                raise WaitLimitError(f"{what} took more than {self.limit_s:.0f} s")
            os.sched_yield()

    def _exchange(self, what: str, own: bytes) -> bytes:
        self._tag += 1
        if self.rank == 0:
            parts = self._gather(what, own)
            return self._share(b"[" + b",".join(parts) + b"]", what)
        self._await(self.comm.Isend(np.frombuffer(own, np.uint8), 0, self._tag), what)
        return self._share(b"", what)

    def _gather(self, what: str, own: bytes) -> list[bytes]:
        from mpi4py import MPI

        parts = {0: own}
        status = MPI.Status()
        deadline = time.monotonic() + 2 * self.limit_s
        while len(parts) < self.size:
            message = self.comm.Improbe(MPI.ANY_SOURCE, self._tag, status)
            if message is not None:
                data = np.empty(status.Get_count(MPI.BYTE), np.uint8)
                message.Recv(data)
                parts[status.Get_source()] = data.tobytes()
            elif time.monotonic() > deadline:
                missing = sorted(set(range(self.size)) - set(parts))
                raise LostError(f"ranks {_short(missing)} didn't {what} within {2 * self.limit_s:.0f} s")
            else:
                time.sleep(NAP_S)
        return [parts[rank] for rank in range(self.size)]

    def _share(self, data: bytes, what: str) -> bytes:
        length = np.array([len(data)], np.int64)
        self._await(self.comm.Ibcast(length, 0), what)
        buffer = np.frombuffer(data, np.uint8).copy() if self.rank == 0 else np.empty(int(length[0]), np.uint8)
        self._await(self.comm.Ibcast(buffer, 0), what)
        return buffer.tobytes()

    def _await(self, request: MPI.Request, what: str) -> None:
        deadline = time.monotonic() + 3 * self.limit_s  # rank 0 gives up first, and names who is missing
        while not request.Test():
            if time.monotonic() > deadline:
                raise LostError(f"rank {self.rank} waited {3 * self.limit_s:.0f} s for the others to {what}")
            time.sleep(NAP_S)


def _said(part: Callable[[], object]) -> Said:
    try:
        return Said(data=msgspec.Raw(msgspec.json.encode(part())))
    except HeadraceError as error:
        return Said(error=str(error))
    except Exception as error:
        return Said(error=f"{type(error).__name__}: {error}")


def _short(ranks: list[int]) -> str:
    """At most ten of them."""
    return f"{ranks[:10]}{f' and {len(ranks) - 10} more' if len(ranks) > 10 else ''}"
