"""Files and folders that are there whole or not at all."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from headrace.comm.errors import DataError, HeadraceError
from headrace.comm.files import disk_errors, write_whole, written_whole


def fill(folder: Path, text: str) -> None:
    (folder / "file").write_text(text)
    (folder / "file").chmod(0o600)
    (folder / "deeper").mkdir(mode=0o700)


def test_a_folder_appears_at_the_end_with_the_usual_permissions(tmp_path: Path) -> None:
    target = tmp_path / "new" / "folder"
    with written_whole(target, "The folder") as partial:
        fill(partial, "whole")
        assert not target.exists()
    assert [path.name for path in target.parent.iterdir()] == ["folder"]
    assert (target / "file").read_text() == "whole"
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (target, *target.iterdir())}
    assert modes == {"folder": 0o755, "file": 0o644, "deeper": 0o755}


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), DataError("no such data"), ValueError("x")])
def test_nothing_half_written_is_left_after_any_error(tmp_path: Path, error: Exception) -> None:
    def write_half() -> None:
        with written_whole(tmp_path / "folder", "The folder") as partial:
            fill(partial, "half")
            raise error

    with pytest.raises((HeadraceError, ValueError)):
        write_half()
    assert not list(tmp_path.iterdir())


def test_the_folder_of_a_faster_process_stays(tmp_path: Path) -> None:
    with written_whole(tmp_path / "folder", "The folder") as late:
        with written_whole(tmp_path / "folder", "The folder") as early:
            fill(early, "early")
        fill(late, "late")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
    assert (tmp_path / "folder" / "file").read_text() == "early"


def test_a_place_that_cannot_be_made_is_told_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    told = pytest.raises(HeadraceError, match=r"The folder .*folder can't be written: .* GiB free\)\. Nothing half")
    with told, written_whole(tmp_path / "file" / "folder", "The folder"):
        pass


def test_errors_that_are_not_about_writing_pass_through(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), disk_errors("It", tmp_path, "Mend it."):
        raise ZeroDivisionError


def test_a_file_is_replaced_whole_and_readable_by_others(tmp_path: Path) -> None:
    file = tmp_path / "status.json"
    for text in (b"old, and longer", b"new"):
        write_whole(file, text, durable=True)
        assert file.read_bytes() == text
        assert file.stat().st_mode & 0o777 == 0o644
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "status.json"
    write_whole(file, b"old")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(file, b"new", durable=True)
    assert file.read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]
