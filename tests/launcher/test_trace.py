"""`headrace trace`: one file from those of the ranks."""

from __future__ import annotations

import json

import pytest

from headrace.comm.errors import HeadraceError
from headrace.launcher.trace import merge_traces
from headrace.ranks.trace import Trace


def test_the_newest_attempt_is_merged_without_a_line_that_is_still_being_written(tmp_path):
    for attempt, rank in ((1, 0), (2, 0), (2, 1)):
        file = tmp_path / f"trace/attempt_{attempt:02d}_rank_{rank:03d}.jsonl"
        trace = Trace(file, rank, "trainer")
        trace.span(f"training step {attempt}", 1.0, 1.5)
        trace.close()
        with file.open("a") as cut:
            cut.write('{"name": "trai')
    events = json.loads(merge_traces(tmp_path, None).read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert [(span["pid"], span["name"], span["args"]["state"], span["dur"]) for span in spans] == [
        (0, "training step", "training step 2", 0.5e6),
        (1, "training step", "training step 2", 0.5e6),
    ]


def test_a_run_without_traces_says_how_to_get_them(tmp_path):
    with pytest.raises(HeadraceError, match=r"run\.trace: true"):
        merge_traces(tmp_path, None)
