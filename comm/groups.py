"""Torch process groups for any set of ranks, from one store per job.

    share_store(comm)                      main thread, at start-up: every rank, once
        rank 0 ── candidate addresses ─▶ all       which of them can you reach?
        rank 0 ◀─ the first that all reach ── all  (loopback when all ranks are on one host)
        rank 0 ── address:port of its TCPStore ─▶ all
        (each of these within a limit)
    init_replica_group(store, ...)         torch's default group: only this replica's ranks
    make_group(backend, store, ...)        a group beside it, that may span replicas and roles

The port is chosen by the system and no host name is looked up, so two jobs on a node don't meet, and a machine whose
own name doesn't resolve works.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from headrace.comm.devices import new_process_group
from headrace.comm.errors import HeadraceError, PeerLostError, WaitLimitError
from headrace.comm.network import interfaces, outer_addresses

if TYPE_CHECKING:
    from mpi4py import MPI

LOOPBACK = "127.0.0.1"

PROBE_S = 3.0
"""How long a rank tries to reach one candidate address."""

POLL_S = 0.002
"""Nap between two looks at a collective of all ranks."""

ADDRESSES = "the server of the store tells its addresses"
REACHED = "every rank tells which of these addresses it reaches"
STORE_ADDRESS = "the server of the store tells where it listens"


@dataclass(frozen=True, slots=True)
class DeviceGroup:
    """A process group whose members go by their ranks in the job."""

    handle: Any
    """What `devices.new_process_group` made."""
    members: tuple[int, ...]
    """Job ranks, in the order of the group."""
    name: str

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Copy the tensor of job rank `root` into that of all members; returns when this rank is done.

        Raises:
            PeerLostError: a member went away or the group's time-out struck.
        """
        self.begin_broadcast(tensor, root)()

    def begin_broadcast(self, tensor: torch.Tensor, root: int) -> Callable[[], None]:
        """The same in the background. Returns what waits for its end, and raises as `broadcast`; until then the tensor
        must stay as it is. Broadcasts of one group must begin in the same order on all members."""
        with self._naming_peers(root):
            work = self.handle.broadcast(tensor, self.members.index(root))

        def wait() -> None:
            with self._naming_peers(root):
                work.wait()

        return wait

    @contextmanager
    def _naming_peers(self, root: int) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise PeerLostError(
                f"A broadcast from rank {root} over the ranks {list(self.members)} (group {self.name!r}) failed: one "
                f"of them has died or didn't join in time; look at the ends of their logs. The backend says: {error}"
            ) from error


def share_store(comm: MPI.Comm, hosts: Sequence[str], timeout_s: float, root: int = 0) -> TCPStore:
    """A store that every rank of the communicator reaches. Collective; main thread, before the courier starts.

    Args:
        hosts: host name of every rank of `comm`; they are only compared.
        timeout_s: of every stage of this meeting, and of the store's operations, in seconds.
        root: rank of `comm` that serves the store, for as long as it keeps the returned object.

    Raises:
        HeadraceError: no address of the root can be reached by all ranks.
        WaitLimitError: a rank didn't come to a stage in time; says to which, but not who: a collective doesn't tell.
    """
    meeting = _Meeting(comm, root, timeout_s)
    address = LOOPBACK if len(set(hosts)) == 1 else _reachable_address(meeting, hosts)
    if comm.Get_rank() == root:
        store = _serve(address, timeout_s)
        meeting.share_text(f"{address}:{store.port}", STORE_ADDRESS)
        return store
    host, _, port = meeting.share_text("", STORE_ADDRESS).rpartition(":")
    return _connect(host, int(port), root, timeout_s)


def make_group(
    backend: str, store: TCPStore, name: str, members: Sequence[int], rank: int, timeout_s: float
) -> DeviceGroup:
    """A group of some ranks of the job. Called by every member, with equal arguments but `rank`.

    Args:
        backend: see `devices.Device.backend`.
        name: unique in the job.
        members: job ranks; their order is the order in the group.
        rank: the caller's job rank.
        timeout_s: of every collective, in seconds.
    """
    handle = new_process_group(
        backend,
        PrefixStore(name, store),
        rank=members.index(rank),
        size=len(members),
        timeout=timedelta(seconds=timeout_s),
        address=local_address(store.host),
    )
    return DeviceGroup(handle, tuple(members), name)


