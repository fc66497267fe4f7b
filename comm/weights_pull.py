"""The generator's end of the `mpi` weight transport; the diagram is in `weights_mpi.py`.

Buckets arrive in their place of a staging buffer: nothing is copied here. With `delta` the buffer that holds the newest
version is filled, and where a trainer has that version, too, only the changes arrive and are made in place.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

import msgspec
import numpy as np

from headrace.comm import delta
from headrace.comm.errors import WaitLimitError
from headrace.comm.messages import Message, WeightsPart, WeightsPull, WeightsReady, WeightsTaken
from headrace.comm.transport import Buffer, Received, Transport
from headrace.comm.weights import Manifest, Slab, Version, WeightTensor, assemble, check_tensor, layout, unpack

WINDOW = 2
"""Buckets that a generator has asked one trainer for and not received: one on its way while the other is checked."""

STAGING = 2
"""Staging buffers: a version is pulled into one of them while the other is loaded."""
LASTING = 3
"""The same, where a version may be kept until the next one is loaded."""

_NOTHING = Manifest([], [])


@dataclass(slots=True, eq=False)
class _Incoming:
    """One trainer's share of the version being pulled. The slab outlives the version."""

    slab: Slab = field(default_factory=Slab)
    manifest: Manifest = _NOTHING
    data: Buffer = field(default_factory=lambda: np.empty(0, np.uint8))
    tensors: list[WeightTensor] = field(default_factory=list)
    """Views of `data`."""
    ends: list[int] = field(default_factory=list)
    """Where each tensor ends in `data`."""
    asked: int = 0
    arrived: int = 0
    buckets: int = 1
    """1 until bucket 0 says how many there are."""
    placed: int = 0
    """Bytes of `data` that have arrived or are on their way."""
    filled: int = 0
    """Bytes of `data` that have arrived."""
    checked: int = 0
    """Tensors whose checksum is right."""
    settled: bool = False
    """It is whole, or was given up; the trainer has been told."""
    heard: float = 0.0
    """When its trainer last sent anything, by the courier's clock."""

    def begin(self, now: float) -> None:
        self.settled, self.heard = False, now
        self.asked = self.arrived = self.placed = self.filled = self.checked = 0
        self.buckets = 1

    def unfold(self, manifest: Manifest, buckets: int) -> None:
        offsets, size = layout(manifest.specs)
        self.manifest, self.buckets = manifest, buckets
        self.data = self.slab.room(size)
        self.tensors = unpack(manifest.specs, self.data)
        self.ends = [offset + spec.nbytes for offset, spec in zip(offsets, manifest.specs, strict=True)]

    def next_place(self, nbytes: int) -> Buffer:
        start, self.placed = self.placed, self.placed + nbytes
        return self.data[start : self.placed]


@dataclass(slots=True, eq=False)
class _Staging:
    """Room for one whole version."""

    incoming: dict[int, _Incoming]
    """By trainer rank."""
    free: bool = True
    version: int = -1
    holds: int = -1
    """The version whose bytes are all in it; -1: none, or a mixture."""
    base: int = -1
    """While it is filled: the version that it held."""
    given_up: bool = False


