"""Messages over MPI: a header with one tag, its buffers with another, everything non-blocking and driven by `poll`.

    send    ── Isend header (HEADER) ──▶  Improbe any source → Irecv of it → decode → buffers of the sizes it names
            ── Isend chunk, chunk … (PAYLOAD) ▶  Irecv chunk, chunk …, in place

MPI keeps the order of messages with one tag between two ranks, so payloads need no numbers: a receiver that takes up
the headers of a source in their order posts the receives of the payloads in the order in which they were sent. What
arrived from one source waits in a queue until everything before it is whole:

    incoming message:  header on its way → payload on its way → whole → delivered (only at the head of its queue)

Where Open MPI was started `--with-ft ulfm`, the death of a rank shows as an error of any call that has to do with it,
and of `Improbe` until the death is acknowledged. There it is told to `on_lost`; what is under way from it and to it is
left alone from then on.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from headrace.comm import wire
from headrace.comm.buffers import BufferPool
from headrace.comm.errors import HeadraceError, PeerLostError, WaitLimitError
from headrace.comm.messages import Message
from headrace.comm.transport import Buffer, Placer, Received, nobody

if TYPE_CHECKING:
    from mpi4py import MPI

HEADER_TAG = 1
PAYLOAD_TAG = 2
ULFM_ON = "OMPI_MCA_mpi_ft_enable"
"""What `mpirun --with-ft ulfm` sets to 1 for the ranks."""
LOOKS = 32
"""Further looks for headers in a poll while messages arrive; a look takes about a microsecond."""
BYTES_PER_POLL = 16 << 20
"""Once so much has been begun to be received in a poll, the rest waits for the next one. Within a node, MPI copies what
is received at once; so what was whole first is dealt with while the next is copied."""
HEADERS_PER_POLL = 256
"""So that a flood of messages can't keep one `poll` busy for ever."""


@dataclass(slots=True)
class _Outgoing:
    """A message that hasn't left; the requests keep its buffers alive."""

    target: int
    requests: list[MPI.Request]


@dataclass(slots=True)
class _Incoming:
    """A message that isn't whole yet."""

    frame: Buffer
    header: MPI.Request
    message: Message | None = None
    """None until the header has arrived."""
    buffers: list[Buffer] = field(default_factory=list)
    payload: list[MPI.Request] = field(default_factory=list)


def ends_the_job(rank: int) -> None:
    """What a death means to a job that can't do without this rank."""
    raise PeerLostError(f"Rank {rank} has died; the end of its log in the run folder may say why.")


