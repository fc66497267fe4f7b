"""The archive: the groups that generators have made, on disk until a checkpoint makes them dispensable.

    generator's main thread ── put(group) ──▶ queue ──▶ writer thread
    courier ── Covered ────────────────────▶             │ often: up to 20 times a second
                                                         ▼
                                           small segments, a few groups each
                                                         │ 30 s, 64 MiB, a checkpoint, the end, or little memory:
                                                         ▼ made one, synced. From then on groups can be read back
                                           archive/0003-00002-000017.h5 ──▶ deleted once all its groups are settled
                                                                            in a durable checkpoint

A segment is written whole under another name and then renamed, so there is never half of one, whenever the process is
killed: no more is lost than the groups of the last moment, of about a second on a slow disk. A segment has one writer
and needs no locks. Names are launch of the run, rank and a running number. What is in it: `segments.py`.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from pathlib import Path
from typing import ClassVar

from headrace.comm.columns import Group
from headrace.comm.files import flush
from headrace.comm.messages import Covered, Message
from headrace.comm.spilling import SpillingStore
from headrace.comm.trajectories import GroupKey
from headrace.comm.transport import Received
from headrace.ranks.segments import PARTIAL, SUFFIX, Record, Segment, image_of, lost, read_group

MIB = 1 << 20

SEGMENT_BYTES = 64 * MIB
SEGMENT_S = 30.0
"""Small segments are made one when they are together this large, or the first of them is this old, in seconds."""

SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0
PAUSE = 20
"""After a small segment the writer pauses so many times as long as writing took, within these bounds, in seconds: it
takes little of the processor, and doesn't flood a slow file system with files."""

QUEUE_BYTES = 256 * MIB
"""Most that waits for the disk, unless it is a single group; what comes then isn't archived."""


class ArchiveFiles:
    """The segments of one writer. No threads; raises `OSError` when the disk is full or gone, and goes on after it."""

    def __init__(self, folder: Path, launch: int, rank: int) -> None:
        self.let_go: Callable[[list[GroupKey], bool], None] = lambda keys, written: None
        """Called with groups that aren't needed here any more, and whether `read` finds them: see `SpillingStore`."""
        self._folder = folder
        self._names = (folder / f"{launch:04d}-{rank:05d}-{number:06d}{SUFFIX}" for number in count())
        self._tickets: dict[Path, set[int]] = {}
        """Of every segment there is."""
        self._paths: dict[GroupKey, Path] = {}
        """Where finished groups lie that needn't be written again."""
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

    def adopt(self, segment: Segment) -> None:
        """A segment of an earlier launch is this writer's to read and to delete."""
        self._tickets[segment.path] = {group.key[0] for group in segment.groups}
        self._paths |= {group.key: segment.path for group in segment.groups if group.finished}

    def read(self, key: GroupKey) -> Group[GroupKey]:
        """A group that was let go as written. Any thread may call this.

        Raises:
            LostGroupsError: it isn't there any more, or damaged.
        """
        path = self._paths.get(key)
        if path is None:
            raise lost(key, self._folder, "no segment holds it any more")
        return read_group(path, key)

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
        try:
            if recent:
                path = self._write(recent, sync=True)
                self._paths |= {record.group.key: path for record in recent if record.finished}
        except OSError:
            self._let_go(recent, written=False)
            raise
        self._let_go(recent, written=True)
        for path in small:
            self._delete(path)

    def cover(self, settled: Callable[[int], bool]) -> None:
        """A durable checkpoint has settled these tickets: delete what isn't needed any more."""
        self._let_go([record for record in self._recent if settled(record.group.key[0])], written=False)
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
        self._paths = {key: other for key, other in self._paths.items() if other != path}

    def _let_go(self, records: Iterable[Record], written: bool) -> None:
        keys = [record.group.key for record in records if record.finished]
        if keys:
            self.let_go(keys, written)


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
        self._hurry = False
        self._works = True
        self._wake, self._closing = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="archive", daemon=True)
        self._thread.start()

    def put(self, group: Group[GroupKey], finished: bool = True) -> None:
        """Archive a group."""
        with self._lock:
            waiting = sum(record.group.nbytes for record in self._waiting)
            too_much = bool(waiting) and waiting + group.nbytes > QUEUE_BYTES
            if too_much:
                self._left_out += 1
            else:
                self._waiting.append(Record(group, finished))
        if too_much and finished:
            self._files.let_go([group.key], False)
        self._wake.set()

    def keep_for(self, store: SpillingStore[GroupKey]) -> None:
        """Archive what is put into the store from now on, and let it spill."""
        self._files.let_go = store.let_go
        store.spill_to(self.put, self.hurry, self._files.read)

    def hurry(self) -> None:
        """Have all that was put on the disk soon."""
        with self._lock:
            self._hurry = True
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
            hurry, self._hurry = self._hurry, False
            left_out, self._left_out = self._left_out, 0
        if left_out:
            self._complain(f"the disk is too slow, {left_out} groups were passed over")
        if records:
            self._try(lambda: self._files.add(records))
        if settled is not None:
            self._try(lambda: self._files.cover(settled))
        if last or hurry or self._files.due <= time.monotonic():
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
