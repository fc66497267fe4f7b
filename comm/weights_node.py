"""`weights.node_shared`: one copy of a version per node, which every generator of the node loads from in place.

    trainers        first generator of the node: courier         every generator of the node
    WeightsReady ─▶ pulls as `weights_pull.py` does,
    WeightsPart  ─▶ into memory that the node shares
                    begun, and nearly whole ── NodeSoon() ─────▶ courier: takes short naps for a while
                    whole ── NodeVersion(v, where it is) ──────▶ courier: newer than what I have? ─▶ main: take()
                                                                                    │ no               loads in place
                    lent to nobody ◀── NodeReturned(v) ─────────────────────────────┴───────────────── release()

    a buffer:  free → filling → lent to all of the node → (each returns it) → free

What holds. A buffer is lent from the moment at which its version is whole until everybody has returned it, and only a
free one is filled: nobody sees a version that isn't whole, or one that is being overwritten. Every generator takes
rising versions only. One that is slow skips: what it hasn't taken it returns when a newer version comes. The messages
order the memory: the bytes are there before `NodeVersion` leaves, and read before `NodeReturned` does.

Memory. Two buffers per node, each of a whole version; a third one is made when a newer version comes while a generator
is still loading from the one and the others still have to return the other. So one slow generator keeps nobody: the
others go on in the two buffers that it doesn't read. If generators are loading two *different* older versions and the
third buffer isn't returned either, the next version waits for one of them, `wait_limit_s` at most; then it is named.

Deaths. Whom the trainers tell of versions pulls, whoever else it is: when the first generator of a node dies, they tell
the next one (`MpiPublisher.add`), which pulls into memory of its own. What the dead one has lent stays mapped where it
was. A dead generator's loans are returned by `drop`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import msgspec

from headrace.comm.errors import HeadraceError, WaitLimitError
from headrace.comm.messages import Message, NodeReturned, NodeShare, NodeSoon, NodeVersion, WeightsReady
from headrace.comm.shared_memory import Segment, SharedSlab, map_segment
from headrace.comm.transport import Buffer, Received, Transport
from headrace.comm.weights import Manifest, Slab, Version, WeightTensor, assemble, check_tensor, unpack
from headrace.comm.weights_pull import MpiSubscriber

BUFFERS = 3
"""Most buffers of a node."""


@dataclass(slots=True)
class _Loan:
    """A version in a buffer of this rank's."""

    found: Version
    holders: set[int]
    """Ranks that haven't returned it."""


@dataclass(frozen=True, slots=True)
class _Offer:
    """A version that this rank may load."""

    owner: int
    version: int
    tensors: list[WeightTensor]
    checksums: list[tuple[int, int]]
    """(trainer, checksum) of every tensor; empty where it was checked as it arrived."""


