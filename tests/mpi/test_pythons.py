"""Trainers and generators in Python environments of their own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from jobs import check_books, latency_config, run_job


@pytest.mark.slow
@pytest.mark.parametrize("mpi", ["mpich", "openmpi"])
def test_every_role_runs_in_its_own_python(tmp_path: Path, mpi: str) -> None:
    config = latency_config(ranks={"generators": 2, "trainers": 1}, run={"steps": 5})
    config["launch"] = {"python": {role: str(_python(tmp_path, role)) for role in ("trainer", "generator")}}
    metrics, _ = run_job(config, tmp_path, mpi=mpi)
    assert len(metrics) == 5
    check_books(metrics, 1)
    used = [Path(line) for line in (tmp_path / "used.txt").read_text().splitlines()]
    assert sorted(path.name for path in used) == ["generator", "generator", "trainer"]


def _python(folder: Path, role: str) -> Path:
    """An interpreter that notes down that it has started."""
    program = folder / role
    program.write_text(f'#!/bin/sh\necho "$0" >> {folder}/used.txt\nexec {sys.executable} "$@"\n')
    program.chmod(0o755)
    return program
