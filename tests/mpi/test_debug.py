"""`headrace debug`: the same run as over MPI, in one process."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import yaml
from jobs import metrics_of, run_job
from tiny import assert_same_bits, tiny_config

from headrace.launcher.trace import merge_traces

ONLY_OF_RANKS = {"attempt_#/mpirun.log"} | {f"attempt_#/rank_#.{end}" for end in ("log", "pid", "here")}


def files_of(folder: Path) -> set[str]:
    """The files of a run, with # for numbers and without the name of the host."""
    names = {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}
    return {re.sub(r"\d+", "#", re.sub(r"tfevents.*", "tfevents", name)) for name in names}


def debug(config: dict[str, object], folder: Path) -> None:
    (folder / "job.yaml").write_text(yaml.safe_dump(config))
    program = Path(sys.executable).with_name("headrace")
    subprocess.run([program, "debug", "job.yaml"], cwd=folder, check=True, timeout=120)


def assert_all_states_are_traced(file: Path) -> None:
    events = json.loads(file.read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert names == {0: "trainer, rank 0", 1: "generator, rank 1"}
    spans = [event for event in events if event["ph"] == "X"]
    states = {rank: [span["args"]["state"] for span in spans if span["pid"] == rank] for rank in names}
    assert [state for state in states[0] if state.startswith("training")] == [f"training step {n}" for n in range(3)]
    assert [state for state in states[0] if state.startswith("pub")] == [f"publishing version {n}" for n in range(4)]
    assert [state for state in states[1] if state.startswith("load")] == [f"loading version {n}" for n in range(4)]
    for rank in names:
        mine = [span for span in spans if span["pid"] == rank]
        for before, after in pairwise(mine):
            assert abs(before["ts"] + before["dur"] - after["ts"]) < 1.0, "a gap, or spans that overlap"


def test_debug_trains_the_same_weights_and_leaves_the_same_files_as_a_run(tmp_path):
    config = tiny_config(run={"steps": 3, "trace": True}, ranks={"generators": 1, "trainers": 1}, eval={"tasks": 4})
    one, other = tmp_path / "debug", tmp_path / "run"
    one.mkdir()
    other.mkdir()
    debug(config, one)
    run_job(config, other)
    for step in (2, 3):
        checkpoint = f"runs/job/checkpoints/step_{step:06d}"
        assert_same_bits(one / checkpoint, other / checkpoint)
    assert files_of(other / "runs/job") - ONLY_OF_RANKS == files_of(one / "runs/job")
    assert {"metrics.jsonl", "evaluations.jsonl", "samples.jsonl"} <= files_of(one / "runs/job")
    for folder in (one, other):
        assert_all_states_are_traced(merge_traces(folder / "runs/job", tmp_path / "trace.json"))
    for line, same in zip(metrics_of(one), metrics_of(other), strict=True):
        assert line.keys() == same.keys()
        for name in ("reward/mean", "train/loss", "train/grad_norm", "tickets/trained"):
            assert line[name] == same[name], name
    assert (one / "runs/job/samples.jsonl").read_text() == (other / "runs/job/samples.jsonl").read_text()
