"""What a run looks like while it goes on, and its picture at the end."""

import io
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from headrace.comm.errors import HeadraceError
from headrace.launcher.metrics import MetricsTail, last_rows, read_rows
from headrace.launcher.plots import learning_curve, moving_average
from headrace.launcher.view import Clock, LiveView, PlainView, duration, make_view


def row(step: int, **more: Any) -> dict[str, Any]:
    figures = {
        "step": step,
        "version": step,
        "reward/mean": step / 100,
        "reward/generated_mean": None,
        "staleness/mean": 0.5,
        "staleness/max": 2,
        "tokens/generated_per_s": 1234.5,
        "idle/generator": 0.25,
        "idle/trainer": 0.5,
        "time/step": 1.5,
    }
    return figures | more


def append(file: Path, *rows: dict[str, Any]) -> None:
    with open(file, "a") as stream:
        stream.writelines(json.dumps(one) + "\n" for one in rows)


def test_a_line_counts_once_it_is_whole(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    tail = MetricsTail(file)
    assert tail.new_rows() == []
    file.write_text('{"step": 1}\n{"st')
    assert tail.new_rows() == [{"step": 1}]
    with open(file, "a") as stream:
        stream.write('ep": 2}\n')
    assert tail.new_rows() == [{"step": 2}]
    assert tail.new_rows() == []
    assert read_rows(file) == [{"step": 1}, {"step": 2}]


@pytest.mark.parametrize("garbage", [b"\0" * 100, b'{"step": 1, "te', b"[1]", b"\xff\xfe", b""])
def test_a_line_that_a_crash_of_the_machine_has_garbled_is_passed_over(tmp_path: Path, garbage: bytes) -> None:
    file = tmp_path / "metrics.jsonl"
    tail = MetricsTail(file)
    file.write_bytes(b'{"step": 1}\n' + garbage + b'\n{"step": 2}\n')
    assert tail.new_rows() == read_rows(file) == last_rows(file) == [{"step": 1}, {"step": 2}]


@pytest.mark.parametrize("appended", [0, 1, 10])
def test_a_resumed_run_shows_its_own_steps_only(tmp_path: Path, appended: int) -> None:
    """The ranks cut the file back to the checkpoint of step 3, and may have gone on before the next look at it."""
    file = tmp_path / "metrics.jsonl"
    append(file, *map(row, range(1, 6)))
    tail = MetricsTail(file, done=3)
    assert tail.new_rows() == []
    append(tmp_path / "cut", *map(row, range(1, 4)), *(row(step, again=True) for step in range(4, 4 + appended)))
    (tmp_path / "cut").replace(file)
    assert tail.new_rows() == [row(step, again=True) for step in range(4, 4 + appended)]
    append(file, row(4 + appended))
    assert tail.new_rows() == [row(4 + appended)]


def test_the_time_left_after_a_resume_follows_the_pace_of_this_attempt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr("headrace.launcher.view.time.monotonic", lambda: now)
    file = tmp_path / "metrics.jsonl"
    append(file, *map(row, range(1, 41)))
    with PlainView(tmp_path, 60, done=20) as view:
        file.write_text("".join(json.dumps(row(step)) + "\n" for step in range(1, 21)))
        view.tick()
        for step in (21, 22):
            now += 2.0
            append(file, row(step))
            view.tick()
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("step 21/60")
    assert "left" not in first
    assert second.endswith(", 1:16 left")


def test_plain_lines_name_every_figure_that_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    append(tmp_path / "metrics.jsonl", row(1))
    with PlainView(tmp_path, 60) as view:
        append(tmp_path / "metrics.jsonl", row(2))
        view.tick()
        view.line("an [event]")
    assert capsys.readouterr().out.splitlines() == [
        "step 2/60, version 2, reward 0.020, staleness mean/max 0.5 / 2, tokens/s 1,234, idle gen/train 25% / 50%, "
        "step s 1.50",
        "an [event]",
    ]


def test_a_line_comes_after_the_steps_that_were_done_before_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with PlainView(tmp_path, 60) as view:
        append(tmp_path / "metrics.jsonl", row(1), row(2))
        view.line("evaluation after training")
        append(tmp_path / "metrics.jsonl", row(3))
    shown = [line.partition("/")[0] for line in capsys.readouterr().out.splitlines()]
    assert shown == ["step 1", "step 2", "evaluation after training", "step 3"]


def test_no_step_is_shown_twice_when_threads_look_at_the_same_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with PlainView(tmp_path, 1000) as view, ThreadPoolExecutor(4) as pool:
        for step in range(1, 201):
            append(tmp_path / "metrics.jsonl", row(step))
            for _ in range(4):
                pool.submit(view.tick)
    steps = [int(line.split("/")[0].split()[1]) for line in capsys.readouterr().out.splitlines()]
    assert steps == list(range(1, 201))


def test_the_table_shows_the_last_steps_and_events_stand_above(tmp_path: Path) -> None:
    output = io.StringIO()
    console = Console(file=output, force_terminal=True, width=140)
    with LiveView(tmp_path, 60, console=console) as view:
        append(tmp_path / "metrics.jsonl", *(row(step) for step in range(1, 21)))
        view.tick()
        view.line("an [event]")
    text = output.getvalue()
    assert "an [event]" in text
    assert "20/60" in text
    assert "6/60" in text
    assert " 5/60" not in text


def test_no_terminal_means_plain_lines(tmp_path: Path) -> None:
    assert isinstance(make_view(tmp_path, 60), PlainView)


def test_the_time_left_follows_the_recent_pace() -> None:
    clock = Clock(100)
    assert clock.left(row(1), 0.0) is None
    assert clock.left(row(2), 3.0) == "4:54"
    for step in range(3, 30):
        left = clock.left(row(step), float(step))
    assert left == "1:11"


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (61.4, "1:01"), (3723, "1:02:03")])
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@given(st.lists(st.floats(-1e6, 1e6) | st.just(float("nan")), min_size=1, max_size=40), st.integers(1, 12))
def test_the_moving_average_is_the_mean_of_what_is_there(values: list[float], window: int) -> None:
    averages = moving_average(np.array(values), window)
    for place, average in enumerate(averages):
        part = np.array(values[max(0, place - window + 1) : place + 1])
        part = part[np.isfinite(part)]
        if part.size:
            assert average == pytest.approx(part.mean(), abs=1e-6)
        else:
            assert np.isnan(average)


def test_the_picture_needs_two_steps_and_bears_missing_figures(tmp_path: Path) -> None:
    append(tmp_path / "metrics.jsonl", row(1))
    assert learning_curve(tmp_path) is None
    append(tmp_path / "metrics.jsonl", {"step": 2, "reward/mean": 0.5}, row(3))
    append(tmp_path / "evaluations.jsonl", {"label": "before", "accuracy": 0.1}, {"label": "after", "accuracy": 0.5})
    picture = learning_curve(tmp_path)
    assert picture is not None
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_picture_for_which_there_is_no_space_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    append(tmp_path / "metrics.jsonl", row(1), row(2))
    monkeypatch.setattr("headrace.launcher.plots.write_whole", full)
    with pytest.raises(HeadraceError, match=r"learning_curve\.png can't be written: No space left"):
        learning_curve(tmp_path)
    assert not (tmp_path / "learning_curve.png").exists()
