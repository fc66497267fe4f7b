"""The `mpi` weight transport: from a snapshot on the trainers, in the background, pulled by each generator.

    trainer: main       trainer: courier                generator: courier                 generator: main
    publish() copies ─▶ WeightsReady(v) ──────────────▶ announced by every trainer?
    its share into                                      a staging buffer free?
    a snapshot          ◀────────────── WeightsPull(v, b)  at most `WINDOW` buckets asked for at a time, per trainer
                        WeightsPart(v, b, n) + bytes ─▶ arrive in their place of the share, checked
                        ◀───────────────── WeightsTaken(v)  last byte is here             take() ─▶ Version
                        snapshot no longer pinned       all shares whole: ready ─────────▶  engine loads, release()

    With `delta` a generator says with `WeightsPull` which version it has. If the trainer still has that one, and if it
    is sooner done so, the bytes of a part are what has changed since.

    a snapshot:         free → being filled → newest → (pinned by generators that pull it) → free
    a staging buffer:   free → filling → ready → held by the main thread → free
                               └─ a trainer no longer had the version ─▶ free      └─ or: a newer one is ready ─▶ free

The trainer never waits for a generator while a snapshot is free. A generator skips versions when trainers publish
faster than it can pull, but never goes back, and never sees a version that isn't whole. A version that a trainer has
replaced in the meantime is answered by `WeightsPart(buckets=0)`; the generator then waits for the next one. The
generator's end is `weights_pull.py`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import msgspec
import numpy as np

from headrace.comm import delta
from headrace.comm.delta import Cheaper
from headrace.comm.errors import WaitLimitError
from headrace.comm.messages import Message, WeightsPart, WeightsPull, WeightsReady, WeightsTaken
from headrace.comm.transport import Buffer, Received, Transport
from headrace.comm.weights import Manifest, Share, Slab, WeightTensor, pack

SNAPSHOTS = 3
"""Most snapshots a trainer keeps: the newest, one still being pulled, one to be filled. The third is only allocated
when a slow generator pins the second."""

_NOTHING = Share(Manifest([], []), np.empty(0, np.uint8))


@dataclass(slots=True, eq=False)
class _Snapshot:
    """One version of this trainer's share. The slab outlives the version."""

    slab: Slab = field(default_factory=Slab)
    version: int = -1
    """-1 while it holds none, or is being filled."""
    share: Share = _NOTHING
    manifest: bytes = b""
    pulled_by: dict[int, int] = field(default_factory=dict)
    """Generator rank → the bucket it asked for last. Whoever is in here pins the snapshot."""
    compared_by: set[int] = field(default_factory=set)
    """Generators that are told what has changed since this version; they pin it, too."""
    by_changes: bool = False
    """Told by its changes, where the generator has a version that is here."""
    changes: dict[tuple[int, int], tuple[Buffer, ...]] = field(default_factory=dict)
    """(older version, bucket) → gaps and values; none where these are longer than the bucket."""

    @property
    def pinned(self) -> bool:
        return bool(self.pulled_by or self.compared_by)


