from __future__ import annotations

import errno
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import h5py
import numpy as np
import pytest
from archive_program import group
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.comm.messages import Covered, Salvaged
from headrace.comm.simulated import SimulatedNetwork
from headrace.comm.spilling import LostGroupsError
from headrace.comm.trajectories import COLUMN_DTYPES, TrajectoryStore, make_group, trajectories_of
from headrace.comm.trajectory import Trajectory, Unit
from headrace.comm.transport import Received
from headrace.ranks import archive
from headrace.ranks.archive import ArchiveFiles, ArchiveWriter
from headrace.ranks.config import JobConfig, RanksConfig
from headrace.ranks.heartbeat import MainState
from headrace.ranks.run import Rank
from headrace.ranks.salvage import open_archive
from headrace.ranks.segments import Record, image_of, launches_in, read_group, read_segment, read_share
from headrace.ranks.topology import plan_roles

PROGRAM = Path(__file__).with_name("archive_program.py")
LOCKLESS = Path(__file__).with_name("lockless_program.py")
ROOT = Path(__file__).parents[2]


def same(one: list[Trajectory], other: list[Trajectory]) -> bool:
    """Bit by bit, NaN included."""

    def bits(samples: list[Trajectory]) -> list[object]:
        columns = [[getattr(s, name).tobytes() for name in COLUMN_DTYPES] for s in samples]
        rest = [(s.unit, np.float64(s.reward).tobytes(), s.finish, s.prompt_text, s.response_text) for s in samples]
        return [columns, rest]

    return bits(one) == bits(other)


@st.composite
def groups(draw: st.DrawFn) -> list[Record]:
    keys = draw(st.lists(st.tuples(st.integers(0, 2**40), st.integers(0, 9)), max_size=5, unique=True))
    records = []
    for ticket, attempt in keys:
        lengths = draw(st.lists(st.integers(0, 20), max_size=3))
        rng = np.random.default_rng(draw(st.integers(0, 99)))
        samples = [
            Trajectory(
                Unit(ticket, index, attempt),
                *(rng.integers(0, 255, length).astype(dtype) for dtype in COLUMN_DTYPES.values()),
                reward=draw(st.floats()),
                finish=draw(st.sampled_from(["", "stop", "length"])),
                prompt_text=draw(st.text(max_size=5)),
                response_text=draw(st.text(max_size=5)),
            )
            for index, length in enumerate(lengths)
        ]
        records.append(Record(make_group(ticket, attempt, samples), draw(st.booleans())))
    return records


@settings(max_examples=60, deadline=None)
@given(groups())
def test_what_is_read_is_what_was_written(tmp_path_factory: pytest.TempPathFactory, records: list[Record]) -> None:
    path = tmp_path_factory.mktemp("archive") / "0007-00001-000000.h5"
    path.write_bytes(image_of(records))
    segment = read_segment(path)
    assert segment.damaged == []
    assert [(g.key, g.finished, g.launch) for g in segment.groups] == [(r.group.key, r.finished, 7) for r in records]
    for read, record in zip(segment.groups, records, strict=True):
        assert same(read.trajectories, trajectories_of(record.group))


def test_a_segment_is_an_hdf5_file_for_other_tools(tmp_path):
    path = tmp_path / "0000-00001-000000.h5"
    path.write_bytes(image_of([Record(group(3), True), Record(group(4, attempt=2), False)]))
    with h5py.File(path) as file:
        assert sorted(file) == ["000000003_0", "000000004_2_unfinished"]
        [first, second] = trajectories_of(group(3))
        assert file["000000003_0/tokens"][()].tolist() == [*first.tokens, *second.tokens]
        assert file["000000003_0/logprobs"].dtype == np.float32