class MpiSubscriber:
    """The generator's end. `take` never blocks.

    Args:
        trainers: their ranks; each sends a share of every version.
        verify: compare every tensor with its checksum; the trainers must send them.
        wait_limit_s: longest silence of a trainer that owes something, in seconds.
        delta: ask for the changes since the version held.
        buffers: most staging buffers; those after the second are made when all others are in use. With a third one a
            version may be kept until the next one is loaded.
        slab: makes the memory of one trainer's share in a staging buffer.

    Raises (from `receive` and `tick`, in the courier):
        WaitLimitError: a trainer was silent for longer, in the middle of a pull or while the others have announced a
            newer version; names it.
        HeadraceError: a tensor arrived damaged, or came from two trainers; names both.
    """

    handles: ClassVar[tuple[type[Message], ...]] = (WeightsReady, WeightsPart)

    def __init__(
        self,
        transport: Transport,
        trainers: Sequence[int],
        verify: bool,
        wait_limit_s: float,
        delta: bool = False,
        buffers: int = STAGING,
        slab: Callable[[], Slab] = Slab,
    ) -> None:
        self._transport = transport
        self._verify = verify
        self._delta = delta
        self._wait_limit_s = wait_limit_s
        self._announced = dict.fromkeys(trainers, -1)
        self._newest = -1
        """The newest version that all trainers have announced."""
        self._level_since = 0.0
        """When the trainers last agreed on the newest version, or came closer to it."""
        self._done = -1
        """The newest version that was pulled whole or given up."""
        self._filling: _Staging | None = None
        # Shared by the two threads:
        self._lock = threading.Lock()
        self._most, self._slab = buffers, slab
        self._staging = [self._new_staging() for _ in range(STAGING)]
        self._ready: tuple[_Staging, list[WeightTensor]] | None = None
        transport.place(WeightsPart, self._place)

    @property
    def waiting(self) -> bool:
        """See `Subscriber.waiting`."""
        with self._lock:
            return self._ready is not None

    def take(self) -> Version | None:
        """The newest whole version that wasn't taken yet, or None."""
        with self._lock:
            if self._ready is None:
                return None
            (staging, tensors), self._ready = self._ready, None
        return Version(staging.version, tensors, partial(self._release, staging), self._most > STAGING)

    @property
    def starved(self) -> bool:
        """Whether, after a `tick`, there is a version to pull and no buffer to pull it into. For the courier."""
        return self._filling is None and self._newest > self._done

    @property
    def last_asked(self) -> int:
        """The version of which all buckets are here or on their way, if one is being pulled; -1: none. For the
        courier."""
        if self._filling is None:
            return -1
        shares = self._filling.incoming.values()
        return self._filling.version if all(s.arrived and s.asked == s.buckets for s in shares) else -1

    def shares(self, version: int) -> dict[int, tuple[Slab, Manifest]]:
        """Where the share of each trainer is, of a version that was taken and not released. For the courier."""
        staging = next(staging for staging in self._staging if staging.holds == version)
        return {trainer: (incoming.slab, incoming.manifest) for trainer, incoming in staging.incoming.items()}

    def receive(self, received: Received, now: float) -> None:
        match received.message:
            case WeightsReady(version=version):
                self._hear(received.source, version, now)
            case WeightsPart() as part:
                self._take_in(received.source, part, received.buffers, now)

    def tick(self, now: float) -> None:
        if self._filling is None:
            self._begin_pull(now)
        self._check_limits(now)

    def _hear(self, trainer: int, version: int, now: float) -> None:
        was_level = len(set(self._announced.values())) == 1
        self._announced[trainer] = version
        newest = min(self._announced.values())
        if was_level or newest > self._newest:
            self._level_since = now
        self._newest = newest

    def _begin_pull(self, now: float) -> None:
        version = self._newest
        staging = self._reserve(version) if version > self._done else None
        if staging is None:
            return
        self._filling = staging
        for trainer, incoming in staging.incoming.items():
            incoming.begin(now)
            self._ask(trainer, incoming)

    def _new_staging(self) -> _Staging:
        return _Staging({trainer: _Incoming(self._slab()) for trainer in self._announced})

    def _reserve(self, version: int) -> _Staging | None:
        with self._lock:
            if len(self._staging) < self._most and not any(staging.free for staging in self._staging):
                self._staging.append(self._new_staging())
            staging = max((s for s in self._staging if s.free), key=lambda s: s.holds, default=None)
            if staging is not None:
                staging.free, staging.version, staging.given_up = False, version, False
                staging.base, staging.holds = staging.holds if self._delta else -1, -1
            return staging

    def _take_in(self, trainer: int, part: WeightsPart, buffers: list[Buffer], now: float) -> None:
        staging = self._filling
        assert staging is not None, "a pull ends only when nothing is on its way"
        assert staging.version == part.version
        incoming = staging.incoming[trainer]
        incoming.arrived += 1
        incoming.heard = now
        if part.buckets == 0:
            staging.given_up = True
        else:
            self._count(trainer, incoming, part, buffers)
        for each in staging.incoming:
            self._advance(each, staging)
        if all(share.settled for share in staging.incoming.values()):
            self._finish(staging)

    def _place(self, trainer: int, part: Message, sizes: list[int]) -> list[Buffer]:
        """Where a bucket is to arrive: behind those before it; changes anywhere."""
        assert isinstance(part, WeightsPart)
        assert self._filling is not None, "a pull ends only when nothing is on its way"
        incoming = self._filling.incoming[trainer]
        if part.manifest is not None:
            incoming.unfold(msgspec.msgpack.decode(part.manifest, type=Manifest), part.buckets)
        place = incoming.next_place(part.nbytes)
        if part.base >= 0:
            return [np.empty(size, np.uint8) for size in sizes]
        return [place] if sizes else []

    def _count(self, trainer: int, incoming: _Incoming, part: WeightsPart, buffers: list[Buffer]) -> None:
        assert part.bucket == incoming.arrived - 1, "messages of one pair keep their order"
        if part.base >= 0:
            delta.apply(incoming.data[incoming.filled : incoming.filled + part.nbytes], *buffers)
        incoming.filled += part.nbytes
        if self._verify:
            self._check_arrived(trainer, incoming, part.version)

    def _check_arrived(self, trainer: int, incoming: _Incoming, version: int) -> None:
        """Check the tensors whose last byte has arrived, so that the work is spread over the pull."""
        while incoming.checked < len(incoming.tensors) and incoming.ends[incoming.checked] <= incoming.filled:
            n = incoming.checked
            check_tensor(incoming.tensors[n], incoming.manifest.checksums[n], version, trainer)
            incoming.checked += 1

    def _advance(self, trainer: int, staging: _Staging) -> None:
        """Ask for what may be asked for; if nothing is left to ask for or to come, tell the trainer."""
        incoming = staging.incoming[trainer]
        while not staging.given_up and incoming.asked < incoming.buckets and incoming.asked - incoming.arrived < WINDOW:
            self._ask(trainer, incoming)
        if incoming.asked == incoming.arrived and not incoming.settled:
            incoming.settled = True
            self._transport.send(trainer, WeightsTaken(staging.version))

    def _ask(self, trainer: int, incoming: _Incoming) -> None:
        assert self._filling is not None
        self._transport.send(trainer, WeightsPull(self._filling.version, incoming.asked, self._filling.base))
        incoming.asked += 1

    def _finish(self, staging: _Staging) -> None:
        self._filling = None
        self._done = staging.version
        if staging.given_up:
            self._release(staging)
            return
        staging.holds = staging.version
        tensors = assemble(staging.version, {t: incoming.tensors for t, incoming in staging.incoming.items()})
        with self._lock:
            if self._ready is not None:
                self._ready[0].free = True
            self._ready = staging, tensors

    def _release(self, staging: _Staging) -> None:
        with self._lock:
            staging.free = True
        self._transport.wake()

    def _check_limits(self, now: float) -> None:
        if self._filling is not None:
            owing = {t: share for t, share in self._filling.incoming.items() if not share.settled}
            silent = [t for t, share in owing.items() if now - share.heard > self._wait_limit_s]
            if silent:
                raise WaitLimitError(self._complaint(f"its share of version {self._filling.version}", silent))
        newest = max(self._announced.values())
        behind = [trainer for trainer, version in self._announced.items() if version < newest]
        if behind and now - self._level_since > self._wait_limit_s:
            raise WaitLimitError(self._complaint(f"the announcement of version {newest}", behind))

    def _complaint(self, what: str, trainers: list[int]) -> str:
        last = ", ".join(f"rank {trainer} ({self._last_word(trainer)})" for trainer in trainers)
        return (
            f"Generator rank {self._transport.rank} waited more than {self._wait_limit_s:g} s for {what} of the "
            f"weights from each of these trainers: {last}. They have died or are stuck; look at the ends of their logs."
        )

    def _last_word(self, trainer: int) -> str:
        said = f"last announced version {self._announced[trainer]}"
        if self._filling is None:
            return said
        incoming = self._filling.incoming[trainer]
        return f"{said}, sent {incoming.arrived} of {incoming.asked} buckets asked for"
