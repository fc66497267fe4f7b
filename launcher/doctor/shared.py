"""Whether all hosts see one run folder, and each other's locks there."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import msgspec

from headrace.launcher.doctor.disk import existing, is_free, scratch
from headrace.launcher.doctor.findings import Finding, fail, warn, worst
from headrace.launcher.doctor.talk import Talk

SEEN_WITHIN_S = 10.0
"""A network file system may show new files late."""

NAP_S = 0.1


class Seen(msgspec.Struct, frozen=True):
    """What a host sees of a file that rank 0 holds."""

    there: bool
    locked: bool
    after_s: float


def measure_shared(talk: Talk, folder: Path, leaders: Mapping[str, int]) -> dict[str, Seen]:
    """What each host but rank 0's sees of a file of rank 0; another rank where there is one host."""
    watchers = {host: rank for host, rank in leaders.items() if rank != 0} or {"rank 1": min(1, talk.size - 1)}
    if talk.rank:
        (path, *_) = talk.stage("hear of a file of rank 0", str, str)
        watches = talk.rank in watchers.values()
        seen = talk.stage("look at a file of rank 0", Seen, lambda: _look(Path(path)) if watches else _nothing())
    else:
        with scratch(existing(folder)) as work, open(work / "held", "w") as held:
            talk.stage("write a file in the run folder", str, lambda: _hold(held))
            seen = talk.stage("look at a file of rank 0", Seen, _nothing)
    return {host: seen[rank] for host, rank in watchers.items() if rank != 0}


def _nothing() -> Seen:
    return Seen(True, True, 0.0)


def _hold(held: IO[str]) -> str:
    held.write("held")
    held.flush()
    os.fsync(held.fileno())
    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return held.name


def _look(path: Path) -> Seen:
    began = time.monotonic()
    while time.monotonic() - began < SEEN_WITHIN_S:
        if path.is_file() and path.read_text() == "held":
            after = time.monotonic() - began
            with open(path) as file:
                return Seen(True, not is_free(file.fileno()), after)
        time.sleep(NAP_S)
    return Seen(False, False, SEEN_WITHIN_S)


def judge_shared(folder: Path, seen: Mapping[str, Seen]) -> Finding:
    """One run folder for all ranks."""
    blind = [host for host, one in seen.items() if not one.there]
    loose = [host for host, one in seen.items() if one.there and not one.locked]
    complaints = []
    if blind:
        text = f"{', '.join(blind)} can't see {folder} of rank 0's host"
        complaints.append(fail("", text, "Put run.dir on a file system that all nodes share."))
    if loose:
        text = f"{', '.join(loose)} may lock what rank 0's host has locked"
        remedy = (
            "Never start two jobs in one run folder, or have it mounted with locks that nodes share (Lustre: flock)."
        )
        complaints.append(warn("", text, remedy))
    latest = max((one.after_s for one in seen.values()), default=0.0)
    return worst("run folder", complaints, f"{folder} is seen by all, within {latest:.1f} s, with its locks")
