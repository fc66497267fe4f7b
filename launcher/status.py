"""`headrace status`: how runs go, from the files that they leave and from Slurm's queue.

    config.yaml       steps to do           attempt_NN/launcher.json   the process that holds the ranks: does it live?
    metrics.jsonl     the last steps        attempt_NN/outcome.json    how the attempt ended
    slurm_job         the job in the queue  attempt_NN/error_NNN.txt   why a rank failed, where nobody wrote an outcome

Nothing is written or locked, files of any size are read at their ends only, and a run may go on meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from headrace.comm.errors import ConfigError, DataError, HeadraceError
from headrace.launcher.config import read_yaml
from headrace.launcher.metrics import last_rows
from headrace.launcher.queue import QueuedJob, queued
from headrace.launcher.record import Ended, Launcher, end_of, job_of, launcher_of
from headrace.launcher.run import STOPPED
from headrace.launcher.view import duration

RUNS = Path("runs")

State = Literal["running", "waiting", "ended", "stopped", "failed", "new", "unreadable"]
STYLES: dict[State, str] = {"running": "green", "waiting": "yellow", "failed": "bold red", "unreadable": "bold red"}

RECENT = 20
"""Steps over which rate and reward are taken."""

QUIET_S = 600.0
"""Ranks that can't be asked whether they live are taken to run if they have written something since."""


@dataclass(frozen=True, slots=True)
class RunStatus:
    """How a run goes."""

    folder: Path
    state: State
    detail: str = ""
    """What there is to say about the state."""
    step: int = 0
    steps: int | None = None
    reward: float | None = None
    """Mean over the last steps."""
    per_minute: float | None = None
    """Steps."""
    restarts: int = 0
    job: QueuedJob | None = None
    error: str | None = None
    """The last line of what failed last, of this attempt or of one before."""

    @property
    def left_s(self) -> float | None:
        """Seconds to the last step, at the pace of the recent ones."""
        if self.state != "running" or not self.per_minute or self.steps is None:
            return None
        return 60 * max(0, self.steps - self.step) / self.per_minute

    def time_left(self) -> str:
        """For instance `1:20:00`, with the job's own limit where it is known."""
        limit = self.job.left_s if self.job else None
        parts = [duration(self.left_s)] if self.left_s is not None else []
        parts += [f"limit in {duration(limit)}"] if limit is not None else []
        return ", ".join(parts)


def find_run(name: Path, runs: Path = RUNS) -> Path:
    """The folder of a run, given as a path or by its name.

    Raises:
        HeadraceError: there is none.
    """
    for folder in (name, runs / name):
        if is_run(folder):
            return folder
    known = ", ".join(folder.name for folder in all_runs(runs)) or "none"
    raise HeadraceError(f"There is no run {name}: neither a run folder of this name nor one under {runs} ({known}).")


def all_runs(runs: Path = RUNS) -> list[Path]:
    """The run folders, the one that wrote last at the end."""
    return sorted(filter(is_run, runs.glob("*")), key=_touched)


def is_run(folder: Path) -> bool:
    return (folder / "config.yaml").is_file()


def attempts(run: Path) -> list[Path]:
    """The folders of the attempts, oldest first."""
    return sorted(run.glob("attempt_*[0-9]"), key=lambda folder: int(folder.name.removeprefix("attempt_")))


def read_status(run: Path) -> RunStatus:
    """How one run goes. Files that hold something else than headrace writes make it `unreadable`.

    Raises:
        HeadraceError: Slurm doesn't answer.
    """
    try:
        return _read(run)
    except (ConfigError, DataError) as error:
        return RunStatus(run, "unreadable", str(error))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        return RunStatus(run, "unreadable", f"{type(error).__name__}: {error}")


def _read(run: Path) -> RunStatus:
    steps = _steps(read_yaml(run / "config.yaml"))
    rows = last_rows(run / "metrics.jsonl")[-RECENT:]
    step = rows[-1]["step"] if rows else 0
    tried = attempts(run)
    job = _job(run, tried)
    state, detail = judge(tried, job, step, steps, time.time())
    rewards = [row["reward/mean"] for row in rows if row.get("reward/mean") is not None]
    times = [row["time/step"] for row in rows if row.get("time/step")]
    return RunStatus(
        folder=run,
        state=state,
        detail=detail,
        step=step,
        steps=steps,
        reward=fmean(rewards) if rewards else None,
        per_minute=60 / fmean(times) if times else None,
        restarts=max(0, len(tried) - 1),
        job=job,
        error=None if state == "ended" else _last_error(tried),
    )


def _steps(config: dict[str, Any]) -> int | None:
    return (config.get("run") or {}).get("steps")


def _job(run: Path, tried: Sequence[Path]) -> QueuedJob | None:
    """The job that was submitted for the run, or in which its launcher is at work."""
    launcher = launcher_of(tried[-1]) if tried and end_of(tried[-1]) is None else None
    numbers = [number for number in (job_of(run), launcher.slurm_job if launcher else None) if number is not None]
    found = queued(numbers)
    return next((found[number] for number in numbers if number in found), None)