class MpiTransport:
    """A `Transport` over an mpi4py communicator that nothing else uses.

    Args:
        comm: every rank of it holds one transport; errors are raised as exceptions (mpi4py's default).
        chunk_bytes: longest single MPI transfer, the same on every rank. Below 2 GiB, because MPI counts in C ints.
        survives: MPI tells of deaths (see `check_survival`); without it they end the job by MPI's own means.
    """

    def __init__(self, comm: MPI.Comm, chunk_bytes: int = 1 << 30, survives: bool = False) -> None:
        from mpi4py import MPI

        self.on_lost: Callable[[int], None] = ends_the_job
        """Called by `poll` with every rank that has died; once it returns, nothing comes from that rank any more."""
        self.wake: Callable[[], None] = nobody
        """See `Transport.wake`."""
        self.lost: set[int] = set()
        """Ranks that have died."""
        self._buried: list[object] = []
        """Transfers with dead ranks: MPI may still know their buffers."""
        self._mpi: Any = MPI
        self._comm = comm
        self._chunk_bytes = chunk_bytes
        self.survives = survives
        self._outgoing: list[_Outgoing] = []
        self._incoming: dict[int, deque[_Incoming]] = {}
        self._budget = BYTES_PER_POLL
        self._pool = BufferPool()
        self._placers: dict[type[Message], Placer] = {}
        self.rank: int = comm.Get_rank()
        self.size: int = comm.Get_size()

    @property
    def pending(self) -> int:
        """How many messages haven't left or aren't whole yet, as of the last `poll`."""
        return len(self._outgoing) + sum(map(len, self._incoming.values()))

    def send(self, target: int, message: Message, buffers: Sequence[Buffer] = ()) -> None:
        """Send without waiting; see `Transport.send`. What is sent to a dead rank is dropped."""
        if target in self.lost:
            return
        frame = wire.encode(message, wire.sizes_of(buffers))
        requests: list[MPI.Request] = []
        self._outgoing.append(_Outgoing(target, requests))
        try:
            requests.append(self._comm.Isend([frame, self._mpi.BYTE], target, HEADER_TAG))
            for chunk in self._chunks(buffers):
                requests.append(self._comm.Isend([chunk, self._mpi.BYTE], target, PAYLOAD_TAG))
        except self._mpi.Exception as error:
            self._excuse(error, target)

    def place(self, kind: type[Message], placer: Placer) -> None:
        """See `Transport.place`."""
        self._placers[kind] = placer

    def poll(self) -> list[Received]:
        """Drive all transfers; return what has arrived whole, in the order of each source. Never blocks.

        Raises:
            WireError: a rank sent what can't be read.
        """
        self._accept_headers()
        self._budget = BYTES_PER_POLL
        received = [item for source in list(self._incoming) for item in self._deliver(source)]
        self._outgoing = [item for item in self._outgoing if not self._complete(item.requests, item.target)]
        return received

    def close(self, limit: float = 60.0) -> None:
        """Finish every transfer that has begun; what arrives meanwhile is dropped. The communicator stays.

        Args:
            limit: seconds.

        Raises:
            WaitLimitError: transfers were unfinished at the limit; the text names the ranks.
        """
        deadline = time.monotonic() + limit
        while self._outgoing or self._incoming:
            if time.monotonic() > deadline:
                raise WaitLimitError(self._unfinished(limit))
            self.poll()
            time.sleep(1e-3)

    def _chunks(self, buffers: Sequence[Buffer]) -> Iterator[Buffer]:
        for buffer in buffers:
            for start in range(0, buffer.nbytes, self._chunk_bytes):
                yield buffer[start : start + self._chunk_bytes]

    def _accept_headers(self) -> None:
        """Begin to receive the headers that are there. (A blocking receive would wait for a long one's sender.)

        MPICH looks before it takes in one packet, so a second look finds what has just come. The header of a message
        hides behind the payloads of those before it: while messages arrive that takes more looks, and without the
        header nothing of it would move until they are whole.
        """
        status = self._mpi.Status()
        misses = 0
        for _ in range(HEADERS_PER_POLL):
            try:
                found = self._comm.Improbe(self._mpi.ANY_SOURCE, HEADER_TAG, status)
            except self._mpi.Exception as error:
                self._bury(error)
                continue
            if found is None:
                misses += 1
                if misses > (LOOKS if self._incoming else 1):
                    return
                continue
            self._accept(found, status.Get_source(), status.Get_count(self._mpi.BYTE))

    def _accept(self, found: MPI.Message, source: int, size: int) -> None:
        frame = np.empty(size, np.uint8)
        try:
            header = found.Irecv([frame, self._mpi.BYTE])
        except self._mpi.Exception as error:
            self._excuse(error, source)
            return
        if source in self.lost:
            self._buried.append((frame, header))
        else:
            self._incoming.setdefault(source, deque()).append(_Incoming(frame, header))

    def _deliver(self, source: int) -> Iterator[Received]:
        """Take the messages of one source a step further, in order; yield those that are whole."""
        queue, budget = self._incoming[source], self._budget
        self._post_payloads(source, queue)
        while queue and (message := queue[0].message) is not None and self._complete(queue[0].payload, source):
            yield Received(source, message, queue.popleft().buffers)
        if not queue:
            del self._incoming[source]
        elif self._budget < budget:  # the next source's turn: the budget of a poll may not be enough for all
            self._incoming[source] = self._incoming.pop(source)

    def _post_payloads(self, source: int, queue: deque[_Incoming]) -> None:
        """Decode the headers that have arrived, up to the first that hasn't, and receive their payloads in place."""
        for item in queue:
            if item.message is not None:
                continue
            if self._budget <= 0 or not self._complete([item.header], source):
                return
            message, sizes = wire.decode(item.frame.data, source)
            placer = self._placers.get(type(message), self._from_pool)
            item.buffers = wire.checked_places(placer(source, message, sizes), sizes, source)
            try:
                for chunk in self._chunks(item.buffers):
                    item.payload.append(self._comm.Irecv([chunk, self._mpi.BYTE], source, PAYLOAD_TAG))
            except self._mpi.Exception as error:
                self._excuse(error, source)
                return
            item.message = message
            self._budget -= sum(sizes)

    def _from_pool(self, source: int, message: Message, sizes: list[int]) -> list[Buffer]:
        return [self._pool.take(size) for size in sizes]

    def _complete(self, requests: list[MPI.Request], peer: int) -> bool:
        """Whether all have completed well; those of a dead peer never do, and are buried soon."""
        try:
            return bool(self._mpi.Request.Testall(requests))
        except self._mpi.Exception as error:
            self._excuse(error, peer)
            return False

    def _excuse(self, error: Exception, peer: int) -> None:
        """Pass over an error that the death of the peer explains; `Improbe` will tell of it. Where MPI tells of no
        deaths, it is what shows of one in the middle of a transfer."""
        if not self.survives:
            raise PeerLostError(
                f"A transfer between ranks {self.rank} and {peer} broke off: rank {peer} has died; the end of its log "
                f"in the run folder may say why. MPI says: {error}."
            ) from error
        if peer not in self._failed():
            raise error

    def _failed(self) -> list[int]:
        """The ranks that MPI knows to have died."""
        group = self._comm.Get_failed()
        return list(group.Translate_ranks(range(group.Get_size()), self._comm.Get_group()))

    def _bury(self, error: Exception) -> None:
        """Acknowledge deaths and tell of them. (What is acknowledged is a part of what is known right after.)"""
        if not self.survives or not self._failed():
            raise error
        self._comm.Ack_failed()
        for rank in self._failed():
            if rank in self.lost:
                continue
            self.lost.add(rank)
            self._buried.append(self._incoming.pop(rank, None))
            self._buried += [item for item in self._outgoing if item.target == rank]
            self._outgoing = [item for item in self._outgoing if item.target != rank]
            self.on_lost(rank)

    def _unfinished(self, limit: float) -> str:
        targets = sorted({item.target for item in self._outgoing})
        sources = sorted(self._incoming)
        parts = [f"{len(self._outgoing)} messages to ranks {targets} haven't left"] if targets else []
        parts += [f"messages from ranks {sources} haven't arrived whole"] if sources else []
        return (
            f"Rank {self.rank} waited {limit:g} s at its end for its messages: {' and '.join(parts)}. "
            "Those ranks have died or stopped polling; look at the ends of their logs."
        )


