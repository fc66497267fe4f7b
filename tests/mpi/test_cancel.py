"""A job that goes on is looked at and cancelled from outside, by the commands that docs/runs.md shows."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import latency_config, metrics_of, run_job, start_job
from tiny import await_steps

STOPPED = 75
ROOT = Path(__file__).parents[2]
HEADRACE = Path(sys.executable).with_name("headrace")
EXAMPLES = re.findall(r"^headrace (status|cancel)(.*?) *#", (ROOT / "docs" / "runs.md").read_text(), re.MULTILINE)


def example(number: int, folder: Path) -> str:
    """The output of one of the document's commands, for the run `job`."""
    command, arguments = EXAMPLES[number]
    words = arguments.replace("NAME", "job").split()
    done = subprocess.run([HEADRACE, command, *words], cwd=folder, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_documented_commands_show_stop_and_kill_a_job_that_can_be_resumed(tmp_path):
    assert [command for command, _ in EXAMPLES] == ["status", "status", "cancel", "cancel"]
    long = latency_config(run={"steps": 100_000})
    job = start_job(long, tmp_path)
    try:
        await_steps(job, tmp_path, 3)
        assert re.search(r"job +│ running │ +\d+/100000", example(0, tmp_path))
        assert re.search(r"state +running \(process \d+\)\n +step +\d+/100000", example(1, tmp_path))
        said = example(2, tmp_path)
        output, _ = job.communicate(timeout=30)
    finally:
        job.kill()
    assert job.returncode == STOPPED, output
    done = len(metrics_of(tmp_path))
    assert f"stopped after the checkpoint of step {done}; go on by --resume" in said
    assert "state       stopped" in example(1, tmp_path)
    job = start_job(long, tmp_path, "--resume")
    try:
        await_steps(job, tmp_path, done + 3)
        assert "checkpoint" in example(3, tmp_path)
        job.communicate(timeout=30)
    finally:
        job.kill()
    assert job.returncode in (128 + signal.SIGTERM, STOPPED), "it is killed, unless its checkpoint was quicker"
    done = max(int(path.name[5:]) for path in tmp_path.glob("runs/job/checkpoints/step_*"))
    metrics, _ = run_job(long, tmp_path, "--resume", f"run.steps={done + 2}")
    assert len(metrics) == done + 2
    assert "ended" in example(1, tmp_path)
    assert re.search(r"restarts +2", example(1, tmp_path))


@pytest.mark.slow
def test_a_launcher_that_was_killed_is_told_from_one_that_runs(tmp_path):
    job = start_job(latency_config(run={"steps": 100_000}), tmp_path)
    await_steps(job, tmp_path, 3)
    os.kill(job.pid, signal.SIGKILL)
    job.communicate(timeout=30)
    assert re.search(r"state +failed \(its launcher, process \d+, was killed", example(1, tmp_path))
