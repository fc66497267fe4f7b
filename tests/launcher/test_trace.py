"""`headrace trace`: one file from those of the ranks."""

from __future__ import annotations

import json
from pathlib import Path

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


def test_the_hundredth_attempt_is_newer_than_the_one_before_and_not_the_tenth(tmp_path):
    for attempt in (10, 99, 100):
        trace = Trace(tmp_path / f"trace/attempt_{attempt:02d}_rank_000.jsonl", 0, f"of {attempt}")
        trace.close()
    (event,) = json.loads(merge_traces(tmp_path, None).read_text())["traceEvents"]
    assert event["args"] == {"name": "of 100, rank 0"}


def test_a_run_without_traces_says_how_to_get_them(tmp_path):
    with pytest.raises(HeadraceError, match=r"run\.trace: true"):
        merge_traces(tmp_path, None)


@pytest.mark.parametrize("content", [b"\xff\xfe\n", b'{"a":\n', b"[1, 2]\n", b"null\n", b'{"name": 3}\n'])
def test_a_damaged_trace_is_named(tmp_path, content):
    file = tmp_path / "trace/attempt_01_rank_002.jsonl"
    file.parent.mkdir()
    file.write_bytes(content)
    with pytest.raises(HeadraceError, match=r"attempt_01_rank_002\.jsonl holds what no rank has written"):
        merge_traces(tmp_path, None)


def test_a_folder_in_place_of_a_trace_is_named(tmp_path):
    (tmp_path / "trace/attempt_01_rank_002.jsonl").mkdir(parents=True)
    with pytest.raises(HeadraceError, match=r"attempt_01_rank_002\.jsonl can't be read: Is a directory"):
        merge_traces(tmp_path, None)


def test_a_full_disk_ends_the_trace_and_not_the_run(capsys):
    trace = Trace(Path("/dev/full"), 0, "trainer")
    for step in range(3):
        trace.span(f"training step {step}", 10.0 * step, 1e9)
    trace.close()
    assert capsys.readouterr().err == (
        "The trace /dev/full can't be written (No space left on device); the run goes on without it.\n"
    )
