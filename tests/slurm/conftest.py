"""A cluster for all tests of this folder; they are skipped where it can't be had, unless HEADRACE_REQUIRE_SLURM=1."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "mpi"))

from cluster import Cluster, missing

NODES = 4


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.slow)
    # Of files with equally many tests xdist hands out the first one first, so the longest shouldn't be the last one.
    items.sort(key=lambda item: item.path.name != "test_time_limit.py")


@pytest.fixture(scope="session")
def slurm() -> Iterator[Cluster]:
    """Four nodes, shared by all tests."""
    absent = missing()
    if absent and os.environ.get("HEADRACE_REQUIRE_SLURM") != "1":
        pytest.skip(f"no Slurm cluster can be started here: {', '.join(absent)} missing")
    assert not absent, f"HEADRACE_REQUIRE_SLURM=1, but {', '.join(absent)} are missing"
    cluster = Cluster(NODES)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture
def cluster(slurm: Cluster) -> Iterator[Cluster]:
    """The cluster, empty before and after the test."""
    yield slurm
    slurm.ask("scancel", "--user=root")
    assert slurm.wait(lambda: not slurm.ask("squeue", "--noheader"), 60)
    assert slurm.wait(lambda: not slurm.processes(), 10), slurm.processes()


@pytest.fixture
def login(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """This process stands on the login node, with variables of a job that has ended."""
    monkeypatch.chdir(tmp_path)
    for name, value in {**cluster.environ(), "SLURM_JOB_ID": "17", "SLURM_NTASKS": "64", "SLURM_STEP_ID": "3"}.items():
        monkeypatch.setenv(name, value)
    return cluster
