"""What a running job looks like: a live table in a terminal, plain lines elsewhere; events of the ranks above it."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text
from typing_extensions import Self

from headrace.launcher.metrics import MetricsTail, Row

SHOWN_ROWS = 15
TICK_S = 0.2
RECENT = 10
"""Steps over which the time left is estimated."""


class View(AbstractContextManager["View"], Protocol):
    """Shows a run; `tick` is called a few times a second."""

    def line(self, text: str) -> None: ...

    def tick(self) -> None: ...


def make_view(run: Path, steps: int, done: int = 0) -> View:
    """The view that suits stdout, for a run of `steps` steps of which `done` were done before."""
    return LiveView(run, steps, done) if sys.stdout.isatty() else PlainView(run, steps, done)


@contextmanager
def ticking(view: View) -> Iterator[None]:
    """Tick from a thread, for a job that runs in this process."""
    ended = threading.Event()

    def tick() -> None:
        while not ended.wait(TICK_S):
            view.tick()

    thread = threading.Thread(target=tick, name="view", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@dataclass(frozen=True, slots=True)
class Column:
    """One figure of a step."""

    title: str
    text: Callable[[Row], str | None]
    """None where the row hasn't got it."""
    style: str = ""


def _number(key: str, form: str) -> Callable[[Row], str | None]:
    def text(row: Row) -> str | None:
        value = row.get(key)
        return None if value is None else format(value, form)

    return text


def _pair(first: str, second: str, form: str, separator: str) -> Callable[[Row], str | None]:
    def text(row: Row) -> str | None:
        parts = [_number(key, form)(row) for key in (first, second)]
        return separator.join(part or "–" for part in parts) if any(parts) else None

    return text


COLUMNS = (
    Column("version", _number("version", "d")),
    Column("reward", _number("reward/mean", ".3f"), "bold green"),
    Column("generated", _number("reward/generated_mean", ".3f"), "green"),
    Column("staleness mean/max", _pair("staleness/mean", "staleness/max", ".3g", " / ")),
    Column("tokens/s", _number("tokens/generated_per_s", ",.0f")),
    Column("idle gen/train", _pair("idle/generator", "idle/trainer", ".0%", " / ")),
    Column("step s", _number("time/step", ".2f")),
)


@dataclass
class Clock:
    """Estimates the time left from the last steps."""

    steps: int
    _times: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=RECENT + 1))

    def left(self, row: Row, now: float) -> str | None:
        """Time to the last step, at the pace of the recent ones; None before the second row."""
        self._times.append((now, row["step"]))
        (then, before), done = self._times[0], row["step"]
        if done <= before:
            return None
        return duration((now - then) / (done - before) * max(0, self.steps - done))


def duration(seconds: float) -> str:
    """`1:02:03` or `2:03`."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


class PlainView:
    """One line per step. Other lines come after those of the steps that were done before them, also from several
    threads."""

    def __init__(self, run: Path, steps: int, done: int = 0) -> None:
        self._tail = MetricsTail(run / "metrics.jsonl", done)
        self._steps = steps
        self._clock = Clock(steps)
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.tick()

    def line(self, text: str) -> None:
        with self._lock:
            self._show_steps()
            print(text, flush=True)

    def tick(self) -> None:
        with self._lock:
            self._show_steps()

    def _show_steps(self) -> None:
        for row in self._tail.new_rows():
            print(self._describe(row), flush=True)

    def _describe(self, row: Row) -> str:
        figures = [f"{column.title} {text}" for column in COLUMNS if (text := column.text(row)) is not None]
        left = self._clock.left(row, time.monotonic())
        return ", ".join([f"step {row['step']}/{self._steps}", *figures, *([f"{left} left"] if left else [])])


class LiveView:
    """A table of the last steps that stays at the bottom of the terminal."""

    def __init__(self, run: Path, steps: int, done: int = 0, console: Console | None = None) -> None:
        self._tail = MetricsTail(run / "metrics.jsonl", done)
        self._steps = steps
        self._clock = Clock(steps)
        self._rows: deque[list[str]] = deque(maxlen=SHOWN_ROWS)
        self._live = Live(console=console or Console(), auto_refresh=False, transient=False)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.tick()
        self._live.stop()

    def line(self, text: str) -> None:
        self._live.console.print(Text(text), soft_wrap=True)

    def tick(self) -> None:
        rows = self._tail.new_rows()
        for row in rows:
            left = self._clock.left(row, time.monotonic())
            figures = [column.text(row) or "–" for column in COLUMNS]
            self._rows.append([f"{row['step']}/{self._steps}", *figures, left or "–"])
        if rows:
            self._live.update(self._table(), refresh=True)

    def _table(self) -> Table:
        table = Table("step", header_style="bold", border_style="dim")
        for column in COLUMNS:
            table.add_column(column.title, justify="right", style=column.style)
        table.add_column("left", justify="right")
        for row in self._rows:
            table.add_row(*row)
        return table
