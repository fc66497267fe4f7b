"""The `mpi` weight transport: from a snapshot on the trainers, in the background, pulled by each generator.

    trainer: main       trainer: courier                generator: courier                 generator: main
    publish() copies ─▶ WeightsReady(v) ──────────────▶ announced by every trainer?
    its share into                                      a staging buffer free?
    a snapshot          ◀────────────── WeightsPull(v, b)  at most `WINDOW` buckets asked for at a time, per trainer
                        WeightsPart(v, b, n) + bytes ─▶ arrive in their place of the share, checked
                        ◀───────────────── WeightsTaken(v)  last byte is here             take() ─▶ Version
                        snapshot no longer pinned       all shares whole: ready ─────────▶  engine loads, release()

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

from headrace.comm.errors import WaitLimitError
from headrace.comm.messages import Message, WeightsPart, WeightsPull, WeightsReady, WeightsTaken
from headrace.comm.transport import Received, Transport
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


class MpiPublisher:
    """The trainer's end; see the module's diagram.

    Args:
        generators: their ranks.
        bucket_bytes: longest message.
        verify: send checksums along.
        wait_limit_s: longest wait of `publish` for a snapshot, in seconds.
    """

    handles: ClassVar[tuple[type[Message], ...]] = (WeightsPull, WeightsTaken)

    def __init__(
        self, transport: Transport, generators: Sequence[int], bucket_bytes: int, verify: bool, wait_limit_s: float
    ) -> None:
        self._transport = transport
        self._generators = tuple(generators)
        self._bucket_bytes = bucket_bytes
        self._verify = verify
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
            self._newest = version

    def receive(self, received: Received, now: float) -> None:
        match received.message:
            case WeightsPull(version=version, bucket=bucket):
                self._serve(received.source, version, bucket)
            case WeightsTaken(version=version):
                self._unpin(received.source, version)

    def drop(self, generator: int) -> None:
        """The generator has died: nothing is sent to it, no snapshot is kept for it. Called by the courier."""
        self._generators = tuple(each for each in self._generators if each != generator)
        with self._changed:
            for snapshot in self._snapshots:
                snapshot.pulled_by.pop(generator, None)
            self._changed.notify_all()

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
        return [s for s in self._snapshots if not s.pulled_by and (s.version < self._newest or s.version == -1)]

    def _has_room(self) -> bool:
        return len(self._snapshots) < SNAPSHOTS or bool(self._free())

    def _serve(self, generator: int, version: int, bucket: int) -> None:
        with self._changed:
            snapshot = next((s for s in self._snapshots if s.version == version), None)
            if snapshot is not None:
                snapshot.pulled_by[generator] = bucket
        if snapshot is None:
            self._transport.send(generator, WeightsPart(version, bucket, buckets=0, manifest=None))
        else:
            self._send_bucket(generator, snapshot, bucket)

    def _send_bucket(self, generator: int, snapshot: _Snapshot, bucket: int) -> None:
        """Straight from the snapshot: it is pinned until the generator has all of it."""
        data = snapshot.share.data
        piece = data[bucket * self._bucket_bytes : (bucket + 1) * self._bucket_bytes]
        part = WeightsPart(
            version=snapshot.version,
            bucket=bucket,
            buckets=max(1, -(-data.size // self._bucket_bytes)),
            manifest=snapshot.manifest if bucket == 0 else None,
        )
        self._transport.send(generator, part, [piece] if piece.size else [])

    def _unpin(self, generator: int, version: int) -> None:
        with self._changed:
            for snapshot in self._snapshots:
                if snapshot.version == version:
                    snapshot.pulled_by.pop(generator, None)
            self._changed.notify_all()

    def _complaint(self, version: int) -> str:
        holders = ", ".join(
            f"rank {generator} (version {s.version}, asked last for bucket {bucket})"
            for s in self._snapshots
            for generator, bucket in sorted(s.pulled_by.items())
        )
        return (
            f"Trainer rank {self._transport.rank} waited {self._wait_limit_s:g} s for a free snapshot to publish "
            f"version {version} of the weights. All {SNAPSHOTS} are being pulled by these generators: {holders}. "
            "Look at the ends of their logs; if they are only slow, raise run.wait_limit_s."
        )
