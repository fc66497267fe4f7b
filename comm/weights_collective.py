"""The `collective` weight transport: a broadcast on a device group of all trainers and generators.

    trainer: main            trainer: courier         generator: courier          generator: main
    publish(): its share
    into a slab; announce ─▶ WeightsReady(v, meet) ─▶ announced by every trainer? ─▶ take(), at a step boundary
    wait for all          ◀─ WeightsPull(v) ◀──────── tell the trainers ◀─────────── "I join"
    broadcasts ═══════════════════════ device group ═══════════════════════════════▶ broadcasts
    go on                                                                            Version, check, engine loads

The order of collectives is the same on every rank: trainers in the order of their ranks, each the root of its own
share's buckets. The first round also carries the manifests; later rounds only tensors and, behind them, checksums.

    round 1, per trainer:   size of its manifest · manifest · buckets of [tensors | checksums]
    round n, per trainer:                                     buckets of [tensors | checksums]

No rank enters a collective before all are known to come: generators join when every trainer has announced, and
trainers when every generator has joined, so a missing rank is named by the trainers' wait. Versions are never skipped.

Broadcasts in host memory need no hand of the main thread. So where a share is packed no slower than it is broadcast, a
trainer announces before it packs, and the buckets of the first root leave as they are filled, once all have joined.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import ClassVar

import msgspec
import numpy as np
import torch

from headrace.comm.devices import Device
from headrace.comm.errors import WaitLimitError
from headrace.comm.groups import DeviceGroup
from headrace.comm.messages import Message, WeightsPull, WeightsReady
from headrace.comm.transport import Buffer, Received, Transport
from headrace.comm.weights import (
    Share,
    Slab,
    TensorSpec,
    Version,
    WeightTensor,
    assemble,
    check_tensor,
    layout,
    pack,
    unpack,
)

CHECKSUM_BYTES = 8


class Broadcaster:
    """Broadcasts host memory over a device group, one bucket at a time.

    On a CPU the memory itself is broadcast; elsewhere it goes through one device buffer, which is kept.
    """

    def __init__(self, group: DeviceGroup, device: Device, bucket_bytes: int, local_index: int = 0) -> None:
        self._group = group
        self._bucket_bytes = bucket_bytes
        self._in_place = device.kind == "cpu"
        self._device = device.torch_device(local_index)
        self._bucket = torch.empty(0, dtype=torch.uint8, device=self._device)

    @property
    def in_background(self) -> bool:
        """Whether broadcasts go on by themselves; only then is there an `Outflow`."""
        return self._in_place

    def outflow(self, root: int) -> Outflow:
        """For the share of job rank `root`, this one."""
        return Outflow(lambda piece: self._group.begin_broadcast(torch.from_numpy(piece), root), self._bucket_bytes)

    def run(self, root: int, data: Buffer, mine: bool) -> None:
        """Send `data` to all members if it is `mine`, else fill it with what job rank `root` sends."""
        for start in range(0, data.size, self._bucket_bytes):
            piece = torch.from_numpy(data[start : start + self._bucket_bytes])
            if self._in_place:
                self._group.broadcast(piece, root)
            else:
                self._through_device(root, piece, mine)

    def skip(self, root: int, nbytes: int, scratch: Slab) -> None:
        """Take part in a broadcast without wanting the bytes."""
        for start in range(0, nbytes, self._bucket_bytes):
            piece = scratch.room(min(self._bucket_bytes, nbytes - start))
            self.run(root, piece, mine=False)

    def _through_device(self, root: int, piece: torch.Tensor, mine: bool) -> None:
        if self._bucket.numel() == 0:
            self._bucket = torch.empty(self._bucket_bytes, dtype=torch.uint8, device=self._device)
        bucket = self._bucket[: piece.numel()]
        if mine:
            bucket.copy_(piece)
        self._group.broadcast(bucket, root)
        if not mine:
            piece.copy_(bucket)


class Outflow:
    """A run of bytes that is broadcast bucket by bucket while it grows."""

    def __init__(self, begin: Callable[[Buffer], Callable[[], None]], bucket_bytes: int) -> None:
        self._begin = begin
        self._bucket_bytes = bucket_bytes
        self._begun = 0
        self._waits: list[Callable[[], None]] = []

    def feed(self, data: Buffer) -> None:
        """Begin the broadcasts of the buckets that are full; `data` is all that there is so far."""
        while self._begun + self._bucket_bytes <= data.size:
            self._next(data)

    def finish(self, data: Buffer) -> None:
        """Broadcast the rest of what is now whole; return when this rank is done with all of it."""
        while self._begun < data.size:
            self._next(data)
        for wait in self._waits:
            wait()

    def _next(self, data: Buffer) -> None:
        end = min(self._begun + self._bucket_bytes, data.size)
        self._waits.append(self._begin(data[self._begun : end]))
        self._begun = end


class _Round:
    """What both ends know of a round: who sends what, learned in the first round and kept."""

    def __init__(self, broadcaster: Broadcaster, trainers: Sequence[int], verify: bool) -> None:
        self.trainers = sorted(trainers)
        self.specs: dict[int, list[TensorSpec]] = {}
        self.broadcaster = broadcaster
        self._verify = verify

    def learn(self, trainer: int, mine: list[TensorSpec] | None = None) -> None:
        """Get the specs of a trainer, or send them if they are this rank's own; once per trainer."""
        if trainer in self.specs:
            return
        encoded = np.frombuffer(msgspec.msgpack.encode(mine), np.uint8)
        size = np.array([encoded.size], np.int64)
        self.broadcaster.run(trainer, size.view(np.uint8), mine is not None)
        data = np.zeros(int(size[0]), np.uint8)
        if mine is not None:
            data[:] = encoded
        self.broadcaster.run(trainer, data, mine is not None)
        self.specs[trainer] = msgspec.msgpack.decode(data.data, type=list[TensorSpec])

    def sizes(self, trainer: int) -> tuple[int, int]:
        """Bytes of a trainer's tensors, and of the checksums behind them."""
        specs = self.specs[trainer]
        return layout(specs)[1], CHECKSUM_BYTES * len(specs) if self._verify else 0


