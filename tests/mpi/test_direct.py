"""Ranks started by one's own mpirun line, as docs/mpi.md shows it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from jobs import check_books, latency_config, metrics_of
from launch import LAUNCHERS, environment

from headrace.ranks.start import main

BIN = Path(sys.executable).parent


def test_ranks_run_without_the_launcher(tmp_path):
    (tmp_path / "my-config.yaml").write_text(yaml.safe_dump(latency_config(run={"steps": 5})))
    printed = subprocess.run(
        [BIN / "headrace", "config", "my-config.yaml"], cwd=tmp_path, capture_output=True, check=True
    )
    (tmp_path / "job.yaml").write_bytes(printed.stdout)
    ranks = [sys.executable, "-m", "headrace.ranks", "job.yaml", "--ranks", "3"]
    command = [*LAUNCHERS["mpich"], "-n", "3", *ranks]
    ended = subprocess.run(command, cwd=tmp_path, env=environment("mpich"), capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "3 ranks: 2 generators, 1 trainers" in ended.stdout
    metrics = metrics_of(tmp_path)
    assert len(metrics) == 5
    check_books(metrics, 1)
    assert (tmp_path / "runs/job/attempt_00/rank_002.log").exists()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, "my-config.yaml can't be read: No such file"),
        ("- a\n", "my-config.yaml holds no config"),
        ("run: [\n", "my-config.yaml isn't YAML: while parsing"),
        (
            "run: {stepss: 3}\nrollout: {engine: latency}\n",
            "run.stepss: Extra inputs are not permitted. `",
        ),
    ],
)
def test_a_mistake_in_their_config_is_one_paragraph(tmp_path, monkeypatch, text, told):
    monkeypatch.chdir(tmp_path)
    if text is not None:
        Path("my-config.yaml").write_text(text)
    with pytest.raises(SystemExit) as ended:
        main(["my-config.yaml"])
    assert told in str(ended.value)
    assert "\n" not in str(ended.value)
