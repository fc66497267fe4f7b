"""Which rank failed first, and its last words."""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.launcher.runfolder import Attempt
from headrace.launcher.srun_output import Report, is_garbled, lost_a_node

FULL_BYTES = 1 << 20
"""A disk with less free space than this counts as full."""

LAST_LINES = 15
LOG_END_BYTES = 20_000

CRASHED = "Fatal Python error: "
"""What Python's fault handler writes into the log of a rank that a SIGSEGV, SIGBUS, SIGABRT or SIGFPE ends."""

GARBLED = (
    "MPICH's ranks couldn't start, since Slurm's pmi2 plugin cut what they told each other. It happens by chance, on "
    "some machines always: use launch.starter=mpirun, which doesn't need the plugin, or launch.mpi=openmpi."
)

NAMED_RANK = (
    re.compile(r"noticed that process rank (\d+) with PID"),
    re.compile(r"due to process rank (\d+) with PID"),
    re.compile(r"Process name: \[[^,]*,(\d+)\]"),
    re.compile(r"^Abort\(\d+\) on node (\d+) "),
)
"""How mpirun names a rank."""

NAMED_PROCESS = re.compile(r"^=   PID (\d+) RUNNING AT ")


@dataclass(frozen=True, slots=True)
class Failure:
    """The first failure of a job."""

    rank: int | None
    """None if no rank can be named."""
    cause: str
    """A paragraph, or a traceback where the cause is a defect."""
    last_lines: Sequence[str]
    """The end of the rank's log, or of mpirun's output; nothing where the cause says it all."""
    log: Path
    accident: bool = False
    """A rank or a node died: neither config nor data are to blame, and another attempt may succeed."""

    def __str__(self) -> str:
        lines = [f"headrace: {self.cause}"]
        if self.last_lines:
            lines += [f"The last lines of {self.log}:", *(f"    {line}" for line in self.last_lines)]
        else:
            lines.append(f"More is in {self.log}.")
        return "\n".join(lines)


def first_failure(
    attempt: Attempt,
    status: int,
    deaths: Sequence[int],
    told: Sequence[Report],
    output: list[str],
    mpirun_signal: int | None = None,
) -> Failure:
    """What failed first: the rank that a signal ended without a word, or the earliest error that a rank wrote down.

    Under srun the lifelines tell. Otherwise a rank that reports an error aborts the others, which then die without a
    word, perhaps before itself; so the silent ones count first only if a signal, not an abort, gave the job its status,
    or if one of them died first and all errors are about the loss of others; and among them one that crashed before
    those that were killed.

    Args:
        deaths: the ranks in the order in which they ended, as far as it is known.
        told: the ends of ranks that srun has reported.
        output: the last lines of mpirun.
        mpirun_signal: the signal that ended mpirun itself, if one did.
    """
    errors = _errors(attempt)
    suspects = _suspects(attempt, status, deaths, told)
    if mpirun_signal is not None and not errors:
        cause = f"mpirun itself was ended by {_signal(mpirun_signal)}, and the ranks with it.{_hint(mpirun_signal)}"
        return Failure(None, cause, output[-LAST_LINES:], attempt.mpirun_log, accident=True)
    if is_garbled(output):
        return Failure(None, GARBLED, output[-LAST_LINES:], attempt.mpirun_log, accident=True)
    rank = suspects[0] if suspects else _named_rank(attempt, output)
    node = lost_a_node(output)
    if rank is None or (node and rank not in errors):
        cause = "A node was lost." if node else f"The job ended with status {status} before any rank said why."
        return Failure(None, cause, output[-LAST_LINES:], attempt.mpirun_log, node)
    log = attempt.run / "latest" / attempt.rank_log(rank).name
    if rank in errors:
        accident = node or rank not in own_errors(attempt)
        return Failure(rank, f"Rank {rank} failed: {_text(errors[rank])}", (), log, accident)
    cause = _sudden_end(_name(rank, deaths, told), status)
    if errors and status <= 128:  # the status of those that lost it
        first, text = next((other, _text(file)) for other, file in errors.items())
        cause = f"{_name(rank, deaths, told)} ended first, and left no error. Rank {first} lost it: {text}"
    if shutil.disk_usage(attempt.run).free < FULL_BYTES:
        cause += (
            f" The disk of {attempt.run} is full, so it couldn't write down why: free some space, then go on by "
            "--resume, or choose another run.dir."
        )
    return Failure(rank, cause, _last_lines(log), log, accident=status > 128 or bool(errors))


