"""Runs from Python without starting any: what is refused and how, what is written, how submitit finds us."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import submitit
import yaml

from headrace import launcher
from headrace.comm.errors import ConfigError
from headrace.launcher import RunError, RunSummary, prepare_run, submit_job
from headrace.launcher.config import Config, load
from headrace.launcher.submitit_mpirun import MpirunExecutor
from headrace.launcher.submitit_run import Run, check_place, goes_back, paragraph, why
from headrace.launcher.submitit_slurm import minutes

TREE = {"run": {"name": "job", "steps": 7}, "rollout": {"engine": "latency"}}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_importing_the_launcher_loads_nothing_else() -> None:
    program = (
        "import sys, headrace.launcher; print(*[m for m in ('submitit', 'pydantic', 'numpy') if m in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", program], text=True).strip() == ""


def test_submitit_finds_the_executor_but_takes_it_only_if_asked() -> None:
    executor = submitit.AutoExecutor("logs", cluster="mpirun")
    assert isinstance(executor._executor, MpirunExecutor)
    assert submitit.AutoExecutor.which() != "mpirun"


def test_a_config_may_be_a_file_a_dictionary_or_a_config(tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(TREE))
    for config in ("my.yaml", Path("my.yaml"), TREE, Config.model_validate(TREE)):
        run = prepare_run(config, ranks=5, overrides=["run.steps=9"], fresh=True)
        loaded = load(run.folder / "config.yaml")
        assert (loaded.run.steps, loaded.ranks.trainers + loaded.ranks.generators) == (9, 5)
    assert TREE["run"] == {"name": "job", "steps": 7}
    assert sorted(folder.name for folder in (tmp_path / "runs").iterdir()) == ["job", "job-2", "job-3", "job-4"]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"executor": "local"}, 'world of one. Use "mpirun"'),
        ({"executor": "lsf"}, "executor='lsf': Use \"mpirun\""),
        ({"nodes": 2, "profile": "cpu"}, 'nodes, profile: these are for executor="slurm"'),
        ({"overrides": ["launch.starter=srun"]}, "launch.starter: srun starts ranks within a Slurm job"),
        ({"overrides": ["run.stesp=3"]}, "run.steps"),
        ({"ranks": 1}, "leaves no rank to generate"),
    ],
)
def test_a_mistake_is_refused_before_anything_is_written(tmp_path: Path, options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as raised:
        submit_job(TREE, **options)
    assert told in str(raised.value)
    assert list(tmp_path.iterdir()) == []


def test_without_submitit_the_remedy_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(ConfigError, match=r"pip install 'headrace\[submitit\]'"):
        submit_job(TREE)
    with pytest.raises(ConfigError, match=r"pip install 'headrace\[submitit\]'"):
        _ = launcher.RunError


def test_without_slurm_the_remedy_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match=r'there is no Slurm here .* Use executor="mpirun"'):
        submit_job(TREE, executor="slurm")


def test_the_executor_takes_runs_and_a_time_limit_only() -> None:
    executor = submitit.AutoExecutor("logs", cluster="mpirun")
    with pytest.raises(ConfigError, match=r"submit what .*prepare_run"):
        executor.submit(os.getpid)
    with pytest.raises(ConfigError, match="it can do nothing with tasks_per_node, mem_gb"):
        executor.update_parameters(timeout_min=5, nodes=1, tasks_per_node=4, mem_gb=3)
    executor.update_parameters(timeout_min=5, nodes=1, tasks_per_node=1, slurm_mem_gb=3)
    assert executor._executor.parameters["timeout_min"] == 5


@pytest.mark.parametrize(
    ("environ", "told"),
    [
        ({"SUBMITIT_EXECUTOR": "local"}, 'use cluster="mpirun"'),
        ({"SUBMITIT_EXECUTOR": "slurm", "SLURM_STEP_ID": "0"}, 'submit_job\\(..., executor="slurm"\\)'),
    ],
)
def test_a_run_refuses_executors_that_make_worlds_of_one(environ: dict[str, str], told: str) -> None:
    with pytest.raises(RunError, match=f"world of one.*{told}"):
        check_place(environ)
    check_place({"SUBMITIT_EXECUTOR": "slurm"})
    check_place({"SUBMITIT_EXECUTOR": "mpirun"})


@pytest.mark.parametrize(
    ("status", "signum", "again"),
    [
        (75, signal.SIGUSR2, True),
        (75, None, True),
        (75, signal.SIGTERM, False),
        (128 + signal.SIGUSR2, signal.SIGUSR2, True),
        (128 + signal.SIGUSR2, None, False),
        (128 + signal.SIGTERM, signal.SIGTERM, False),
        (0, signal.SIGUSR2, False),
        (1, signal.SIGUSR2, False),
    ],
)
def test_a_warned_run_goes_back_and_a_cancelled_or_failed_one_does_not(status: int, signum: int, again: bool) -> None:
    assert goes_back(status, signum) is again


def test_a_run_error_is_known_again_in_a_traceback() -> None:
    program = "from headrace.launcher import RunError\nraise RunError('Rank 1: failed. More.')"
    trace = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False).stderr
    assert paragraph(trace) == "Rank 1: failed. More."
    assert paragraph("Traceback …\nKeyError: 3") == "The run ended by a defect:\nTraceback …\nKeyError: 3"


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        ("90", 90),
        ("90:30", 90),
        ("01:30:00", 90),
        ("00:00:20", 1),
        ("1-12", 36 * 60),
        ("1-12:30", 36 * 60 + 30),
        ("1-12:30:59", 36 * 60 + 30),
        ("UNLIMITED", 365 * 24 * 60),
    ],
)
def test_time_limits_are_read_as_sbatch_reads_them(limit: str, expected: int) -> None:
    assert minutes(limit) == expected


def test_a_summary_is_read_from_the_run_folder(tmp_path: Path) -> None:
    run = prepare_run(TREE).folder
    assert (RunSummary.read(run).status, RunSummary.read(run).attempts, RunSummary.read(run).metrics) == ("new", 0, {})
    rows = [{"step": step, "version": step, "reward/mean": step / 10} for step in (1, 2, 3)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run / "evaluations.jsonl").write_text(json.dumps({"label": "before", "version": 0, "accuracy": 0.5}) + "\n")
    for number, (began, ended) in {1: (100, 130), 2: (200, 207)}.items():
        attempt = run / f"attempt_{number:02d}"
        attempt.mkdir()
        (attempt / "launcher.json").write_text('{"host":"h","pid":1,"began":1,"slurm_job":null}')
        (attempt / "outcome.json").write_text('{"status":7,"failure":"Rank 1 failed: no."}')
        os.utime(attempt / "launcher.json", (began, began))
        os.utime(attempt / "outcome.json", (ended, ended))
    summary = RunSummary.read(run)
    assert (summary.status, summary.steps, summary.version, summary.attempts) == ("failed", 3, 3, 2)
    assert summary.seconds == 37
    assert summary.metrics == rows[-1]
    assert summary.evaluations[0]["accuracy"] == 0.5
    assert why(run) == f"Rank 1 failed: no. More is in {run / 'latest'}."


def test_what_is_pickled_is_the_folder_alone(tmp_path: Path) -> None:
    run = prepare_run(TREE)
    again = run.checkpoint()
    assert again.function == run == Run(tmp_path / "runs/job")
    assert (again.args, again.kwargs) == ((), {})
