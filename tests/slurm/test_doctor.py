"""`headrace doctor --nodes`: it submits itself, and its ranks examine the nodes."""

from __future__ import annotations

import json
from pathlib import Path

import yaml
from cluster import Cluster
from jobs import latency_config
from runs import both, headrace, profile


@both
def test_the_doctor_finds_the_nodes_in_order(cluster: Cluster, tmp_path: Path, mpi: str) -> None:
    """The cores of every rank, and the addresses at which the nodes reach each other, are among what it tells."""
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(latency_config()))
    said = headrace(cluster, tmp_path, "doctor", "job.yaml", "--nodes", "2", *profile(tmp_path, mpi=mpi), "--json")
    report = json.loads(said.text[said.text.index("{") :])
    found = {finding["check"]: finding for finding in report["findings"]}
    assert [one for one in found.values() if one["level"] == "FAIL"] == []
    assert said.status == 0
    assert found["world"]["text"].startswith("3 ranks in one world")
    assert {facts["host"] for facts in report["facts"]} == {"node1", "node2"}
    assert "node1: " in found["CPUs"]["text"]
    assert "127.0.0.1" not in found["interfaces"]["text"]
    assert "requeues jobs" in found["requeue"]["text"]
    assert len(report["pairs"]) == 2
    assert not list(tmp_path.glob(".doctor-*"))


def test_the_doctor_tells_of_ranks_that_are_worlds_of_their_own(cluster: Cluster, tmp_path: Path) -> None:
    said = headrace(cluster, tmp_path, "doctor", "--nodes", "2", *profile(tmp_path, mpi="openmpi", pmi="pmi2"))
    assert said.status == 1
    assert "world of its own" in " ".join(said.text.replace("│", " ").split())
