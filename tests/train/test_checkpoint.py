"""Checkpoints under kills at every write point, full disks and damage."""

from __future__ import annotations

import errno
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from headrace.comm.errors import DataError, HeadraceError
from headrace.train.checkpoint import MARKER, CheckpointStore, is_whole, read_state

RANKS = 2
POINTS = ("fsync", "rename", "unlink", "rmdir", "mkdir", "open", "write")
"""Calls of the operating system before each of which the saver is killed in turn."""


def save(store: CheckpointStore, step: int) -> Path:
    """What the ranks do, one after the other; every file says which step it is of."""
    store.begin(step)
    for rank in range(RANKS):
        with store.writing(step) as folder:
            save_file({"weight": np.full(64, step, np.float32)}, folder / f"engine_{rank}.safetensors")
            write_slowly(folder / f"other_{rank}.bin", bytes([step]) * 100)
    return store.commit(step, {"version": step, "ledger": {"trained": [step]}})


def write_slowly(path: Path, data: bytes) -> None:
    """In two halves, so that a kill can fall between them."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    os.write(descriptor, data[:50])
    os.write(descriptor, data[50:])
    os.close(descriptor)


def step_of(checkpoint: Path) -> int:
    """Load everything; all parts must be of one step."""
    state = read_state(checkpoint)
    step = int(state["step"])
    assert state == {"step": step, "version": step, "ledger": {"trained": [step]}}
    for rank in range(RANKS):
        np.testing.assert_array_equal(load_file(checkpoint / f"engine_{rank}.safetensors")["weight"], np.full(64, step))
        assert (checkpoint / f"other_{rank}.bin").read_bytes() == bytes([step]) * 100
    return step


def in_child(action: Callable[[], object]) -> int:
    """Run in a forked child; returns its wait status."""
    pid = os.fork()
    if pid == 0:
        action()
        os._exit(0)
    return os.waitpid(pid, 0)[1]


def kill_at(point: int) -> None:
    """From now on count the calls of POINTS, and die by SIGKILL just before number `point`."""
    calls = 0

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **options: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > point:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **options)

        return wrapper

    for name in POINTS:
        setattr(os, name, counted(getattr(os, name)))


def test_killed_at_every_write_point_the_latest_is_whole_and_the_run_goes_on(tmp_path: Path) -> None:
    point, outcomes = 0, []
    while True:
        store = CheckpointStore(tmp_path / str(point), keep=2)
        save(store, 1)
        save(store, 2)

        def third(store: CheckpointStore = store, point: int = point) -> None:
            kill_at(point)
            save(store, 3)

        status = in_child(third)
        latest = store.latest()
        assert latest is not None
        outcomes.append(step_of(latest))
        if status == 0:
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
        assert step_of(save(store, 4)) == 4
        assert store.steps()[-1] == 4
        assert {path.name for path in store.folder.iterdir()} == {f"step_{step:06d}" for step in store.steps()}
        point += 1
    assert point > 25
    assert outcomes == sorted(outcomes)
    assert set(outcomes) == {2, 3}


def test_killed_in_the_first_save_there_is_none(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)

    def first() -> None:
        kill_at(9)
        save(store, 1)

    assert in_child(first) != 0
    assert any(tmp_path.iterdir())
    assert store.latest() is None


def test_the_newest_are_kept_and_each_equals_its_step(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    assert store.latest() is None
    for step in (5, 9, 20, 100):
        assert save(store, step) == store.latest() == store.path(step)
    assert store.steps() == [20, 100]
    assert [step_of(store.path(step)) for step in store.steps()] == [20, 100]


def test_the_old_one_goes_only_after_the_new_one_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    save(store, 1)
    seen: list[bool] = []
    unlink = Path.unlink
    monkeypatch.setattr(Path, "unlink", lambda path: (seen.append(is_whole(store.path(2))), unlink(path))[1])
    save(store, 2)
    assert seen == [True]


@pytest.mark.parametrize("damage", ["shorter", "missing", "no marker", "empty marker", "garbled marker"])
def test_a_checkpoint_that_isnt_whole_is_passed_over(tmp_path: Path, damage: str) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    save(store, 1)
    newest = save(store, 2)
    victim = newest / (MARKER if "marker" in damage else "other_1.bin")
    match damage:
        case "shorter":
            victim.write_bytes(victim.read_bytes()[:-1])
        case "empty marker":
            victim.write_bytes(b"")
        case "garbled marker":
            victim.write_bytes(b'{"other_1.bin": 3}')
        case _:
            victim.unlink()
    assert store.latest() == store.path(1)
    assert store.damaged() == [newest]
    store.begin(3)
    assert store.damaged() == [], "what a job was writing when it ended isn't one"


def test_a_changed_byte_is_found_when_the_state_is_read(tmp_path: Path) -> None:
    newest = save(CheckpointStore(tmp_path, keep=2), 1)
    (newest / "other_0.bin").write_bytes(b"\x01" * 99 + b"\x02")
    with pytest.raises(DataError, match=r"other_0.bin was changed or damaged"):
        read_state(newest)


def test_a_checkpoint_is_never_overwritten(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    save(store, 3)
    with pytest.raises(HeadraceError, match="a whole checkpoint of step 3"):
        store.begin(3)
    assert step_of(store.path(3)) == 3


@pytest.mark.parametrize("call", ["mkdir", "write", "fsync", "rename"])
def test_a_full_disk_is_one_clear_error_and_leaves_no_half_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    save(store, 1)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, call, full)
        with pytest.raises(HeadraceError, match="No space left on device"):
            save(store, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001"]
    assert step_of(save(store, 2)) == 2


def test_a_disk_that_fills_up_in_the_middle_of_a_tensor_file_is_one_clear_error(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    store.begin(1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, before[1]))
    try:
        with pytest.raises(HeadraceError, match=r"step_000001.writing can't be written"), store.writing(1) as folder:
            save_file({"weight": np.zeros(5000, np.float32)}, folder / "engine_0.safetensors")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert not list(tmp_path.iterdir())
