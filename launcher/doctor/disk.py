"""The file system of the run folder, and where caches lie."""

from __future__ import annotations

import fcntl
import getpass
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from headrace.comm.files import flush
from headrace.launcher.config import Config
from headrace.launcher.doctor.findings import Finding, fail, ok, warn, worst

LEAST_BYTES = 1 << 30
"""Free space below which even a small run may fail."""

BYTES_PER_WEIGHT_BYTE = 7
"""A checkpoint of a bf16 model holds fp32 weights and the two moments of AdamW (12 bytes for 2), and the weights."""

SLOW_FSYNC_S = 1.0
SKEW_S = 2.0
"""Clocks further apart than this confuse the order of files."""

KEPT = "checkpoint.keep"


def check_space(folder: Path, config: Config | None) -> Finding:
    """Room for the checkpoints that a run keeps, and the one that is being written."""
    free = shutil.disk_usage(existing(folder)).free
    one = BYTES_PER_WEIGHT_BYTE * _weights(config)
    kept = config.checkpoint.keep + 1 if config else 1
    text = f"{_gib(free)} free for {folder}"
    if one:
        text += f", {_gib(one * kept)} needed for {kept} checkpoints"
    remedy = f"Free some space, choose another run.dir, or lower {KEPT}."
    if free < max(one, LEAST_BYTES // 4):
        return fail("free space", text, remedy)
    if free < max(one * kept, LEAST_BYTES):
        return warn("free space", text, remedy)
    return ok("free space", text)


def _weights(config: Config | None) -> int:
    """Bytes of the model's files; 0 where it is tiny or there is none."""
    path = config.model.path if config else None
    return sum(file.stat().st_size for file in path.glob("*.safetensors")) if path else 0


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"


def check_file_system(folder: Path) -> Finding:
    """What checkpoints and the launcher rely on: rename over a file, rename of folders, fsync, links, FIFOs."""
    with scratch(folder) as work:
        (work / "a").write_text("new")
        (work / "b").write_text("old")
        began = time.monotonic()
        flush(work / "a")
        os.replace(work / "a", work / "b")
        flush(work)
        took = time.monotonic() - began
        (work / "half").mkdir()
        (work / "half").rename(work / "whole")
        (work / "link").symlink_to("whole")
        os.mkfifo(work / "fifo")
        if (work / "b").read_text() != "new" or not (work / "link").is_dir():
            return fail(
                "file system", f"renamed files in {folder} aren't what they should be", "Choose another run.dir."
            )
    text = f"{file_system(existing(folder))} of {folder}: rename, fsync, links and FIFOs work; fsync took {took:.2f} s"
    if took > SLOW_FSYNC_S:
        return warn("file system", text, "Every checkpoint waits for it: choose a faster disk by run.dir.")
    return ok("file system", text)


def check_locks(folder: Path) -> Finding:
    """One job at a time in a run folder: that is held by flock."""
    with scratch(folder) as work, open(work / "lock", "w") as first, open(work / "lock") as second:
        try:
            fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            remedy = "Have it mounted with locks (Lustre: -o flock), or choose another run.dir."
            return fail("locks", f"files in {folder} can't be locked: {error.strerror}", remedy)
        if is_free(second.fileno()):
            return fail("locks", f"two could lock one file in {folder}", "Choose another run.dir.")
    return ok("locks", "a locked file is refused to others")


def is_free(file: int) -> bool:
    """Whether a lock on the file is to be had."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def check_clock(folder: Path) -> Finding:
    """This host's clock against the one that dates the files."""
    with scratch(folder) as work:
        before = time.time()
        (work / "now").write_text("")
        dated, after = (work / "now").stat().st_mtime, time.time()
    skew = max(before - dated, dated - after, 0.0)
    if skew > SKEW_S:
        remedy = "Set this host's clock by NTP (chronyc tracking): files are ordered by their dates."
        return warn("clock", f"{skew:.1f} s between this host and the server of {folder}", remedy)
    return ok("clock", f"within {skew:.2f} s of the file server's")


@contextmanager
def scratch(folder: Path) -> Iterator[Path]:
    """A new folder on the file system of `folder`, which needn't exist; removed at the end."""
    with tempfile.TemporaryDirectory(prefix=".doctor-", dir=existing(folder)) as work:
        yield Path(work)


def existing(folder: Path) -> Path:
    """The folder, or the nearest above it that exists."""
    absolute = folder.absolute()
    return next(path for path in (absolute, *absolute.parents) if path.is_dir())


def cache_folders(environ: Mapping[str, str]) -> list[Path]:
    """Where Triton, torch's inductor and vLLM keep what they compile."""
    home = Path(environ.get("HOME", "/"))
    defaults = {
        "TRITON_CACHE_DIR": home / ".triton" / "cache",
        "TORCHINDUCTOR_CACHE_DIR": Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}",
        "VLLM_CACHE_ROOT": home / ".cache" / "vllm",
    }
    return [Path(environ.get(name, default)) for name, default in defaults.items()]


def file_system(folder: Path, mounts: str | None = None) -> str:
    """Type of the file system, for instance `ext4` or `lustre`.

    Args:
        mounts: text of /proc/mounts; None reads it.
    """
    table = mounts if mounts is not None else Path("/proc/mounts").read_text()
    place, found, kind = folder.absolute(), Path("/"), "unknown"
    for line in table.splitlines():
        _, point, type_, *_ = line.split()
        mounted = Path(point.replace("\\040", " "))
        if place.is_relative_to(mounted) and mounted.is_relative_to(found):
            found, kind = mounted, type_
    return kind


NETWORK_FILE_SYSTEMS = (
    *("nfs", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb", "afs", "9p", "pvfs", "orangefs", "wekafs"),
)


def judge_caches(caches: Mapping[str, str]) -> Finding:
    """Compilers lock and rename in their caches, many ranks at once: slow, and wrong on some network file systems.

    Args:
        caches: file system by folder.
    """
    remedy = "Set launch.env.TRITON_CACHE_DIR, TORCHINDUCTOR_CACHE_DIR and VLLM_CACHE_ROOT to a folder under /tmp."
    complaints = [
        warn("", f"{folder} is on a network file system ({kind})", remedy)
        for folder, kind in caches.items()
        if kind.removeprefix("fuse.").startswith(NETWORK_FILE_SYSTEMS)
    ]
    return worst("caches", complaints, f"{', '.join(caches)} are local to the node")
