"""The lock of a run folder: one job at a time works there.

The launcher takes it and mpirun inherits it. So it is held until both have ended: the ranks of a launcher that was
killed may still be writing their checkpoint.
"""

from __future__ import annotations

import fcntl
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace.comm.errors import ConfigError
from headrace.launcher.record import start_of
from headrace.launcher.runfolder import LOCK, writing

POLL_S = 0.1


@contextmanager
def held(run: Path, ranks_end_within_s: float) -> Iterator[int]:
    """Keep every other job out of the run folder, for as long as this process and those live that inherit the
    descriptor that this gives.

    Args:
        ranks_end_within_s: how long to wait for ranks whose launcher has been killed, in seconds.

    Raises:
        ConfigError: another job is running there.
    """
    with writing(run):
        run.mkdir(parents=True, exist_ok=True)
        lock = os.open(run / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        _take(lock, run, ranks_end_within_s)
        with writing(run):
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
        yield lock
    finally:
        os.close(lock)


def _take(lock: int, run: Path, limit_s: float) -> None:
    deadline, waits = time.monotonic() + limit_s, False
    while not _try(lock, run):
        pid = os.pread(lock, 20, 0).decode().strip()
        if not pid.isdigit() or start_of(int(pid)) is not None:
            raise ConfigError(
                f"The run in {run} is still going on (process {pid}). Wait for its end, stop it by `kill {pid}`, or "
                "start another one beside it by --fresh."
            )
        if not waits:
            waits = True
            print(f"the launcher of {run} was killed (process {pid}): waiting for the end of its ranks", flush=True)
        if time.monotonic() > deadline:
            raise ConfigError(
                f"The ranks of the last job in {run} haven't ended within {limit_s:.0f} s (launch.stop_within_s), "
                f"though their launcher (process {pid}) is gone, or it runs on another host. Look at "
                f"{run / 'latest' / 'rank_000.log'}; end the processes of the rank_*.pid beside it if they hang."
            )
        time.sleep(POLL_S)


def _try(lock: int, run: Path) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:  # some parallel file systems have no locks
        print(
            f"warning: {run} can't be locked ({error.strerror}): nothing keeps a second job out of it", file=sys.stderr
        )
    return True
