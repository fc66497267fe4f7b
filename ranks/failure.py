"""How a rank writes what it says, and how it ends when something goes wrong.

Every rank has one log, `RUN/attempt_NN/rank_NNN.log`, with all that it and its libraries write. A rank that fails
leaves `error_NNN.txt` beside it (one paragraph for a user's mistake, a traceback for a defect) and aborts the whole
job, so that no other rank waits for it; the launcher quotes the earliest of these files. A rank that fails since it has
lost others leaves `lost_NNN`, too: the launcher may start the job again.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn, TextIO

from headrace.comm.errors import HeadraceError, PeerLostError, WaitLimitError
from headrace.comm.files import write_whole
from headrace.comm.last_words import wait_until_read
from headrace.ranks.lifeline import Lifeline
from headrace.ranks.seat import NUMBERS, rank_of

JOB_MARK = "HEADRACE_JOB"
"""Environment variable by which every process that a launcher starts for a job, and no other, is recognised."""

FAILED = 1
"""Exit status of a failed rank."""


def open_log(folder: Path, rank: int) -> TextIO:
    """Send stdout and stderr of this process, C libraries included, to its log; return the stdout it had before."""
    terminal = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    log = os.open(folder / f"rank_{rank:03d}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    return terminal


def arrive(folder: Path, environ: Mapping[str, str]) -> None:
    """Leave a sign that this process is there, before it starts MPI, which waits until all are. A process that nobody
    has given a number leaves none."""
    if folder.is_dir() and any(name in environ for name in NUMBERS):
        (folder / f"rank_{rank_of(environ):03d}.here").touch()


def announce(folder: Path, rank: int, environ: Mapping[str, str]) -> bool:
    """Leave the process id. Returns whether a launcher has started this process."""
    (folder / f"rank_{rank:03d}.pid").write_text(f"{os.getpid()}\n", encoding="utf-8")
    return JOB_MARK in environ


def complain(sentence: str) -> None:
    """A line in the log of this rank, which goes on."""
    print(sentence, file=sys.stderr, flush=True)


class Failure:
    """Ends the job with the text of an error; may be called by any thread, and the first call counts."""

    def __init__(self, folder: Path, rank: int, abort: Callable[[int], None]) -> None:
        self.terminal: TextIO | None = None
        """Where the error is told if the file can't be written, as on a full disk, or if no launcher quotes it."""
        self.quoted = False
        """Whether a launcher shows the file to the user."""
        self.lifeline: Lifeline | None = None
        """Let go before the abort, by which others may die first."""
        self.folder = folder
        """Of the attempt."""
        self._file = folder / f"error_{rank:03d}.txt"
        self._lost = folder / f"lost_{rank:03d}"
        self._abort = abort
        self._lock = threading.Lock()

    def __call__(self, error: BaseException) -> NoReturn:
        with self._lock:
            text = error_text(error)
            self._tell(text, isinstance(error, PeerLostError | WaitLimitError) or _broke_off(error))
            if self.lifeline is not None:
                self.lifeline.let_go()
            self._abort(FAILED)
            os._exit(FAILED)

    def _tell(self, text: str, others_to_blame: bool) -> None:
        try:
            print(text, file=sys.stderr, flush=True)
            if others_to_blame:
                self._lost.touch()
            write_whole(self._file, f"{text}\n".encode())
            told = self.quoted
        except OSError:
            told = False
        if not told and self.terminal is not None:
            self.terminal.write(text + "\n")
            wait_until_read([self.terminal])

    def watch_threads(self) -> None:
        """End the job when any thread dies of an exception."""
        threading.excepthook = lambda args: self(args.exc_value or RuntimeError(f"thread died: {args.exc_type}"))


def error_text(error: BaseException) -> str:
    """One paragraph for a mistake of the user or of the outside world, a traceback for a defect."""
    if isinstance(error, HeadraceError):
        return str(error)
    if _broke_off(error):
        first = str(error).strip().splitlines()[0]
        return (
            "A collective of the trainers broke off: one of them has died; look at the ends of their logs. The backend "
            f"says: {first}"
        )
    if isinstance(error, OSError) and error.errno in DISK_ERRORS:
        return (
            f"Writing failed: {error.strerror} ({error.filename or 'the run folder'}). Free some space or choose "
            "another run.dir; what was complete before is kept, and --resume goes on from the last checkpoint."
        )
    return "".join(traceback.format_exception(error)).rstrip()


def _broke_off(error: BaseException) -> bool:
    """Whether torch says that another rank has left a collective, as it does inside FSDP where nobody else can."""
    return isinstance(error, RuntimeError) and BROKEN_OFF.search(str(error)) is not None


BROKEN_OFF = re.compile(
    r"gloo/transport/\S+.*(Connection reset|Connection closed|Connection refused|Broken pipe)"
    r"|remote process exited or there was a network error",
    re.DOTALL,
)
"""What gloo, and what NCCL, say when a peer goes away."""

DISK_ERRORS = (27, 28, 30, 122)
"""EFBIG, ENOSPC, EROFS, EDQUOT."""
