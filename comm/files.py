"""Files that are written whole or not at all, and failures to write told in one paragraph."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from headrace.comm.errors import HeadraceError


@contextmanager
def disk_errors(what: str, where: Path, remedy: str) -> Iterator[None]:
    """Turn a failure to write, as on a full disk, into one paragraph.

    Args:
        what: the beginning of the sentence, for instance `The run folder runs/x`.
        where: a path on the disk in question, which needn't exist.
        remedy: what to do, in whole sentences.

    Raises:
        HeadraceError: with the reason, the free space and the remedy.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise HeadraceError(f"{what} can't be written: {reason} ({_free_space(where)}). {remedy}") from error


def flush(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk itself.

    Raises:
        OSError: as of `os.open` and `os.fsync`.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(file: Path, data: bytes, durable: bool = False) -> None:
    """Write a file whole or not at all: whoever reads it meanwhile, or after a crash of this process, finds the old one
    or the new one. Several processes may write the same file at once.

    Args:
        durable: return only when the data are on the disk itself, so that they outlast a crash of the machine.

    Raises:
        OSError: it can't be written; the old one stays.
    """
    descriptor, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    try:
        with open(descriptor, "wb") as partial:
            os.fchmod(descriptor, 0o644)  # temporary files are private
            partial.write(data)
            partial.flush()
            if durable:
                os.fsync(descriptor)
        os.replace(name, file)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


@contextmanager
def written_whole(folder: Path, what: str) -> Iterator[Path]:
    """A temporary folder beside `folder` that takes its name at the end, or disappears if anything fails.

    Files get the usual permissions: temporary folders, and files of safetensors, are private, but models are shared. If
    another process has made the folder meanwhile, that one stays.

    Args:
        folder: where the files will be; not there yet.
        what: for the error, for instance `The model folder`.

    Raises:
        HeadraceError: the files can't be written.
    """
    remedy = "Nothing half-written is left. Free some space or mend the permissions there, or choose another place."
    with disk_errors(f"{what} {folder}", folder, remedy):
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-"))
        try:
            yield partial
            _make_readable(partial)
            _rename(partial, folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def _make_readable(folder: Path) -> None:
    folder.chmod(0o755)
    for path in folder.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)


def _rename(partial: Path, folder: Path) -> None:
    try:
        partial.rename(folder)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise


def _free_space(where: Path) -> str:
    place = next(path for path in (where.absolute(), *where.absolute().parents) if path.exists())
    return f"{shutil.disk_usage(place).free / 2**30:.1f} GiB free"
