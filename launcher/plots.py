"""The learning curve of a run as a picture."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.comm.files import disk_errors, write_whole
from headrace.launcher.metrics import Row, read_rows

WINDOW = 10
"""Steps of the moving average."""

BLUE, ORANGE, GREEN, GREY = "#2166ac", "#d6604d", "#4d9221", "#888888"


def learning_curve(run: Path) -> Path | None:
    """Draw RUN/learning_curve.png from RUN/metrics.jsonl: reward above, staleness and idle shares below.

    Returns None, and draws nothing, for a run of fewer than two steps.

    Raises:
        HeadraceError: the picture can't be written.
    """
    rows = read_rows(run / "metrics.jsonl")
    if len(rows) < 2:
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6.2), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    reward, staleness, idle = figure.subplots(3, 1, sharex=True, height_ratios=(3, 1, 1))
    _draw_reward(reward, rows)
    reward.set_title(run.name, loc="left", fontweight="bold")
    reward.set_title(_accuracies(run), loc="right", fontsize="medium")
    _draw_staleness(staleness, rows)
    _draw_idle(idle, rows)
    for axes in (reward, staleness, idle):
        _tidy(axes)
    idle.set_xlabel("optimizer step")
    figure.align_ylabels()
    picture, drawn = run / "learning_curve.png", io.BytesIO()
    figure.savefig(drawn, format="png")
    with disk_errors(f"The learning curve {picture}", run, "Free some space; the run itself is complete."):
        write_whole(picture, drawn.getvalue())
    return picture


def _draw_reward(axes: Any, rows: Sequence[Row]) -> None:
    steps = column(rows, "step")
    for key, label, color in (
        ("reward/generated_mean", "generated since the last step", ORANGE),
        ("reward/mean", "trained batch", BLUE),
    ):
        values = column(rows, key)
        axes.plot(steps, values, color=color, alpha=0.25, linewidth=1)
        axes.plot(steps, moving_average(values, WINDOW), color=color, linewidth=2, label=label)
    axes.set_ylabel(f"mean reward\n(average of {WINDOW} steps)")
    axes.legend(frameon=False, loc="upper left")


def _draw_staleness(axes: Any, rows: Sequence[Row]) -> None:
    steps = column(rows, "step")
    mean, most = column(rows, "staleness/mean"), column(rows, "staleness/max")
    axes.step(steps, most, color=GREY, linewidth=1, where="mid", label="max")
    axes.plot(steps, mean, color=GREEN, linewidth=1.6, label="mean")
    axes.set_ylabel("staleness\n(versions)")
    axes.set_ylim(bottom=0, top=max(1.0, float(np.nanmax(np.append(most, 0)))) * 1.6)
    axes.legend(frameon=False, loc="upper right", ncols=2)


def _draw_idle(axes: Any, rows: Sequence[Row]) -> None:
    steps = column(rows, "step")
    for key, label, color in (("idle/generator", "generators", ORANGE), ("idle/trainer", "trainers", BLUE)):
        axes.plot(steps, 100 * moving_average(column(rows, key), WINDOW), color=color, linewidth=1.6, label=label)
    axes.set_ylabel("idle (%)")
    axes.set_ylim(0, 100)
    axes.legend(frameon=False, loc="center right", ncols=2)


def _accuracies(run: Path) -> str:
    """The accuracy on held-out tasks before and after, where it was measured."""
    found = {row["label"]: row["accuracy"] for row in read_rows(run / "evaluations.jsonl")}
    if not {"before", "after"} <= set(found):
        return ""
    return f"greedy accuracy on held-out tasks: {found['before']:.1%} → {found['after']:.1%}"


def _tidy(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.margins(x=0.01)


def column(rows: Sequence[Row], key: str) -> npt.NDArray[np.float64]:
    """One figure over all rows; NaN where a row hasn't got it."""
    return np.array([np.nan if row.get(key) is None else row[key] for row in rows], dtype=np.float64)


def moving_average(values: npt.NDArray[np.float64], window: int) -> npt.NDArray[np.float64]:
    """Mean of the last `window` values that are there, at every place; NaN where there is none."""
    known = np.isfinite(values)
    sums = np.cumsum(np.where(known, values, 0.0))
    counts = np.cumsum(known)
    sums[window:] = sums[window:] - sums[:-window]
    counts[window:] = counts[window:] - counts[:-window]
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
