"""Ranks started by one's own mpirun line, as docs/mpi.md shows it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml
from jobs import check_books, latency_config, metrics_of
from launch import LAUNCHERS, environment

from headrace.ranks.start import main

BIN = Path(sys.executable).parent


def run_directly(
    folder: Path, mpi: str, launcher: Sequence[str] = (), options: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """A job of three ranks."""
    (folder / "my-config.yaml").write_text(yaml.safe_dump(latency_config(run={"steps": 5})))
    printed = subprocess.run(
        [BIN / "headrace", "config", "my-config.yaml"], cwd=folder, capture_output=True, check=True
    )
    (folder / "job.yaml").write_bytes(printed.stdout)
    ranks = [sys.executable, "-m", "headrace.ranks", "job.yaml", "--ranks", "3", *options]
    command = [*LAUNCHERS[mpi], *launcher, "-n", "3", *ranks]
    return subprocess.run(command, cwd=folder, env=environment(mpi), capture_output=True, text=True, timeout=120)


def test_ranks_run_without_the_launcher(tmp_path):
    ended = run_directly(tmp_path, "mpich")
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


@pytest.mark.slow
def test_ranks_that_outlive_others_leave_their_status_in_a_file(tmp_path):
    ended = run_directly(tmp_path, "openmpi", ("--with-ft", "ulfm", "--mca", "coll", "^han"), ("--repair",))
    assert (tmp_path / "runs/job/attempt_00/end_status").read_text() == "0\n", ended.stdout + ended.stderr
    assert len(metrics_of(tmp_path)) == 5


@pytest.mark.slow
def test_ranks_that_cannot_outlive_others_say_so(tmp_path):
    ended = run_directly(tmp_path, "openmpi", (), ("--repair",))
    assert ended.returncode != 0
    assert "launch.repair needs an Open MPI that was started by `mpirun --with-ft ulfm`" in ended.stdout
