"""Folders that are there whole or not at all."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from headrace.comm.errors import DataError, HeadraceError
from headrace.comm.files import disk_errors, written_whole


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