class CollectivePublisher:
    """The trainer's end; see the module's diagram.

    Args:
        broadcaster: on the group of all trainers and generators; used by nothing else.
        trainers: their ranks, this one among them.
        generators: their ranks.
        verify: send checksums along.
        wait_limit_s: longest wait of `publish` for generators to join, in seconds.
    """

    handles: ClassVar[tuple[type[Message], ...]] = (WeightsPull,)

    def __init__(
        self,
        transport: Transport,
        broadcaster: Broadcaster,
        trainers: Sequence[int],
        generators: Sequence[int],
        verify: bool,
        wait_limit_s: float,
    ) -> None:
        self._transport = transport
        self._verify = verify
        self._wait_limit_s = wait_limit_s
        self._round = _Round(broadcaster, trainers, verify)
        self._slab = Slab()
        self._scratch = Slab()
        self._pack_s = self._send_s = 0.0
        """What they took last; sending, when it didn't begin before all was packed."""
        self._announced = -1
        # Shared by the two threads:
        self._changed = threading.Condition()
        self._version = -1
        self._joined = dict.fromkeys(generators, -1)

    def publish(self, version: int, tensors: Iterable[WeightTensor]) -> None:
        """Broadcast this rank's share, and take part in the broadcasts of the others; see `Publisher.publish`.

        Raises:
            WaitLimitError: generators didn't join in time; names them.
            PeerLostError: a rank went away in the middle.
        """
        if version <= self._version:
            raise ValueError(f"version {version} published after version {self._version}")
        begun = time.monotonic()
        outflow = self._outflow(version)
        share = pack(tensors, self._slab, self._verify, partial(self._feed, outflow))
        packed = time.monotonic()
        self._meet(version)
        for trainer in self._round.trainers:
            if trainer == self._transport.rank:
                self._send(trainer, share, outflow)
            else:
                self._round.learn(trainer)
                self._round.broadcaster.skip(trainer, sum(self._round.sizes(trainer)), self._scratch)
        self._pack_s = packed - begun
        if outflow is None:
            self._send_s = time.monotonic() - packed

    def receive(self, received: Received, now: float) -> None:
        match received.message:
            case WeightsPull(version=version):
                with self._changed:
                    self._joined[received.source] = version
                    self._changed.notify_all()

    def tick(self, now: float) -> None:
        with self._changed:
            version = self._version
        if version > self._announced:
            self._announced = version
            for generator in self._joined:
                self._transport.send(generator, WeightsReady(version, meet=True))

    def _outflow(self, version: int) -> Outflow | None:
        """If the broadcast may begin while the share is packed: announce it. The way out, if this is the first root."""
        me, first = self._transport.rank, self._round.trainers[0]
        if not self._round.broadcaster.in_background or me not in self._round.specs or self._pack_s > self._send_s:
            return None
        self._announce(version)
        return self._round.broadcaster.outflow(me) if me == first else None

    def _feed(self, outflow: Outflow | None, data: Buffer) -> None:
        if outflow is not None and not self._missing():
            outflow.feed(data)

    def _announce(self, version: int) -> None:
        with self._changed:
            self._version = version
        self._transport.wake()

    def _meet(self, version: int) -> None:
        """Have the version announced, and wait until every generator has joined."""
        self._announce(version)
        with self._changed:
            if not self._changed.wait_for(lambda: not self._missing(), self._wait_limit_s):
                raise WaitLimitError(self._complaint())

    def _missing(self) -> list[int]:
        return [generator for generator, version in self._joined.items() if version < self._version]

    def _send(self, me: int, share: Share, outflow: Outflow | None) -> None:
        self._round.learn(me, share.manifest.specs)
        if share.manifest.specs != self._round.specs[me]:
            raise ValueError("the names, dtypes and shapes of a trainer's share must stay the same over all versions")
        checksums = np.array(share.manifest.checksums, np.uint64).view(np.uint8)
        end = share.data.size
        data = self._slab.room(end + checksums.size)
        data[end:] = checksums
        if outflow is None:
            self._round.broadcaster.run(me, data, mine=True)
        else:
            outflow.finish(data)

    def _complaint(self) -> str:
        missing = ", ".join(f"rank {g} (last joined for version {self._joined[g]})" for g in self._missing())
        return (
            f"Trainer rank {self._transport.rank} waited {self._wait_limit_s:g} s for generators to join the broadcast "
            f"of version {self._version} of the weights at a step boundary. Missing: {missing}. They have died or are "
            "stuck in a step; look at the ends of their logs."
        )