def judge(tried: Sequence[Path], job: QueuedJob | None, step: int, steps: int | None, now: float) -> tuple[State, str]:
    """The state of a run and what there is to say about it.

    Args:
        tried: the folders of the attempts, oldest first.
        now: seconds since 1970.
    """
    if job is not None and job.waits:
        return "waiting", f"job {job.job} is {job.state} ({job.reason})"
    if job is not None and job.runs:
        return "running", f"job {job.job}"
    if not tried:
        return "new", "it has never been started"
    launcher, ended = launcher_of(tried[-1]), end_of(tried[-1])
    lives = launcher is not None and launcher.is_here() and launcher.is_alive()
    if ended is not None and not (ended.failure is not None and lives):
        return _ended(ended)  # a launcher that outlives a failure starts the ranks again
    if launcher is not None and launcher.is_here():
        return _launched_here(launcher)
    return _without_launcher(tried[-1], launcher, step, steps, now)


def _ended(ended: Ended) -> tuple[State, str]:
    if ended.status == 0:
        return "ended", ""
    if ended.failure is None:
        how = "left a checkpoint" if ended.status == STOPPED else "ended before it could leave by itself"
        return "stopped", f"status {ended.status}: it was asked to stop and {how}"
    return "failed", f"status {ended.status}"


def _launched_here(launcher: Launcher) -> tuple[State, str]:
    if launcher.is_alive():
        return "running", f"process {launcher.pid}"
    return "failed", f"its launcher, process {launcher.pid}, was killed, or stopped before its ranks had started"


def _without_launcher(
    attempt: Path, launcher: Launcher | None, step: int, steps: int | None, now: float
) -> tuple[State, str]:
    """Judge by the files alone: the ranks were started by hand, or on another host."""
    where = f"started on {launcher.host}" if launcher else "started without `headrace run`"
    if list(attempt.glob("error_*.txt")):
        return "failed", where
    quiet = now - _touched(attempt.parent)
    if steps is not None and step >= steps and quiet > 5:
        return "ended", where
    if quiet < QUIET_S:
        return "running", f"{where}; it wrote something {duration(quiet)} ago"
    return "failed", f"{where}; it has written nothing for {duration(quiet)} and left no word of its end"


def _touched(run: Path) -> float:
    """When the run wrote last, in seconds since 1970."""
    files = [run / "config.yaml", run / "metrics.jsonl", *run.glob("attempt_*/rank_*.log")]
    return max((file.stat().st_mtime for file in files if file.is_file()), default=0.0)


def _last_error(tried: Sequence[Path]) -> str | None:
    return next(filter(None, map(_error_of, reversed(tried))), None)


def _error_of(attempt: Path) -> str | None:
    """The last line of the failure: the whole paragraph of a mistake, the error itself of a traceback."""
    ended = end_of(attempt)
    if ended is not None:
        return _last_line(ended.failure or "")
    errors = sorted(attempt.glob("error_*.txt"), key=lambda file: file.stat().st_mtime)
    return _last_line(errors[0].read_text(encoding="utf-8", errors="replace")) if errors else None


def _last_line(text: str) -> str | None:
    return next(filter(None, map(str.strip, reversed(text.splitlines()))), None)


# Showing


def show(found: Sequence[RunStatus], console: Console) -> None:
    """Print a table of runs, and below it a line for each that has something wrong; there the line has room."""
    table = Table(header_style="bold", border_style="dim")
    for title in ("run", "state", "step", "reward", "steps/min", "left", "restarts"):
        table.add_column(title, no_wrap=title not in ("run", "left"), overflow="fold")
    for status in found:
        state = Text(status.state, STYLES.get(status.state, ""))
        table.add_row(Text(status.folder.name), state, *map(Text, _figures(status)))
    console.print(table)
    for status in found:
        if wrong := status.detail if status.state == "unreadable" else status.error:
            console.print(Text(f"{status.folder.name}: {wrong}"), soft_wrap=True)


def show_one(status: RunStatus, console: Console) -> None:
    """Print what is known about one run, a line for each."""
    titles = ("step", "reward", "steps/min", "left", "restarts")
    lines = [("state", f"{status.state}{f' ({status.detail})' if status.detail else ''}")]
    lines += [(title, figure) for title, figure in zip(titles, _figures(status), strict=True) if figure]
    lines += [("last error", status.error)] if status.error else []
    console.print(Text(str(status.folder), "bold"))
    for title, text in lines:
        console.print(Text(f"  {title:<12}{text}"), soft_wrap=True)


def _figures(status: RunStatus) -> tuple[str, str, str, str, str]:
    steps = f"{status.step}/{status.steps if status.steps is not None else '?'}"
    reward = f"{status.reward:.3f}" if status.reward is not None else ""
    rate = f"{status.per_minute:.3g}" if status.per_minute is not None else ""
    return steps, reward, rate, status.time_left(), str(status.restarts)