class NodeSubscriber:
    """A generator's end; see the module's diagram. `take` never blocks.

    Args:
        trainers: their ranks.
        mates: the other generators of this node.
        verify: compare every tensor with its checksum, as it arrives and again where another generator loads it.
        wait_limit_s: see `MpiSubscriber`; also the longest wait for a buffer.
        delta: ask for the changes since the version in the buffer that is filled.

    Raises (from `receive` and `tick`, in the courier):
        WaitLimitError: generators kept all buffers for longer than the limit; names them. Also as `MpiSubscriber`.
        HeadraceError: as `MpiSubscriber`; or a generator can't see the memory of this one.
    """

    handles: ClassVar[tuple[type[Message], ...]] = (*MpiSubscriber.handles, NodeSoon, NodeVersion, NodeReturned)

    def __init__(
        self,
        transport: Transport,
        trainers: Sequence[int],
        mates: Iterable[int],
        verify: bool,
        wait_limit_s: float,
        delta: bool = False,
    ) -> None:
        self._transport = transport
        self._mates = tuple(mate for mate in mates if mate != transport.rank)
        self._verify = verify
        self._wait_limit_s = wait_limit_s
        self._pull = MpiSubscriber(transport, trainers, verify, wait_limit_s, delta, BUFFERS, SharedSlab)
        self._loans: dict[int, _Loan] = {}
        """By version."""
        self._starved_since: float | None = None
        self._told_begun = self._told_nearly_whole = -1
        """The newest versions of which the others know so."""
        self._maps: dict[tuple[int, str], tuple[Segment, Buffer]] = {}
        """(owner, name) → memory of others."""
        # Shared by the two threads:
        self._lock = threading.Lock()
        self._ready: _Offer | None = None
        self._taken = -1
        self._released: deque[_Offer] = deque()

    @property
    def waiting(self) -> bool:
        """See `Subscriber.waiting`."""
        with self._lock:
            return self._ready is not None

    def take(self) -> Version | None:
        """The newest whole version that wasn't taken yet, or None.

        Raises:
            HeadraceError: a tensor isn't what its trainer has sent.
        """
        with self._lock:
            offer, self._ready = self._ready, None
            if offer is None:
                return None
            self._taken = offer.version
        for tensor, (trainer, expected) in zip(offer.tensors, offer.checksums, strict=False):
            check_tensor(tensor, expected, offer.version, trainer)
        return Version(offer.version, offer.tensors, partial(self._release, offer))

    def drop(self, generator: int) -> None:
        """The generator has died: it reads nothing any more. Called by the courier."""
        self._mates = tuple(mate for mate in self._mates if mate != generator)
        self._maps = {key: found for key, found in self._maps.items() if key[0] != generator}
        for version in list(self._loans):
            self._end_loan(generator, version)

    def receive(self, received: Received, now: float) -> None:
        match received.message:
            case NodeSoon():
                pass
            case WeightsReady(version=version):
                self._pull.receive(received, now)
                if version > self._told_begun:
                    self._told_begun = version
                    self._tell(NodeSoon())
            case NodeVersion() as message:
                self._look_at(received.source, message)
            case NodeReturned(problem="", version=version):
                self._end_loan(received.source, version)
            case NodeReturned(problem=problem):
                raise HeadraceError(
                    f"weights.node_shared: generator rank {received.source} can't see the memory of rank "
                    f"{self._transport.rank} ({problem}), though both say that they are on one host. They must run as "
                    "one user and see each other in /proc, not each in a container of its own. Change that, or leave "
                    "weights.node_shared out."
                )
            case _:
                self._pull.receive(received, now)

    def tick(self, now: float) -> None:
        while self._released:
            self._give_back(self._released.popleft())
        self._pull.tick(now)
        if self._pull.last_asked > self._told_nearly_whole:
            self._told_nearly_whole = self._pull.last_asked
            self._tell(NodeSoon())
        found = self._pull.take()
        if found is not None:
            self._lend(found)
        self._check_limit(now)

    def _lend(self, found: Version) -> None:
        """Tell the node of a whole version."""
        message = NodeVersion(
            found.version,
            [_describe(trainer, *share) for trainer, share in self._pull.shares(found.version).items()],
        )
        self._loans[found.version] = _Loan(found, {self._transport.rank, *self._mates})
        self._tell(message)
        self._offer(_Offer(self._transport.rank, found.version, found.tensors, []))

    def _tell(self, message: Message) -> None:
        for mate in self._mates:
            self._transport.send(mate, message)

    def _look_at(self, owner: int, message: NodeVersion) -> None:
        """A version is whole in another rank's memory."""
        try:
            shares = {share.trainer: self._map(owner, share) for share in message.shares}
        except OSError as error:  # if the owner has died, the answer finds nobody, and another one will own the next
            self._transport.send(owner, NodeReturned(message.version, f"{error.strerror}: {error.filename}"))
            return
        manifests = {s.trainer: msgspec.msgpack.decode(s.manifest, type=Manifest) for s in message.shares}
        tensors = {trainer: unpack(manifests[trainer].specs, data) for trainer, data in shares.items()}
        checksums = [(trainer, each) for trainer, manifest in manifests.items() for each in manifest.checksums]
        offered = checksums if self._verify else []
        self._offer(_Offer(owner, message.version, assemble(message.version, tensors), offered))

    def _map(self, owner: int, share: NodeShare) -> Buffer:
        segment = Segment(share.pid, share.descriptor, share.name, share.nbytes)
        known = self._maps.get((owner, segment.name))
        if known is None or known[0] != segment:
            known = self._maps[owner, segment.name] = segment, map_segment(segment)
        return known[1]

    def _offer(self, offer: _Offer) -> None:
        """Let the main thread take it if it is newer than all before; return what it takes no more."""
        unwanted: _Offer | None = offer
        with self._lock:
            if offer.version > max(self._taken, self._ready.version if self._ready else -1):
                unwanted, self._ready = self._ready, offer
        if unwanted is not None:
            self._give_back(unwanted)

    def _release(self, offer: _Offer) -> None:
        self._released.append(offer)
        self._transport.wake()

    def _give_back(self, offer: _Offer) -> None:
        if offer.owner == self._transport.rank:
            self._end_loan(offer.owner, offer.version)
        else:
            self._transport.send(offer.owner, NodeReturned(offer.version))

    def _end_loan(self, holder: int, version: int) -> None:
        loan = self._loans[version]
        loan.holders.discard(holder)
        if not loan.holders:
            del self._loans[version]
            loan.found.release()

    def _check_limit(self, now: float) -> None:
        """A new version must not wait for ever for generators that keep old ones."""
        if not self._pull.starved:
            self._starved_since = None
        elif self._starved_since is None:
            self._starved_since = now
        elif now - self._starved_since > self._wait_limit_s:
            kept = "; ".join(f"version {v} by ranks {sorted(loan.holders)}" for v, loan in self._loans.items())
            raise WaitLimitError(
                f"Generator rank {self._transport.rank} waited more than {self._wait_limit_s:g} s for a buffer of its "
                f"node for the next version of the weights. All {BUFFERS} are kept: {kept}. These generators are stuck "
                "in loading weights; look at the ends of their logs. If they are only slow, raise run.wait_limit_s."
            )


def _describe(trainer: int, slab: Slab, manifest: Manifest) -> NodeShare:
    assert isinstance(slab, SharedSlab)
    segment = slab.segment
    encoded = msgspec.msgpack.encode(manifest)
    return NodeShare(trainer, segment.pid, segment.descriptor, segment.name, segment.nbytes, encoded)
