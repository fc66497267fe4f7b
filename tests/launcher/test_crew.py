"""Who runs a job when nodes are lost."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.comm.errors import ConfigError
from headrace.launcher.allocation import Allocation
from headrace.launcher.config import Config
from headrace.launcher.crew import Crew, with_ranks

JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-4]"}


def config(**sections: Any) -> Config:
    base = {"rollout": {"engine": "latency"}, "ranks": {"generators": 5, "trainers": 1}}
    return Config.model_validate(base | {"launch": {"starter": "srun", "nodes": 3}} | sections)


@pytest.fixture
def crew(monkeypatch: pytest.MonkeyPatch) -> Crew:
    monkeypatch.setattr(Allocation, "answering", lambda self: ("n1", "n3", "n4"))
    return Crew(config().launch, JOB)


def test_the_spare_node_takes_the_place_of_a_lost_one(crew: Crew) -> None:
    assert crew.nodes == ("n1", "n2", "n3")
    assert crew.drop_lost(config()) == (config(), "without n2, with n4 instead")
    assert crew.nodes == ("n1", "n3", "n4")


def test_without_a_spare_node_fewer_generate(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Allocation, "answering", lambda self: ("n1", "n3"))
    found = crew.drop_lost(config())
    assert found is not None
    assert (found[0].ranks.trainers, found[0].ranks.generators) == (1, 3)
    assert found[1] == "without n2, on 4 ranks"


@pytest.mark.parametrize(
    "sections",
    [
        {"launch": {"starter": "srun", "fewer_generators": False}},
        {"ranks": {"generators": 1, "trainers": 5}},
        {"run": {"deterministic": True}, "ledger": {"max_staleness": 0}},
    ],
)
def test_too_few_nodes_end_the_job(crew: Crew, monkeypatch: pytest.MonkeyPatch, sections: dict[str, Any]) -> None:
    monkeypatch.setattr(Allocation, "answering", lambda self: ("n1",))
    assert crew.drop_lost(config(**sections)) is None


def test_repair_is_refused_without_an_mpi_that_can_do_it() -> None:
    launch = config(launch={"repair": True, "mpi": "mpich"}).launch
    with pytest.raises(ConfigError, match=r"launch\.repair needs an Open MPI 5.*mpich .*isn't one"):
        Crew(launch, {})


def test_repair_needs_a_generator_that_is_left() -> None:
    with pytest.raises(ConfigError, match=r"-n 2: .launch\.repair. needs a generator that is left"):
        with_ranks(config(launch={"repair": True}), 2)


def test_all_nodes_alive_changes_nothing(crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Allocation, "answering", lambda self: self.nodes)
    assert crew.drop_lost(config()) == (config(), "")