@pytest.mark.skipif(sys.platform != "linux", reason="made by seccomp")
def test_where_the_file_system_refuses_locks_an_archive_is_written_read_and_open_to_the_documented_lines(tmp_path):
    """HDF5 itself would lock every file that it opens."""
    folder = tmp_path / "runs/NAME/archive"
    folder.mkdir(parents=True)
    [lines] = re.findall(r"```python\n(import h5py\n.*?)```", (ROOT / "docs/runs.md").read_text(), re.DOTALL)
    command = [sys.executable, LOCKLESS, folder, lines.replace("000017.h5", "000001.h5")]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    said, refused, printed = ended.stdout.split("\n", 2)
    assert said == "[123] []"
    assert "unable to lock file" in refused
    columns = [
        np.concatenate([getattr(t, name) for t in trajectories_of(group(123))]) for name in ("tokens", "versions")
    ]
    assert printed == f"{columns[0]} {columns[1]}\n"


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_wrong_byte_is_noticed_and_the_group_named(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject):
    whole = image_of([Record(group(ticket), True) for ticket in range(4)])
    place = data.draw(st.integers(0, len(whole) - 1))
    path = tmp_path_factory.mktemp("archive") / "0000-00001-000000.h5"
    path.write_bytes(whole[:place] + bytes([whole[place] ^ data.draw(st.integers(1, 255))]) + whole[place + 1 :])
    segment = read_segment(path)
    for read in segment.groups:
        assert same(read.trajectories, trajectories_of(group(read.key[0])))
    missing = set(range(4)) - {read.key[0] for read in segment.groups}
    if len(missing) == 4:
        assert len(segment.damaged) == 1
        assert str(path) in segment.damaged[0]
    else:
        named = [f"Ticket {ticket}, attempt 0, in {path} is damaged (its checksum differs)" for ticket in missing]
        assert len(missing) <= 1
        assert [text.partition(" and")[0] for text in segment.damaged] == named


@pytest.mark.parametrize("size", [0, 10, 1000, -1])
def test_a_cut_off_file_is_ignored_whole_and_named(tmp_path, size):
    path = tmp_path / "0000-00001-000000.h5"
    path.write_bytes(image_of([Record(group(0), True)])[:size])
    segment = read_segment(path)
    assert segment.groups == []
    assert len(segment.damaged) == 1
    assert str(path) in segment.damaged[0]


def test_killed_at_any_moment_everything_that_was_written_is_read(tmp_path):
    for round_ in range(8):
        folder = tmp_path / str(round_)
        command = [sys.executable, PROGRAM, "for_ever", folder]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "0\n"
        time.sleep(random.uniform(0, 0.4))
        process.kill()
        last = [0, *map(int, process.stdout.read().split())][-1]
        process.wait()
        segments = list(read_share(folder, 1, 0, 1))
        assert [text for segment in segments for text in segment.damaged] == []
        found = {g.key[0]: g for segment in segments for g in segment.groups}
        settled = (last + 1) // 50 * 50 - 20  # what the program has declared settled it may have deleted
        assert set(range(max(0, settled), last + 1)) <= found.keys()
        assert all(same(g.trajectories, trajectories_of(group(ticket))) for ticket, g in found.items())


def test_a_full_disk_is_told_once_and_leaves_nothing_half(tmp_path):
    command = [sys.executable, PROGRAM, "full_disk", tmp_path / "archive"]
    output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert output.count("\n") == 1
    assert "can't be written (File too large)" in output
    assert {path.suffix for path in (tmp_path / "archive").iterdir()} == {".h5"}
    segments = list(read_share(tmp_path / "archive", 1, 0, 1))
    assert [text for segment in segments for text in segment.damaged] == []
    found = {g.key[0] for segment in segments for g in segment.groups}
    assert {0, 3} <= found, "what fits, and what came when there was room again"


def test_every_segment_of_earlier_launches_has_one_reader(tmp_path):
    for launch, rank in ((0, 1), (0, 2), (1, 2), (1, 3), (2, 1)):
        ArchiveFiles(tmp_path, launch, rank).add([Record(group(10 * launch + rank), True)])
    (tmp_path / "0000-00001-000009.writing").write_bytes(b"half")
    shares = [[s.path for s in read_share(tmp_path, 2, index, 3)] for index in range(3)]
    read = [path.name for share in shares for path in share]
    assert launches_in(tmp_path) == {0, 1, 2}
    assert sorted(read) == [f"{name}-000000.h5" for name in ("0000-00001", "0000-00002", "0001-00002", "0001-00003")]
    assert max(map(len, shares)) == 2


def keys_in(folder: Path) -> list[tuple[int, int]]:
    return sorted(g.key for segment in read_share(folder, 99, 0, 1) for g in segment.groups)


def test_a_checkpoint_deletes_the_segments_that_it_covers(tmp_path):
    old = ArchiveFiles(tmp_path, 0, 1)
    old.add([Record(group(0), True), Record(group(1), True)])
    old.merge()
    old.add([Record(group(2), True)])
    files = ArchiveFiles(tmp_path, 1, 1)
    for segment in read_share(tmp_path, 1, 0, 1):
        files.adopt(segment)
    files.add([Record(group(3), True), Record(group(4), True)])
    files.merge()
    files.add([Record(group(5), True)])
    files.add([Record(group(6), True)])
    files.cover(lambda ticket: ticket in (0, 2, 3, 5))
    assert keys_in(tmp_path) == [(0, 0), (1, 0), (3, 0), (4, 0), (6, 0)]
    files.cover(lambda ticket: ticket <= 6)
    assert list(tmp_path.iterdir()) == []


