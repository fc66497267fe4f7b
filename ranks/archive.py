"""The archive: the groups that generators have made, on disk until a checkpoint makes them dispensable.

    generator's main thread ── put(group) ──▶ queue ──▶ writer thread
    courier ── Covered ────────────────────▶             │ often: up to 20 times a second
                                                         ▼
                                           small segments, a few groups each
                                                         │ 30 s, 64 MiB, a checkpoint or the end: made one, synced
                                                         ▼
                                           archive/0003-00002-000017.h5 ──▶ deleted once all its groups are settled
                                                                            in a durable checkpoint

A segment is written whole under another name and then renamed, so there is never half of one, whenever the process is
killed: no more is lost than the groups of the last moment, of about a second on a slow disk. A segment has one writer
and needs no locks. Names are launch of the run, rank and a running number.

    HDF5 file        for people and other tools: a group TICKET_ATTEMPT with one dataset per column, the samples one
                     after the other, and `header`, their lengths, rewards and texts as msgpack (`comm.columns`)
    index            msgpack: for each group where these datasets lie in the file, and a checksum of them
    tail             length and checksum of the index, magic number

Segments are built in memory and read by their index, because HDF5's library crashes the process (segmentation fault)
when the disk is full under a file that it has open, and when it opens a damaged one. So a group that isn't what was
written is named and passed over, and those beside it are read.
"""

from __future__ import annotations

import os
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import ClassVar, NamedTuple

import msgspec
import numpy as np
import xxhash

from headrace.comm.columns import Group, pack_groups
from headrace.comm.files import flush
from headrace.comm.messages import Covered, Message
from headrace.comm.trajectories import TRAJECTORY, GroupKey, unpack_trajectories
from headrace.comm.trajectory import Trajectory
from headrace.comm.transport import Buffer, Received

MIB = 1 << 20

SEGMENT_BYTES = 64 * MIB
SEGMENT_S = 30.0
"""Small segments are made one when they are together this large, or the first of them is this old, in seconds."""

SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0
PAUSE = 20
"""After a small segment the writer pauses so many times as long as writing took, within these bounds, in seconds: it
takes little of the processor, and doesn't flood a slow file system with files."""

QUEUE_BYTES = 256 * MIB
"""Most that waits for the disk; what comes then isn't archived."""

SUFFIX, PARTIAL = ".h5", ".writing"
MAGIC = b"HDRACE02"
TAIL = struct.Struct("<QQ8s")
"""Bytes of the index, their XXH3-64, magic number."""


class Record(NamedTuple):
    """A group to be archived."""

    group: Group[GroupKey]
    finished: bool


@dataclass(frozen=True, slots=True)
class Archived:
    """A group as it was read."""

    key: GroupKey
    finished: bool
    """False: it was at work when the run was asked to stop; its samples may lack tokens and rewards (NaN)."""
    launch: int
    """The launch of the run that made it: 0, 1, …"""
    trajectories: list[Trajectory]


@dataclass(slots=True)
class Segment:
    """One file, as it was read."""

    path: Path
    groups: list[Archived] = field(default_factory=list)
    damaged: list[str] = field(default_factory=list)
    """One sentence for everything that can't be used."""


class _Entry(msgspec.Struct, frozen=True, array_like=True):
    """A group in the index."""

    ticket: int
    attempt: int
    finished: bool
    places: list[tuple[int, int]]
    """(offset, bytes) of the header and of each column."""
    xxh3: bytes


_entries = msgspec.msgpack.Decoder(list[_Entry])


# Reading


def read_share(folder: Path, launch: int, index: int, of: int) -> Iterator[Segment]:
    """The segments of launches before `launch` that fall to reader `index` of `of`, each of them to one reader."""
    earlier = [path for path in sorted(folder.glob(f"*-*-*{SUFFIX}")) if launch_of(path) < launch]
    return (read_segment(path) for path in earlier[index::of])


