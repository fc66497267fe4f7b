"""The lines of metrics, and what a resume leaves of them."""

from __future__ import annotations

import json

import pytest

from headrace.comm.messages import GeneratorCounters, StepReport
from headrace.ranks.metrics import MetricsFile, MetricsGatherer, cut_after

TICKETS = {"issued": 4, "trained": 2, "dropped": 0, "failed": 0, "outstanding": 2, "returned": 0}
TIMES = {"wait": 1.0, "train": 2.0, "sync": 0.5, "wall": 4.0}


def report(step, tokens=10, reward=5.0, wall=4.0):
    counters = {3: GeneratorCounters(tokens, 10, reward, wall / 2, wall, 1, kept_bytes=tokens << 20, spilled=7)}
    counters[4] = GeneratorCounters(0, 0, 0.0, 0.0, 0.0, 1, kept_bytes=1 << 20, spilled=1)
    return StepReport(step, TICKETS, TIMES, age_sum=6.0, tokens=4, counters=counters)


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_line_is_written_once_every_trainer_has_reported(tmp_path):
    gatherer = MetricsGatherer(MetricsFile(tmp_path, 0), trainers=2, start_step=0)
    gatherer.report(0, report(0))
    gatherer.record(0, {"step": 1, "version": 1})
    assert gatherer.written == -1
    gatherer.report(1, report(0, tokens=30, reward=6.0, wall=5.0))
    assert gatherer.written == 0
    (line,) = lines(tmp_path)
    assert line["tickets/issued"] == 8
    assert line["staleness/mean"] == 1.5
    assert line["time/step"] == 4.0
    assert line["idle/trainer"] == 0.25
    assert line["reward/generated_mean"] == 0.6  # of the newer word of generator 3
    assert line["idle/generator"] == 0.5
    assert (line["groups/kept_mb"], line["groups/spilled"]) == (30, 8)


def test_after_a_resume_nothing_before_it_is_waited_for(tmp_path):
    assert MetricsGatherer(MetricsFile(tmp_path, 7), trainers=1, start_step=7).written == 6


def test_a_resume_keeps_the_lines_up_to_its_step_and_drops_a_half_one(tmp_path):
    path = tmp_path / "samples.jsonl"
    texts = ["plain", "a\u2028b\u0085c\u2029d", "later"]
    whole = [json.dumps({"step": step, "text": text}, ensure_ascii=False) for step, text in enumerate(texts, 1)]
    path.write_text("\n".join([*whole, '{"step": 3, "te']), encoding="utf-8")
    cut_after(path, 2)
    assert path.read_text(encoding="utf-8") == "\n".join(whole[:2]) + "\n"


@pytest.mark.parametrize("garbage", [b"\0" * 100, b'{"step": 1, "te', b"[1]", b"\xff\xfe", b""])
def test_a_line_that_a_crash_of_the_machine_has_garbled_is_named_and_dropped(tmp_path, capfd, garbage):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + garbage + b'\n{"step": 2}\n')
    cut_after(path, 5)
    assert path.read_bytes() == b'{"step": 1}\n{"step": 2}\n'
    assert f"{path}, line 2 isn't what was written" in capfd.readouterr().err
