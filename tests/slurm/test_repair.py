"""A generator that dies on one of several nodes: mpirun's ranks go on without it."""

from __future__ import annotations

import re
from pathlib import Path

from cluster import Cluster
from runs import check_whole, kill_rank, output, profile, slow_job, submit, until_step


def test_a_rank_that_dies_on_another_node_is_done_without(cluster: Cluster, tmp_path: Path) -> None:
    site = profile(tmp_path, mpi="openmpi", starter="mpirun")
    config = slow_job(30, launch={"repair": True})
    job = submit(cluster, tmp_path, config, *site, "--nodes", "4")
    until_step(cluster, tmp_path, 5)
    kill_rank(tmp_path, 5)
    assert cluster.until_state(job, "COMPLETED", "FAILED") == "COMPLETED", output(tmp_path)
    check_whole(tmp_path, 30)
    assert len(re.findall(r"rank 5 \(generator \d on \S+\) died at", output(tmp_path))) == 2
    assert not (tmp_path / "runs/job/attempt_02").exists()