def _suspects(attempt: Attempt, status: int, deaths: Sequence[int], told: Sequence[Report]) -> list[int]:
    """The ranks that may have failed first, likeliest first."""
    reported, own = list(_errors(attempt)), own_errors(attempt)
    if deaths and told:
        return list(dict.fromkeys([*(rank for rank in own if rank not in deaths), *deaths, *reported]))
    deaths = deaths or [rank for report in told for rank in report.ranks]
    silent = [rank for rank in deaths if rank not in reported]
    silent.sort(key=lambda rank: not _has_crashed(attempt.rank_log(rank)))
    if told:  # srun reports those that it has ended itself, too, and perhaps before the one that failed
        return own + silent + reported
    lost_one = bool(deaths) and deaths[0] in silent and not own
    return silent + reported if status > 128 or lost_one else reported + silent


def _errors(attempt: Attempt) -> dict[int, Path]:
    """What ranks have written down, by rank, earliest first."""
    files = sorted(attempt.folder.glob("error_*.txt"), key=lambda file: file.stat().st_mtime)
    return {int(file.stem.removeprefix("error_")): file for file in files}


def own_errors(attempt: Attempt) -> list[int]:
    """The ranks whose errors aren't about the loss of others, earliest first."""
    return [rank for rank in _errors(attempt) if not (attempt.folder / f"lost_{rank:03d}").exists()]


def _name(rank: int, deaths: Sequence[int], told: Sequence[Report]) -> str:
    """Where only srun tells, and of several ranks of a node at once, any of them may have been the first."""
    report = next((report for report in told if rank in report.ranks), None)
    if report is None:
        return f"Rank {rank}"
    first = [rank] if rank in deaths else report.ranks
    return f"Rank {' or '.join(map(str, first))} (on {report.node})"


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace").strip()


def _named_rank(attempt: Attempt, output: Sequence[str]) -> int | None:
    matches = (pattern.search(line) for line in output for pattern in NAMED_RANK)
    named = next((int(match[1]) for match in matches if match), None)
    return _rank_of_process(attempt, output) if named is None else named


def _rank_of_process(attempt: Attempt, output: Sequence[str]) -> int | None:
    """Over several hosts MPICH's mpirun names the process instead."""
    pids = [match[1] for match in map(NAMED_PROCESS.match, output) if match]
    files = [file for file in attempt.folder.glob("rank_*.pid") if file.read_text().strip() in pids]
    return int(files[0].stem.removeprefix("rank_")) if len(files) == 1 else None


def _sudden_end(name: str, status: int) -> str:
    if status <= 128:
        return f"{name} ended first, with status {status}, and left no error."
    return f"{name} was ended by {_signal(status - 128)}.{_hint(status - 128)}"


def _signal(number: int) -> str:
    name = signal.Signals(number).name if number in set(signal.Signals) else "unknown"
    return f"signal {number} ({name})"


def _hint(number: int) -> str:
    if number != signal.SIGKILL:
        return ""
    return " It was killed by hand, or by the kernel for want of memory (see dmesg)."


def _last_lines(log: Path) -> list[str]:
    return _end_of(log).splitlines()[-LAST_LINES:]


def _has_crashed(log: Path) -> bool:
    return CRASHED in _end_of(log)


def _end_of(log: Path) -> str:
    """The last part of a log, which may be large; nothing if there is none."""
    if not log.is_file():
        return ""
    with open(log, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - LOG_END_BYTES))
        return file.read().decode(errors="replace")