def check_threads() -> None:
    """Make sure that a thread other than the main one may call MPI. Main thread, after MPI has started.

    Raises:
        HeadraceError: the MPI library gave less than `MPI_THREAD_SERIALIZED`.
    """
    from mpi4py import MPI

    if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
        raise HeadraceError(
            f"{_library()} was started without support for threads (level {MPI.Query_thread()}, needed: "
            f"{MPI.THREAD_SERIALIZED}, SERIALIZED). Unset MPI4PY_RC_THREAD_LEVEL and MPI4PY_RC_THREADS, or use an MPI "
            "that was built with threads."
        )


def check_survival() -> None:
    """Make sure that MPI tells of deaths instead of ending the job.

    Raises:
        HeadraceError: it doesn't; the text says how to start it.
    """
    from mpi4py import MPI

    try:
        MPI.COMM_SELF.Get_failed()
        able = os.environ.get(ULFM_ON) == "1"
    except (MPI.Exception, NotImplementedError):
        able = False
    if not able:
        raise HeadraceError(
            f"launch.repair needs an Open MPI that was started by `mpirun --with-ft ulfm`; this is {_library()}. "
            "Use launch.mpi=openmpi, or leave launch.repair (on your own mpirun line, --repair) out."
        )


def check_world(comm: MPI.Comm, expected: int | None) -> None:
    """Make sure that the ranks found each other. Main thread, after MPI has started.

    Args:
        comm: the world.
        expected: the number of ranks the launcher was asked for; None if nobody has said it, in which case the
            launcher's own variables are believed, but only when they say that more than this one process was started.

    Raises:
        HeadraceError: the world has another size; the text says what to do.
    """
    size = comm.Get_size()
    wanted = expected if expected is not None else _ranks_started(os.environ) if size == 1 else size
    if size == wanted:
        return
    if size == 1:
        raise HeadraceError(
            f"{wanted} ranks were started, but each of them is a world of its own: the launcher and the MPI library "
            f"don't fit together. This process loaded {_library()}. Start it with the mpirun of the same MPI "
            "(`headrace run` does), or under srun with `--mpi=pmix` for Open MPI and `--mpi=pmi2` for MPICH; "
            "MPI4PY_LIBMPI names the library to load if there are several."
        )
    raise HeadraceError(
        f"{wanted} ranks were asked for, but the MPI world has {size}: the number given to mpirun or srun (-n) isn't "
        "that of the config. Give the same number to both, or leave the start to `headrace run`."
    )


def _ranks_started(environment: Mapping[str, str]) -> int:
    """How many processes the launcher says it started along with this one."""
    names = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
    return max(int(environment.get(name, 1)) for name in names)


def _library() -> str:
    from mpi4py import MPI

    return " ".join(MPI.Get_library_version().split("\n")[0].split(",")[0].split())
