"""A segment of the archive: one file with groups, written and read whole, or read group by group.

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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec
import numpy as np
import xxhash

from headrace.comm.columns import Group, pack_groups, unpack_groups
from headrace.comm.spilling import LostGroupsError
from headrace.comm.trajectories import TRAJECTORY, GroupKey, unpack_trajectories
from headrace.comm.trajectory import Trajectory
from headrace.comm.transport import Buffer

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


def half_written(folder: Path, launch: int, index: int, of: int) -> Iterable[Path]:
    """What writers of launches before `launch` were killed at; each falls to one reader."""
    earlier = [path for path in sorted(folder.glob(f"*-*-*{PARTIAL}")) if launch_of(path) < launch]
    return earlier[index::of]


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


def read_group(path: Path, key: GroupKey) -> Group[GroupKey]:
    """One finished group of a segment, read by itself.

    Raises:
        LostGroupsError: the file has gone, or the group in it isn't what was written.
    """
    try:
        with path.open("rb") as file:
            entries = _read_index(_ending(file)) or []
            found = [entry for entry in entries if entry.finished and (entry.ticket, entry.attempt) == key]
            parts = [_bytes_at(file, *place) for entry in found for place in entry.places]
    except OSError as error:
        raise lost(key, path, error.strerror or str(error)) from error
    if len(found) != 1 or _checksum(*key, True, parts) != found[0].xxh3:
        raise lost(key, path, "it isn't what was written")
    [group] = unpack_groups(TRAJECTORY, parts[0].tobytes(), parts[1:]).values()
    return Group(key, group.samples, group.columns, group.texts)


def lost(key: GroupKey, path: Path, reason: str) -> LostGroupsError:
    """The error for a group that was to be in this file, or folder."""
    return LostGroupsError(f"{TRAJECTORY.name(key)} can't be read back from {path} ({reason}).", [key])


def _ending(file: BinaryIO) -> Buffer:
    """The index and the tail."""
    end = file.seek(0, os.SEEK_END)
    tail = _bytes_at(file, max(0, end - TAIL.size), min(end, TAIL.size))
    size = TAIL.unpack(tail.tobytes())[0] if tail.nbytes == TAIL.size else 0
    start = max(0, end - TAIL.size - size)
    return _bytes_at(file, start, end - start)


def _bytes_at(file: BinaryIO, start: int, size: int) -> Buffer:
    """So many bytes, or fewer at the end of the file."""
    file.seek(start)
    return np.fromfile(file, np.uint8, size)


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