def init_replica_group(
    store: TCPStore, backend: str, rank: int, size: int, timeout_s: float, name: str = "replica"
) -> None:
    """Make torch's default group, of the ranks of this replica only.

    Args:
        rank: in the replica.
        name: unique in the job.
    """
    # Torch gives no way to hand gloo a device here; without a named interface it would look the host name up.
    if "GLOO_SOCKET_IFNAME" not in os.environ:
        os.environ["GLOO_SOCKET_IFNAME"] = interface_of(local_address(store.host))
    dist.init_process_group(
        backend,
        store=PrefixStore(name, store),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout_s),
    )


def interface_of(address: str) -> str:
    """Name of the interface that has this address.

    Raises:
        HeadraceError: none has it as its first address.
    """
    for name, found in interfaces().items():
        if found == address:
            return name
    raise HeadraceError(
        f"This host reaches its peers from the address {address}, but none of its interfaces has it as its first: "
        f"{interfaces()}. Set GLOO_SOCKET_IFNAME to the name of the right one."
    )


def local_address(peer: str) -> str:
    """This host's own address on the way to `peer` (a numeric address), by the routing table; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.connect((peer, 9))
        return str(sock.getsockname()[0])


def _serve(address: str, timeout_s: float) -> TCPStore:
    """A store that listens on this address only, on a port that the system chooses."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind((address, 0))
    listener.listen(socket.SOMAXCONN)
    port = listener.getsockname()[1]
    return TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listener.detach(),
    )


def _connect(host: str, port: int, root: int, timeout_s: float) -> TCPStore:
    """The store that rank `root` serves."""
    try:
        return TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))
    except dist.DistError as error:
        raise WaitLimitError(
            f"The store of rank {root} at {host}:{port} couldn't be reached within {timeout_s:g} s (run.wait_limit_s) "
            f"while the job was starting; look at the end of that rank's log. The backend says: {error}"
        ) from error


def _reachable_address(meeting: _Meeting, hosts: Sequence[str]) -> str:
    """The first address of the root's interfaces that every rank can connect to."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        offer = ""
        if meeting.is_root:
            probe.bind(("", 0))
            probe.listen(socket.SOMAXCONN)
            offer = " ".join([str(probe.getsockname()[1]), *outer_addresses()])
        port, *candidates = meeting.share_text(offer, ADDRESSES).split()
        reached = np.array([_can_connect(address, int(port)) for address in candidates], np.uint8)
        all_reached = meeting.all_agree(reached, REACHED)
    for address, good in zip(candidates, all_reached, strict=True):
        if good:
            return address
    raise HeadraceError(
        f"The hosts {sorted(set(hosts))} have no network in common: of the addresses {candidates} of "
        f"{hosts[meeting.root]}, none can be reached by every rank. Check firewalls and interfaces of the nodes."
    )


def _can_connect(address: str, port: int) -> bool:
    try:
        with socket.create_connection((address, port), timeout=PROBE_S):
            return True
    except OSError:
        return False


@dataclass(frozen=True, slots=True)
class _Meeting:
    """Collectives of all ranks, each with a limit."""

    comm: MPI.Comm
    root: int
    timeout_s: float
    """Of each collective."""

    @property
    def is_root(self) -> bool:
        return bool(self.comm.Get_rank() == self.root)

    def share_text(self, text: str, stage: str) -> str:
        """The root's text on every rank. As bytes: mpi4py's lower-case `bcast` would unpickle."""
        length = np.array([len(text.encode())], np.int64)
        self._finish(self.comm.Ibcast(length, self.root), stage)
        data = np.zeros(int(length[0]), np.uint8)
        if self.is_root:
            data[:] = np.frombuffer(text.encode(), np.uint8)
        self._finish(self.comm.Ibcast(data, self.root), stage)
        return data.tobytes().decode()

    def all_agree(self, flags: npt.NDArray[np.uint8], stage: str) -> npt.NDArray[np.uint8]:
        """1 where the flags of all ranks are."""
        from mpi4py import MPI

        agreed = np.empty_like(flags)
        self._finish(self.comm.Iallreduce(flags, agreed, MPI.MIN), stage)
        return agreed

    def _finish(self, request: MPI.Request, stage: str) -> None:
        deadline = time.monotonic() + self.timeout_s
        while not request.Test():
            if time.monotonic() > deadline:
                raise WaitLimitError(
                    f"While the job was starting, rank {self.comm.Get_rank()} waited {self.timeout_s:g} s "
                    f"(run.wait_limit_s) for the stage in which {stage}: a rank hasn't arrived there. Which one can't "
                    "be told from here; look at the ends of all ranks' logs for the one that is behind or has died."
                )
            time.sleep(POLL_S)