def read_segment(path: Path) -> Segment:
    """All of a segment that is what was written; never raises for what is in the file."""
    segment = Segment(path)
    try:
        data = np.fromfile(path, np.uint8)
    except OSError as error:
        segment.damaged.append(f"{path} can't be read: {error.strerror}.")
        return segment
    entries = _read_index(data)
    if entries is None:
        segment.damaged.append(f"{path} isn't whole, or damaged at its end: none of its groups can be used.")
    for entry in entries or ():
        parts = [data[start : start + size] for start, size in entry.places]
        if _checksum(entry.ticket, entry.attempt, entry.finished, parts) == entry.xxh3:
            [(key, trajectories)] = unpack_trajectories(parts[0].tobytes(), parts[1:]).items()
            segment.groups.append(Archived(key, entry.finished, launch_of(path), trajectories))
        else:
            name = f"Ticket {entry.ticket}, attempt {entry.attempt}, in {path}"
            segment.damaged.append(f"{name} is damaged (its checksum differs) and can't be used.")
    return segment


def launches_in(folder: Path) -> set[int]:
    """The launches that have left segments."""
    return {launch_of(path) for path in folder.glob(f"*-*-*{SUFFIX}")}


def launch_of(path: Path) -> int:
    """The launch of the run that wrote a segment."""
    return int(path.name.partition("-")[0])


def _read_index(data: Buffer) -> list[_Entry] | None:
    """None if it isn't what was written."""
    if data.nbytes < TAIL.size:
        return None
    size, digest, magic = TAIL.unpack(data[-TAIL.size :].tobytes())
    if magic != MAGIC or size > data.nbytes - TAIL.size:
        return None
    index = data[data.nbytes - TAIL.size - size : -TAIL.size].tobytes()
    return _entries.decode(index) if xxhash.xxh3_64_intdigest(index) == digest else None


def _checksum(ticket: int, attempt: int, finished: bool, parts: Iterable[Buffer]) -> bytes:
    """XXH3-128."""
    digest = xxhash.xxh3_128(f"{ticket} {attempt} {finished} ".encode())
    for part in parts:
        digest.update(part.data)
    return digest.digest()


# Writing


def image_of(records: Sequence[Record]) -> bytes:
    """A segment with these groups, as the bytes of its file."""
    import h5py  # only ranks that write need it

    index = []
    with h5py.File("segment", "w", driver="core", backing_store=False) as file:
        for (ticket, attempt), group, finished in ((r.group.key, *r) for r in records):
            header, buffers = pack_groups(TRAJECTORY, [group])
            parts = [np.frombuffer(header, np.uint8), *buffers]
            place = file.create_group(f"{ticket:09d}_{attempt}{'' if finished else '_unfinished'}")
            values = {"header": parts[0]} | {
                name: column.data for name, column in group.columns.items() if not TRAJECTORY.fields[name].scalar
            }
            datasets = [place.create_dataset(name, data=data).id for name, data in values.items()]
            places = [(dataset.get_offset() or 0, part.nbytes) for dataset, part in zip(datasets, parts, strict=True)]
            index.append(_Entry(ticket, attempt, finished, places, _checksum(ticket, attempt, finished, parts)))
        file.flush()
        image: bytes = file.id.get_file_image()
    encoded = msgspec.msgpack.encode(index)
    return image + encoded + TAIL.pack(len(encoded), xxhash.xxh3_64_intdigest(encoded), MAGIC)