class CollectiveSubscriber:
    """The generator's end; see the module's diagram. `take` joins a broadcast as soon as every trainer is there.

    Args:
        broadcaster: on the group of all trainers and generators; used by nothing else.
        trainers: their ranks.
        verify: compare every tensor with its checksum; the trainers must send them.
    """

    handles: ClassVar[tuple[type[Message], ...]] = (WeightsReady,)

    def __init__(self, transport: Transport, broadcaster: Broadcaster, trainers: Sequence[int], verify: bool) -> None:
        self._transport = transport
        self._verify = verify
        self._round = _Round(broadcaster, trainers, verify)
        self._slabs = {trainer: Slab() for trainer in self._round.trainers}
        self._taken = -1
        self._held = False
        """The tensors of the version taken last are still in use."""
        self._said = -1
        """The version for which the courier has told the trainers that this rank joins."""
        # Shared by the two threads:
        self._lock = threading.Lock()
        self._announced = dict.fromkeys(self._round.trainers, -1)
        self._joining = -1

    @property
    def waiting(self) -> bool:
        """See `Subscriber.waiting`."""
        with self._lock:
            return self._to_join() is not None

    def take(self) -> Version | None:
        """Join the broadcast of the version that every trainer has announced, if it is a new one.

        Raises:
            PeerLostError: a rank went away, or didn't join within the group's time-out.
            HeadraceError: a tensor arrived damaged, or came from two trainers; names both.
        """
        with self._lock:
            version = self._to_join()
            if version is None:
                return None
            self._joining = version
        self._transport.wake()
        if self._held:
            raise RuntimeError(f"version {self._taken} must be released before version {version} is taken")
        tensors = assemble(version, {trainer: self._fill(trainer, version) for trainer in self._round.trainers})
        self._taken, self._held = version, True
        return Version(version, tensors, self._release)

    def receive(self, received: Received, now: float) -> None:
        match received.message:
            case WeightsReady(version=version):
                with self._lock:
                    self._announced[received.source] = version

    def tick(self, now: float) -> None:
        with self._lock:
            joining = self._joining
        if joining > self._said:
            self._said = joining
            for trainer in self._round.trainers:
                self._transport.send(trainer, WeightsPull(joining, bucket=0))

    def _to_join(self) -> int | None:
        """The version that every trainer has announced, if it is a new one. The caller holds the lock."""
        announced = set(self._announced.values())
        if announced == {self._taken} or len(announced) > 1:
            return None
        return announced.pop()

    def _fill(self, trainer: int, version: int) -> list[WeightTensor]:
        self._round.learn(trainer)
        end, more = self._round.sizes(trainer)
        data = self._slabs[trainer].room(end + more)
        self._round.broadcaster.run(trainer, data, mine=False)
        tensors = unpack(self._round.specs[trainer], data[:end])
        if self._verify:
            checksums = data[end:].copy().view(np.uint64)
            for tensor, expected in zip(tensors, checksums, strict=True):
                check_tensor(tensor, int(expected), version, trainer)
        return tensors

    def _release(self) -> None:
        self._held = False