def test_small_segments_become_one(tmp_path, monkeypatch):
    files = ArchiveFiles(tmp_path, 0, 1)
    assert files.due == float("inf")
    for ticket in range(3):
        files.add([Record(group(ticket), True)])
    assert 0 < files.due - time.monotonic() <= archive.SEGMENT_S
    monkeypatch.setattr(archive, "SEGMENT_BYTES", 3 * group(0).nbytes)
    assert files.due == 0
    files.merge()
    assert len(list(tmp_path.iterdir())) == 1
    assert keys_in(tmp_path) == [(0, 0), (1, 0), (2, 0)]


def test_what_is_put_is_written_by_the_thread_and_what_is_too_much_for_the_disk_is_told(tmp_path, monkeypatch):
    errors: list[BaseException] = []
    said: list[str] = []
    monkeypatch.setattr(archive, "SHORTEST_PAUSE_S", 0.001)
    monkeypatch.setattr(archive, "QUEUE_BYTES", 2.5 * group(0).nbytes)
    files = ArchiveFiles(tmp_path / "archive", 0, 1)
    waits = make_group(9, 0, [])
    add = files.add

    def slow(records: list[Record]) -> None:
        while any(record.group is waits for record in records) and len(writer._waiting) < 2:
            time.sleep(0.001)
        add(records)

    monkeypatch.setattr(files, "add", slow)
    writer = ArchiveWriter(files, errors.append, said.append)
    writer.put(waits)
    time.sleep(0.1)
    for ticket in range(4):
        writer.put(group(ticket))
    writer.close()
    while not writer.closed:
        time.sleep(0.001)
    assert not errors
    assert keys_in(tmp_path / "archive") == [(0, 0), (1, 0), (9, 0)]
    assert len(said) == 1
    assert "2 groups were passed over" in said[0]