class ArchiveFiles:
    """The segments of one writer. No threads; raises `OSError` when the disk is full or gone, and goes on after it."""

    def __init__(self, folder: Path, launch: int, rank: int, adopted: Iterable[Segment] = ()) -> None:
        """`adopted`: segments of earlier launches that are this writer's to delete."""
        self._folder = folder
        self._names = (folder / f"{launch:04d}-{rank:05d}-{number:06d}{SUFFIX}" for number in count())
        self._tickets = {segment.path: {group.key[0] for group in segment.groups} for segment in adopted}
        """Of every segment there is."""
        self._small: list[Path] = []
        self._recent: list[Record] = []
        """The groups of the small segments, and what couldn't be written yet."""
        self._since = 0.0

    @property
    def due(self) -> float:
        """When the small segments should be made one, by the monotonic clock."""
        if sum(record.group.nbytes for record in self._recent) >= SEGMENT_BYTES:
            return 0.0
        return self._since + SEGMENT_S if self._recent else float("inf")

    def add(self, records: Sequence[Record]) -> None:
        """Write a small segment."""
        if not self._recent:
            self._since = time.monotonic()
        self._recent += records
        self._small.append(self._write(records))

    def merge(self) -> None:
        """Make the small segments one that is on the disk even if the machine stops."""
        small, recent = self._small, self._recent
        self._small, self._recent = [], []
        if recent:
            self._write(recent, sync=True)
        for path in small:
            self._delete(path)

    def cover(self, settled: Callable[[int], bool]) -> None:
        """A durable checkpoint has settled these tickets: delete what isn't needed any more."""
        self._recent = [record for record in self._recent if not settled(record.group.key[0])]
        for path in [path for path, tickets in self._tickets.items() if all(map(settled, tickets))]:
            self._delete(path)
        self._small = [path for path in self._small if path in self._tickets]
        self.merge()

    def _write(self, records: Sequence[Record], sync: bool = False) -> Path:
        path = next(self._names)
        partial = path.with_suffix(PARTIAL)
        self._folder.mkdir(exist_ok=True)
        try:
            with partial.open("wb") as file:
                file.write(image_of(records))
                if sync:
                    os.fsync(file.fileno())
            partial.rename(path)
        except OSError:
            partial.unlink(missing_ok=True)
            raise
        if sync:
            flush(self._folder)
        self._tickets[path] = {record.group.key[0] for record in records}
        return path

    def _delete(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        del self._tickets[path]


def settled_by(covered: Covered) -> Callable[[int], bool]:
    """Whether a ticket is settled for good."""
    numbers, open_ = covered.next_numbers, set(covered.open)
    return lambda ticket: ticket < numbers[ticket % len(numbers)] and ticket not in open_


class ArchiveWriter:
    """The thread that writes one generator's segments, and the service that learns what checkpoints cover. Nothing here
    waits for the disk."""

    handles: ClassVar[tuple[type[Message], ...]] = (Covered,)

    def __init__(
        self, files: ArchiveFiles, on_error: Callable[[BaseException], None], say: Callable[[str], None]
    ) -> None:
        """`say` takes a sentence when the disk fails: the run goes on, without an archive of what comes meanwhile."""
        self._files = files
        self._on_error = on_error
        self._say = say
        self._lock = threading.Lock()
        self._waiting: list[Record] = []
        self._settled: Callable[[int], bool] | None = None
        self._left_out = 0
        self._works = True
        self._wake, self._closing = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="archive", daemon=True)
        self._thread.start()

    def put(self, group: Group[GroupKey], finished: bool = True) -> None:
        """Archive a group."""
        with self._lock:
            waiting = sum(record.group.nbytes for record in self._waiting)
            if waiting + group.nbytes > QUEUE_BYTES:
                self._left_out += 1
            else:
                self._waiting.append(Record(group, finished))
        self._wake.set()

    def receive(self, received: Received, now: float) -> None:
        assert isinstance(received.message, Covered)
        with self._lock:
            self._settled = settled_by(received.message)
        self._wake.set()

    def tick(self, now: float) -> None:
        """Nothing happens by itself."""

    def close(self) -> None:
        """Write what is there and end; `closed` tells when. Nothing may be put after this."""
        self._closing.set()
        self._wake.set()

    @property
    def closed(self) -> bool:
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                self._wake.wait(min(max(0.0, self._files.due - time.monotonic()), SEGMENT_S))
                self._wake.clear()
                began = time.monotonic()
                self._turn()
                took = time.monotonic() - began
                self._closing.wait(min(max(PAUSE * took, SHORTEST_PAUSE_S), LONGEST_PAUSE_S))
            self._turn(last=True)
        except BaseException as error:
            self._on_error(error)

    def _turn(self, last: bool = False) -> None:
        with self._lock:
            records, self._waiting = self._waiting, []
            settled, self._settled = self._settled, None
            left_out, self._left_out = self._left_out, 0
        if left_out:
            self._complain(f"the disk is too slow, {left_out} groups were passed over")
        if records:
            self._try(lambda: self._files.add(records))
        if settled is not None:
            self._try(lambda: self._files.cover(settled))
        if last or self._files.due <= time.monotonic():
            self._try(self._files.merge)

    def _try(self, action: Callable[[], None]) -> None:
        try:
            action()
        except OSError as error:
            self._complain(error.strerror or str(error))
        else:
            self._works = True

    def _complain(self, reason: str) -> None:
        """Once until it works again."""
        if self._works:
            self._say(
                f"The archive of finished groups can't be written ({reason}). The run goes on; what isn't in the "
                "archive is generated again if the run is ended before its next checkpoint."
            )
        self._works = False
