"""What the main thread of every rank does, and when: `trace/attempt_NN_rank_NNN.jsonl` in the run folder.

    MainState.set("training step 5")  ── the state before it has ended ──▶ Trace.span ── one line ──▶ file

A line is a complete event ("ph": "X") of the trace event format, which Perfetto and chrome://tracing read;
`headrace trace RUN` puts the files of all ranks into one. Times are microseconds of the hosts' clocks.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from headrace.ranks.failure import complain
from headrace.ranks.run import Rank

FOLDER = "trace"
"""In the run folder."""
FLUSH_S = 1.0


class Trace:
    """The spans of one rank, written as they end. For one thread.

    Args:
        file: is begun anew.
        rank: in the job.
        role: shown with it.
    """

    def __init__(self, file: Path, rank: int, role: str) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        self._file = file.open("w", encoding="utf-8")
        self._rank = rank
        self._epoch = time.time() - time.monotonic()
        self._broken = False
        self._flushed = time.monotonic()
        self._write({"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"{role}, rank {rank}"}})

    def span(self, state: str, begun: float, ended: float) -> None:
        """What the thread did from `begun` to `ended`, by the monotonic clock. Spans of states that differ only by the
        number at their end have one name."""
        event = {
            "name": state.rstrip("0123456789 "),
            "ph": "X",
            "ts": round(1e6 * (self._epoch + begun), 1),
            "dur": round(1e6 * (ended - begun), 1),
            "pid": self._rank,
            "tid": 0,
            "args": {"state": state},
        }
        self._write(event, flush=ended - self._flushed > FLUSH_S)

    def close(self) -> None:
        with suppress(OSError):  # the same that ended the trace before, or now, with the last lines
            self._file.close()

    def _write(self, event: dict[str, object], flush: bool = False) -> None:
        """A trace that can't be written any more ends; the run goes on."""
        if self._broken:
            return
        try:
            self._file.write(json.dumps(event) + "\n")
            if flush:
                self._file.flush()
                self._flushed = time.monotonic()
        except OSError as error:
            self._broken = True
            _complain(self._file.name, error)


def _complain(file: Path | str, error: OSError) -> None:
    complain(f"The trace {file} can't be written ({error.strerror}); the run goes on without it.")


@contextmanager
def traced(rank: Rank, attempt: str) -> Iterator[None]:
    """Write the states of its main thread while the block runs, if the config says so. `attempt`: as `attempt_00`."""
    if not rank.config.run.trace:
        yield
        return
    file = rank.folder / FOLDER / f"{attempt}_rank_{rank.rank:03d}.jsonl"
    try:
        trace = Trace(file, rank.rank, rank.roles.role(rank.rank))
    except OSError as error:
        _complain(file, error)
        yield
        return
    rank.main.on_end = trace.span
    try:
        yield
    finally:
        trace.close()