class MpiPublisher:
    """The trainer's end; see the module's diagram.

    Args:
        generators: their ranks.
        bucket_bytes: longest message.
        verify: send checksums along.
        wait_limit_s: longest wait of `publish` for a snapshot, in seconds.
        cheaper: decides between changes and all bytes; None always sends all.
    """

    handles: ClassVar[tuple[type[Message], ...]] = (WeightsPull, WeightsTaken)

    def __init__(
        self,
        transport: Transport,
        generators: Sequence[int],
        bucket_bytes: int,
        verify: bool,
        wait_limit_s: float,
        cheaper: Cheaper | None = None,
    ) -> None:
        self._transport = transport
        self._generators = tuple(generators)
        self._bucket_bytes = bucket_bytes
        self._verify = verify
        self._cheaper = cheaper
        self._most = SNAPSHOTS + (cheaper is not None)  # the version that another one is compared with
        self._pulls: dict[int, tuple[float, bool]] = {}
        """Generator → when it began to pull, and whether it is told changes."""
        self._wait_limit_s = wait_limit_s
        self._announced = -1
        # Shared by the two threads:
        self._changed = threading.Condition()
        self._snapshots: list[_Snapshot] = []
        self._newest = -1

    def publish(self, version: int, tensors: Iterable[WeightTensor]) -> None:
        """Copy this rank's share into a snapshot that generators pull from; see `Publisher.publish`."""
        if version <= self._newest:
            raise ValueError(f"version {version} published after version {self._newest}")
        snapshot = self._vacate(version)
        share = pack(tensors, snapshot.slab, self._verify)
        manifest = msgspec.msgpack.encode(share.manifest)
        with self._changed:
            snapshot.share, snapshot.manifest, snapshot.version = share, manifest, version
            snapshot.by_changes, snapshot.changes = self._cheaper is not None and self._cheaper.choose(), {}
            self._newest = version
        self._transport.wake()

    def receive(self, received: Received, now: float) -> None:
        match received.message:
            case WeightsPull() as pull:
                self._serve(received.source, pull, now)
            case WeightsTaken(version=version):
                self._end_pull(received.source, version, now)

    def drop(self, generator: int) -> None:
        """The generator has died: nothing is sent to it, no snapshot is kept for it. Called by the courier."""
        self._generators = tuple(each for each in self._generators if each != generator)
        self._pulls.pop(generator, None)
        with self._changed:
            self._unpin(generator)

    def add(self, generator: int) -> None:
        """One more generator pulls from here, if it doesn't yet. Called by the courier."""
        if generator in self._generators:
            return
        self._generators = (*self._generators, generator)
        if self._announced >= 0:
            self._transport.send(generator, WeightsReady(self._announced, meet=False))

    def tick(self, now: float) -> None:
        with self._changed:
            newest = self._newest
        if newest > self._announced:
            self._announced = newest
            for generator in self._generators:
                self._transport.send(generator, WeightsReady(newest, meet=False))

    def _vacate(self, version: int) -> _Snapshot:
        """A snapshot that nobody pulls from, hidden from the courier; waits for one if need be."""
        with self._changed:
            if not self._changed.wait_for(self._has_room, self._wait_limit_s):
                raise WaitLimitError(self._complaint(version))
            free = self._free()
            if not free:
                free = [_Snapshot()]
                self._snapshots += free
            snapshot = min(free, key=lambda s: s.version)
            snapshot.version = -1
            return snapshot

    def _free(self) -> list[_Snapshot]:
        """Snapshots that may be overwritten. Never the newest: there must always be one to pull."""
        return [s for s in self._snapshots if not s.pinned and (s.version < self._newest or s.version == -1)]

    def _has_room(self) -> bool:
        return len(self._snapshots) < self._most or bool(self._free())

    def _serve(self, generator: int, pull: WeightsPull, now: float) -> None:
        with self._changed:
            snapshot, base = self._find(pull.version), None
            if snapshot is not None:
                snapshot.pulled_by[generator] = pull.bucket
                base = self._find(pull.base) if snapshot.by_changes else None
            if base is not None:
                base.compared_by.add(generator)
        if snapshot is None:
            self._transport.send(generator, WeightsPart(pull.version, pull.bucket, buckets=0, manifest=None))
            return
        if pull.bucket == 0:
            self._pulls[generator] = now, base is not None
        self._send_bucket(generator, snapshot, pull.bucket, base)

    def _find(self, version: int) -> _Snapshot | None:
        """The snapshot of a version that is still here. The caller holds the lock."""
        return next((s for s in self._snapshots if s.version == version >= 0), None)

    def _send_bucket(self, generator: int, snapshot: _Snapshot, bucket: int, base: _Snapshot | None) -> None:
        """Straight from the snapshot: it is pinned until the generator has all of it."""
        data = snapshot.share.data
        piece = self._piece(snapshot, bucket)
        changes = self._changes(snapshot, bucket, base) if base is not None else ()
        part = WeightsPart(
            version=snapshot.version,
            bucket=bucket,
            buckets=max(1, -(-data.size // self._bucket_bytes)),
            manifest=snapshot.manifest if bucket == 0 else None,
            nbytes=piece.size,
            base=base.version if base is not None and changes else -1,
        )
        self._transport.send(generator, part, changes or ([piece] if piece.size else []))

    def _piece(self, snapshot: _Snapshot, bucket: int) -> Buffer:
        return snapshot.share.data[bucket * self._bucket_bytes : (bucket + 1) * self._bucket_bytes]

    def _changes(self, snapshot: _Snapshot, bucket: int, base: _Snapshot) -> tuple[Buffer, ...]:
        """Of a bucket since another version: found once for all generators; none where all bytes are less."""
        if base.share.manifest.specs != snapshot.share.manifest.specs:
            return ()
        key = base.version, bucket
        if key not in snapshot.changes:
            snapshot.changes[key] = delta.encode(self._piece(base, bucket), self._piece(snapshot, bucket)) or ()
        return snapshot.changes[key]

    def _end_pull(self, generator: int, version: int, now: float) -> None:
        """The generator has the version, or has given it up, as it does when it isn't here any more."""
        with self._changed:
            snapshot = self._find(version)
            self._unpin(generator)
            began = self._pulls.pop(generator, None)
            if began is not None and snapshot is not None and self._cheaper is not None:
                self._cheaper.took(began[1], snapshot.share.data.size, now - began[0])

    def _unpin(self, generator: int) -> None:
        """A generator pulls one version at a time. The caller holds the lock."""
        for snapshot in self._snapshots:
            snapshot.pulled_by.pop(generator, None)
            snapshot.compared_by.discard(generator)
        self._changed.notify_all()

    def _complaint(self, version: int) -> str:
        holders = ", ".join(
            f"rank {generator} (version {s.version}, asked last for bucket {bucket})"
            for s in self._snapshots
            for generator, bucket in sorted(s.pulled_by.items())
        )
        return (
            f"Trainer rank {self._transport.rank} waited {self._wait_limit_s:g} s for a free snapshot to publish "
            f"version {version} of the weights. All {self._most} are being pulled by these generators: {holders}. "
            "Look at the ends of their logs; if they are only slow, raise run.wait_limit_s."
        )