class Spilling:
    """A generator's store with its archive; the memory is one group's."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(archive, "SHORTEST_PAUSE_S", 0.001)
        monkeypatch.setattr(archive, "LONGEST_PAUSE_S", 0.01)
        self.folder, self.said = folder, list[str]()
        self.store = TrajectoryStore(group(0).nbytes)
        self.errors: list[BaseException] = []
        self.writer = ArchiveWriter(ArchiveFiles(folder, 0, 1), self.errors.append, self.said.append)
        self.writer.keep_for(self.store)

    def put(self, *tickets: int) -> None:
        for ticket in tickets:
            self.store.put(ticket, 0, trajectories_of(group(ticket)))

    def until(self, done: Callable[[], bool]) -> None:
        begun = time.monotonic()
        while not done():
            assert not self.errors
            assert time.monotonic() < begun + 20
            time.sleep(1e-3)

    def get(self, ticket: int) -> list[Trajectory]:
        self.until(lambda: self.store.recall([(ticket, 0)]))
        return self.store.get([(ticket, 0)])[ticket, 0]

    def end(self) -> None:
        self.writer.close()
        self.until(lambda: self.writer.closed)


@pytest.fixture
def spilling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Spilling]:
    made = Spilling(tmp_path / "archive", monkeypatch)
    yield made
    made.end()


def test_what_the_store_spills_is_read_back_from_the_archive_as_it_was(spilling):
    spilling.put(0, 1, 2)
    spilling.until(lambda: spilling.store.memory_use() == (0, 0, 3))
    assert all(same(spilling.get(ticket), trajectories_of(group(ticket))) for ticket in (2, 0, 1))
    spilling.store.release([(0, 0), (1, 0), (2, 0)])
    spilling.writer.receive(Received(0, Covered([3], [])), 0.0)
    spilling.until(lambda: not keys_in(spilling.folder))
    spilling.put(3)
    spilling.until(lambda: spilling.store.memory_use() == (0, 0, 4))
    assert same(spilling.get(3), trajectories_of(group(3)))
    assert not spilling.said


@pytest.mark.parametrize("how", ["gone", "cut", "a bit"])
def test_a_group_that_cannot_be_read_back_is_named(spilling, how):
    spilling.put(5)
    spilling.until(lambda: spilling.store.memory_use().spilled == 1)
    [path] = spilling.folder.glob("*.h5")
    whole = path.read_bytes()
    place = whole.index(np.ascontiguousarray(group(5).columns["tokens"].data).tobytes())
    if how == "gone":
        path.unlink()
    else:
        end = place + 1 if how == "cut" else len(whole)
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 : end])
    reason = "No such file or directory" if how == "gone" else "it isn't what was written"
    text = f"ticket 5 attempt 0 can't be read back from {path} ({reason})."
    with pytest.raises(LostGroupsError, match=re.escape(text)) as caught:
        spilling.get(5)
    assert caught.value.keys == [(5, 0)]


@settings(max_examples=60, deadline=None)
@given(groups())
def test_one_group_of_a_segment_is_read_by_itself(tmp_path_factory: pytest.TempPathFactory, records: list[Record]):
    path = tmp_path_factory.mktemp("archive") / "0007-00001-000000.h5"
    path.write_bytes(image_of(records))
    for record in records:
        if record.finished:
            assert same(trajectories_of(read_group(path, record.group.key)), trajectories_of(record.group))
        else:
            with pytest.raises(LostGroupsError):
                read_group(path, record.group.key)


def test_with_a_full_disk_groups_stay_in_memory_and_nothing_is_lost(spilling, monkeypatch):
    def full(records: list[Record]) -> bytes:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(archive, "image_of", full)
    spilling.put(0, 1)
    spilling.until(lambda: not spilling.store._writing)
    assert spilling.store.memory_use() == (2, group(0).nbytes + group(1).nbytes, 0)
    assert len(spilling.said) == 1
    assert "can't be written (No space left on device)" in spilling.said[0]
    monkeypatch.setattr(archive, "image_of", image_of)
    spilling.put(2)
    spilling.until(lambda: spilling.store.memory_use().spilled == 1)
    assert all(same(spilling.get(ticket), trajectories_of(group(ticket))) for ticket in (0, 1, 2))


def test_what_is_too_much_for_the_disk_stays_in_memory_and_is_let_go(spilling, monkeypatch):
    monkeypatch.setattr(archive, "QUEUE_BYTES", 0)
    add, works = spilling.writer._files.add, threading.Event()

    def slow(records: list[Record]) -> None:
        assert works.wait(20)
        add(records)

    monkeypatch.setattr(spilling.writer._files, "add", slow)
    spilling.put(0)
    spilling.until(lambda: not spilling.writer._waiting)
    spilling.put(1, 2)  # a first one waits, however large it is
    works.set()
    spilling.until(lambda: spilling.store.memory_use().spilled == 2)
    assert spilling.store.memory_use() == (1, group(2).nbytes, 2)
    assert same(spilling.get(2), trajectories_of(group(2)))


def test_a_resumed_generator_leaves_on_the_disk_what_has_no_room_in_memory(tmp_path):
    def write(launch: int, *records: Record) -> None:
        files = ArchiveFiles(tmp_path / "archive", launch, 1)
        files.add(records)
        files.merge()

    write(0, Record(group(8), False), *(Record(group(ticket), True) for ticket in range(6)), Record(group(7), False))
    write(1, Record(group(8), True), Record(group(0), True))
    (tmp_path / "archive/0001-00001-000009.writing").write_bytes(b"half")
    config = JobConfig.model_validate(
        {"rollout": {"engine": "latency", "memory_mb": 3 * group(0).nbytes / 2**20}, "run": {"dir": str(tmp_path)}}
    )
    network = SimulatedNetwork(2)
    roles = plan_roles(["a", "a"], RanksConfig(trainers=1, generators=1))
    rank = Rank(config, tmp_path, network.transport(1), roles, MainState(), 1, 2, print, print)
    store, unfinished, writer = open_archive(rank)
    assert writer is not None
    writer.keep_for(store)
    assert store.memory_use().bytes <= 1.5 * group(0).nbytes
    assert sorted(store.list()) == [(ticket, 0) for ticket in (*range(6), 8)]
    for key in store.list():
        while not store.recall([key]):
            time.sleep(1e-3)
        assert same(store.get([key])[key], trajectories_of(group(key[0])))
    assert [each.key for each in unfinished] == [(7, 0)]
    [told] = network.transport(0).poll()
    assert isinstance(told.message, Salvaged)
    held = {(each.ticket, each.launch, each.finished) for each in told.message.groups}
    assert held == {(0, 1, True), (8, 1, True), (7, 0, False), *((ticket, 0, True) for ticket in range(1, 6))}
    writer.receive(Received(0, Covered([9], [])), 0.0)
    while list((tmp_path / "archive").iterdir()):
        time.sleep(1e-3)
    writer.close()
