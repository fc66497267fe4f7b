"""One trace of a run from those of its ranks, for https://ui.perfetto.dev or chrome://tracing."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from headrace.comm.errors import HeadraceError
from headrace.comm.files import write_whole
from headrace.ranks.trace import FOLDER


class _Event(msgspec.Struct):
    name: str
    ph: Literal["X", "M"]
    pid: int
    args: dict[str, str]
    ts: float = 0.0
    dur: float = 0.0
    tid: int = 0


_decoder = msgspec.json.Decoder(_Event)


def merge_traces(run: Path, out: Path | None) -> Path:
    """Put what all ranks of the newest attempt have written so far into one file; returns its path.

    Args:
        run: run folder.
        out: the new file; None: `trace/trace.json` in the run folder.

    Raises:
        HeadraceError: there are no traces, or the file can't be written.
    """
    files = sorted((run / FOLDER).glob("*_rank_*.jsonl"))
    if not files:
        raise HeadraceError(f"{run} has no traces. Ranks write them with run.trace: true in the config.")
    attempts = {file: file.name.partition("_rank_")[0] for file in files}
    newest = max(attempts.values(), key=lambda name: (len(name), name))  # attempt_100 comes after attempt_99
    events = [event for file in files if attempts[file] == newest for event in _events(file)]
    target = out if out is not None else run / FOLDER / "trace.json"
    try:
        write_whole(target, msgspec.json.encode({"traceEvents": events}))
    except OSError as error:
        raise HeadraceError(f"The trace can't be written: {error.strerror} ({target}).") from None
    return target


def _events(file: Path) -> list[_Event]:
    """Those of one rank, without a line that is still being written."""
    try:
        return [_decoder.decode(line) for line in file.read_bytes().split(b"\n")[:-1]]
    except OSError as error:
        raise HeadraceError(f"The trace {file} can't be read: {error.strerror}.") from None
    except msgspec.MsgspecError as error:
        raise HeadraceError(
            f"The trace {file} holds what no rank has written ({error}). Delete the file to see the other ranks."
        ) from None
