"""Checkpoints that are whole or absent, whenever the job is killed.

    rank 0       begin(20)      step_000020.writing/ is made
    every rank   writing(20)    engine_00000_of_00002.safetensors, … are written, then flushed to disk
                 barrier of the caller
    rank 0       commit(20)     trainer.json → flush → rename to step_000020/ → COMPLETE (sizes and checksums)
                                → only now older checkpoints go

A checkpoint counts only with a `COMPLETE` whose sizes match the files. Until the new one counts, the old ones stay.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from headrace.comm.errors import DataError, HeadraceError
from headrace.comm.files import disk_errors, flush

MARKER = "COMPLETE"
STATE_FILE = "trainer.json"
CHUNK = 1 << 24


class FileRecord(msgspec.Struct, frozen=True):
    """One file of a checkpoint, as the marker remembers it."""

    size: int
    xxh3: str
    """XXH3-128, hexadecimal."""


Marker = dict[str, FileRecord]


class CheckpointStore:
    """The checkpoints of a run in one folder, of which the newest `keep` stay."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self.keep = keep

    # Reading

    def steps(self) -> list[int]:
        """Steps of all whole checkpoints, oldest first."""
        found = self.folder.glob("step_*") if self.folder.exists() else []
        return sorted(int(path.name[5:]) for path in found if path.name[5:].isdigit() and is_whole(path))

    def damaged(self) -> list[Path]:
        """Those that look whole but aren't: their marker or a file was lost, or they were renamed when the job died."""
        found = self.folder.glob("step_*") if self.folder.exists() else []
        return sorted(path for path in found if path.name[5:].isdigit() and not is_whole(path))

    def latest(self) -> Path | None:
        """The newest whole checkpoint. Changes nothing, so any rank may ask at any time outside a save."""
        steps = self.steps()
        return self.path(steps[-1]) if steps else None

    def path(self, step: int) -> Path:
        return self.folder / f"step_{step:06d}"

    # Writing

    def begin(self, step: int) -> Path:
        """Rank 0: remove what an interrupted save left, make the folder to write into. The other ranks may enter
        `writing` once this has returned. Raises HeadraceError if there is a whole checkpoint of this step."""
        if is_whole(self.path(step)):
            raise HeadraceError(
                f"There is a whole checkpoint of step {step} in {self.folder}, and a checkpoint is never overwritten. "
                "Resume from it, or move it away."
            )
        folder = self._writing_folder(step)
        with _disk_errors(folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            for path in self.folder.glob("step_*"):
                if not is_whole(path):
                    shutil.rmtree(path)
            folder.mkdir()
        return folder

    @contextmanager
    def writing(self, step: int) -> Iterator[Path]:
        """Every rank: write your files into the folder this gives; they are flushed to disk at the end. If the disk
        is full the half checkpoint is removed and HeadraceError raised."""
        folder = self._writing_folder(step)
        with _disk_errors(folder):
            yield folder
            _flush_folder(folder)

    def commit(self, step: int, state: dict[str, Any]) -> Path:
        """Rank 0, after a barrier behind every rank's `writing`: make the checkpoint whole, then drop the oldest.
        `state` is plain JSON data; `step` is added to it."""
        writing, final = self._writing_folder(step), self.path(step)
        with _disk_errors(writing):
            (writing / STATE_FILE).write_bytes(msgspec.json.encode({**state, "step": step}))
            _flush_folder(writing)
            marker = {path.name: _record(path) for path in sorted(writing.iterdir())}
            writing.rename(final)
        with _disk_errors(final):
            flush(self.folder)
            _write_marker(final, marker)
        for old in self.steps()[: -self.keep]:
            _remove(self.path(old))
        return final

    def _writing_folder(self, step: int) -> Path:
        return self.folder / f"step_{step:06d}.writing"


def is_whole(checkpoint: Path) -> bool:
    """Whether the marker is there and every file has the size it says."""
    try:
        records = _read_marker(checkpoint)
    except (FileNotFoundError, NotADirectoryError, msgspec.DecodeError):
        return False
    return all((checkpoint / name).is_file() for name in records) and all(
        (checkpoint / name).stat().st_size == record.size for name, record in records.items()
    )


def read_state(checkpoint: Path) -> dict[str, Any]:
    """What was given to `commit`, and `step`. Raises DataError if a file isn't what was written (checksums)."""
    for name, record in _read_marker(checkpoint).items():
        if _record(checkpoint / name) != record:
            raise DataError(
                f"The file {checkpoint / name} was changed or damaged since the checkpoint was written (its checksum "
                "differs). Move this checkpoint away and resume from the one before."
            )
    return msgspec.json.decode((checkpoint / STATE_FILE).read_bytes(), type=dict[str, Any])


def _read_marker(checkpoint: Path) -> Marker:
    return msgspec.json.decode((checkpoint / MARKER).read_bytes(), type=Marker)


def _write_marker(checkpoint: Path, marker: Marker) -> None:
    """Under another name first, so that there is never half a marker."""
    draft = checkpoint / f"{MARKER}.writing"
    draft.write_bytes(msgspec.json.encode(marker))
    flush(draft)
    draft.rename(checkpoint / MARKER)
    flush(checkpoint)


def _remove(checkpoint: Path) -> None:
    """The marker first: from then on the rest is a leftover."""
    (checkpoint / MARKER).unlink()
    shutil.rmtree(checkpoint)


def _record(path: Path) -> FileRecord:
    digest, size = xxhash.xxh3_128(), 0
    with path.open("rb") as file:
        while piece := file.read(CHUNK):
            digest.update(piece)
            size += len(piece)
    return FileRecord(size, digest.hexdigest())


def _flush_folder(folder: Path) -> None:
    """Flush the folder and its files. Hidden ones are what other ranks are still writing: safetensors renames them when
    they are whole, and their writers flush them."""
    for path in folder.iterdir():
        if not path.name.startswith("."):
            flush(path)
    flush(folder)


@contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    remedy = (
        "Its unfinished files were removed and the older checkpoints are untouched: free some space or give run.dir a "
        "larger disk, then go on by --resume."
    )
    try:
        with disk_errors(f"The checkpoint {folder}", folder, remedy):
            yield
    except HeadraceError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
