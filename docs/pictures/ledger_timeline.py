"""Draws docs/pictures/ledger-timeline.png: the groups of a small simulated run at S = 0, 1 and 2.

python docs/pictures/ledger_timeline.py [PICTURE]

The ledgers are those of a real job (`headrace.ranks.simulator`); lengths are lognormal with sigma 1, and a training
step takes as long as an average sample. Every bar is one group, in the order of the tickets.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from headrace.ranks.simulator import SimulatedJob, Simulation, Trace
from headrace.ranks.tickets import LedgerSpec

PICTURE = Path(__file__).with_name("ledger-timeline.png")
STEPS = 8
GROUPS = 4
GROUP_SIZE = 2
GENERATORS = 4
TRAIN_S = 1.0

WAITS, TRAINED = "#f4a582", "#4d9221"
VERSIONS = ["#08519c", "#2171b5", "#4292c6", "#6baed6", "#9ecae1"]
"""Of a group that began with version v: the one at v modulo their number."""


def length(ticket: int, sample: int) -> int:
    """Lognormal with mean 1,000 tokens, which take one second."""
    uniform = np.random.default_rng([ticket, sample]).uniform(0.001, 0.999)
    return round(1000 * math.exp(NormalDist().inv_cdf(uniform) - 0.5))


def run(staleness: int) -> Trace:
    spec = LedgerSpec(GROUPS, staleness, 1, GROUP_SIZE, STEPS)
    return Simulation(SimulatedJob(spec, GENERATORS, length, ledgers=2, slots=4, train_s=TRAIN_S)).run()


def draw_run(axes: Any, trace: Trace, staleness: int) -> None:
    """One panel: per group blue while it is sampled, orange until it is trained, then green with its age."""
    begin = 0.0
    for step in trace.steps:
        for formed, group in zip(step.formed.groups, trace.of_step(step), strict=True):
            spans = [
                (group.started, group.finished, VERSIONS[formed.born % len(VERSIONS)]),
                (group.finished, step.pulled_at, WAITS),
                (step.pulled_at, step.trained_at, TRAINED),
            ]
            for left, right, color in spans:
                axes.barh(group.ticket, right - left, left=left, height=0.8, color=color)
            age = step.formed.step - formed.born
            middle = (step.pulled_at + step.trained_at) / 2
            axes.text(middle, group.ticket, str(age), ha="center", va="center", color="white", fontsize=6)
        axes.axvline(step.trained_at, color="black", linewidth=0.4)
        begin = max(begin, step.trained_at)
    axes.set_title(f"S = {staleness}: {STEPS} steps in {begin:.1f} s", loc="left", fontsize="medium")
    axes.set_ylabel("ticket")
    axes.invert_yaxis()
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def main(picture: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(9, 9), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(3, 1, sharex=True)
    for staleness, axes in enumerate(panels):
        draw_run(axes, run(staleness), staleness)
    panels[-1].set_xlabel("seconds; a line where a version is published")
    colors = [VERSIONS[0], WAITS, TRAINED]
    labels = ["sampled (a shade per first version)", "waits to be trained", "trained, at this age in versions"]
    patches = [Patch(color=color, label=label) for color, label in zip(colors, labels, strict=True)]
    figure.legend(handles=patches, loc="outside lower center", ncols=3, frameon=False)
    figure.savefig(picture)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else PICTURE)
