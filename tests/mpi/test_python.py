"""Runs from Python on this machine, over real ranks: the document's examples, signals, limits, failures."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from jobs import check_books, latency_config, metrics_of

from headrace.launcher import RunError, prepare_run, submit_job
from headrace.launcher.submitit_mpirun import MpirunExecutor, MpirunJob

ROOT = Path(__file__).parents[2]
SECTIONS = (ROOT / "docs/python.md").read_text().split("\n## ")[1:] + [
    section for section in (ROOT / "README.md").read_text().split("\n## ") if section.startswith("From Python")
]
EXAMPLES = [block for section in SECTIONS for block in re.findall(r"```python\n(.*?)```", section, re.DOTALL)]
LONG = latency_config(run={"steps": 100_000})


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def until_step(job: Any, folder: Path, step: int) -> None:
    end = time.monotonic() + 120
    while len(metrics_of(folder)) < step:
        assert not job.done(), job.exception()
        assert time.monotonic() < end, job.stdout()
        time.sleep(0.02)


def test_the_documented_examples_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "my-config.yaml").write_text(yaml.safe_dump(latency_config(run={"steps": 5})))
    here = [example for example in EXAMPLES if ', executor="slurm"' not in example]
    assert (len(EXAMPLES), len(here)) == (5, 4)
    names: dict[str, Any] = {}
    exec("\n".join(here), names)
    said = capsys.readouterr().out
    assert f"{tmp_path / 'runs/job'}\n" in said
    assert "before its end." in said
    assert "submit_job(..., resume=True)" in said
    assert names["job"].result().steps == 5


def test_a_warned_run_leaves_a_checkpoint_and_goes_on(tmp_path: Path) -> None:
    job = submit_job(latency_config(run={"steps": 60}), ranks=4)
    until_step(job, tmp_path, 3)
    job._interrupt()
    summary = job.result()
    assert (summary.status, summary.steps, summary.version, summary.attempts) == ("ended", 60, 60, 2)
    metrics = metrics_of(tmp_path)
    check_books(metrics, 1)
    assert summary.metrics == metrics[-1]
    assert "stopped after the checkpoint of step" in (job.stderr() or "")
    assert "this job is preempted" in (job.stderr() or "")


def test_a_cancelled_run_has_a_checkpoint_and_can_be_resumed(tmp_path: Path) -> None:
    job = submit_job(LONG)
    until_step(job, tmp_path, 3)
    job.cancel()
    done = len(metrics_of(tmp_path))
    with pytest.raises(
        RunError, match=rf"^The run was stopped before its end\. The last checkpoint in .* step {done};"
    ):
        job.result()
    again = submit_job(LONG, resume=True, overrides=[f"run.steps={done + 2}"])
    assert again.result().steps == done + 2


def test_a_killed_rank_is_named_in_one_paragraph(tmp_path: Path) -> None:
    job = submit_job(LONG)
    until_step(job, tmp_path, 3)
    os.kill(int((tmp_path / "runs/job/latest/rank_001.pid").read_text()), signal.SIGKILL)
    with pytest.raises(RunError) as raised:
        job.result()
    assert str(raised.value).startswith("Rank 1 was ended by signal 9 (SIGKILL).")
    assert str(raised.value).endswith(f"More is in {tmp_path / 'runs/job/latest'}.")
    assert "\n" not in str(raised.value)


def test_a_mistake_that_shows_in_the_job_is_one_paragraph() -> None:
    error = submit_job(latency_config(launch={"mpi": "site"})).exception()
    assert str(error).startswith("launch.mpi: site, but there is no mpirun on PATH")
    assert "Traceback" not in str(error)


@pytest.mark.slow
def test_a_run_goes_on_after_a_time_limit_so_often_and_no_more(tmp_path: Path) -> None:
    executor = MpirunExecutor(tmp_path / "logs", max_num_timeout=1)
    executor.update_parameters(timeout_min=4 / 60)
    job = executor.submit(prepare_run(LONG))
    with pytest.raises(RunError, match=r"timed-out too many times\. .*submit_job\(\.\.\., resume=True\)"):
        job.result()
    assert (job.stderr() or "").count("this job is timed-out") == 2


def test_a_run_goes_on_when_the_python_that_submitted_it_has_ended(tmp_path: Path) -> None:
    program = f"from headrace.launcher import submit_job\nprint(submit_job({latency_config(run={'steps': 5})}).job_id)"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    job: MpirunJob = MpirunJob(tmp_path / "runs/job/submitit", ended.stdout.strip())
    assert job.state == "RUNNING"
    assert job.result().steps == 5
