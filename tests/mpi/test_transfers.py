"""Ranks that die, stop or send damaged bytes in the middle of a transfer: samples, and weights over both channels.

Ranks 0 and 1 train, 2 and 3 generate. Samples and weights are large enough to be on their way for a while.
"""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from jobs import check_books, latency_config, merged, run_job, run_program

STALENESS = 2
STEPS = 8
END_LIMIT_S = 60
"""For a whole job, its start included."""
MOMENT = {"samples": 7, "pull": 7, "bucket": 144, "part": 144, "broadcast": 144, "root": 76, "load": 4}
"""The event at which it happens: after a few steps, and in the middle of the buckets of a version."""
SLOW = pytest.mark.slow


def config(place: str = "", shared: bool = False, **sections: dict[str, Any]) -> dict[str, Any]:
    base = latency_config(
        run={"steps": STEPS, "keep_samples": 1000, "wait_limit_s": 30},
        ranks={"generators": 2, "trainers": 2},
        ledger={"max_staleness": STALENESS},
        rollout={
            "max_tokens": 200_000,
            "latency": {
                "token_ms": 0.0001,
                "median_tokens": 100_000,
                "sigma": 0.1,
                "weight_bytes": 16 << 20,
                "weight_delay_s": 0.0,
            },
        },
        weights={
            "bucket_mb": 1,
            "verify": True,
            "transport": "collective" if place in ("broadcast", "root") else "mpi",
            "node_shared": shared,
        },
    )
    return merged(base, sections)


def samples(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "runs/job/samples.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("place", "rank", "shared"),
    [
        ("samples", 2, False),
        ("bucket", 0, False),
        pytest.param("broadcast", 3, False, marks=SLOW),
        pytest.param("pull", 1, False, marks=SLOW),
        pytest.param("part", 3, False, marks=SLOW),
        pytest.param("broadcast", 1, False, marks=SLOW),
        pytest.param("load", 3, True, marks=SLOW),
    ],
)
def test_a_rank_that_is_killed_in_the_middle_of_a_transfer_ends_the_job_and_is_named(
    tmp_path: Path, place: str, rank: int, shared: bool
) -> None:
    began = time.monotonic()
    metrics, output, status = run_program(
        config(place, shared, run={"steps": 10_000}), tmp_path, "meddles", f"kill:{place}:{rank}:{MOMENT[place]}"
    )
    assert status not in (0, 75), output
    assert time.monotonic() - began < END_LIMIT_S
    told = rf"headrace: Rank (\d failed: .*rank {rank} has died|{rank} was ended by signal 9|{rank} ended first)"
    assert re.search(told, output), output
    assert "Traceback" not in output
    assert len(metrics) < 200


@pytest.mark.parametrize(
    ("place", "rank", "shared"),
    [
        ("samples", 2, False),
        pytest.param("broadcast", 0, False, marks=SLOW),
        pytest.param("bucket", 0, False, marks=SLOW),
        pytest.param("pull", 1, False, marks=SLOW),
        pytest.param("part", 3, False, marks=SLOW),
        pytest.param("broadcast", 3, False, marks=SLOW),
        pytest.param("load", 3, True, marks=SLOW),
    ],
)
def test_nothing_is_lost_when_a_rank_is_stopped_for_a_while_in_the_middle_of_a_transfer(
    tmp_path: Path, place: str, rank: int, shared: bool
) -> None:
    metrics, output, status = run_program(
        config(place, shared), tmp_path, "meddles", f"stop:{place}:{rank}:{MOMENT[place]}"
    )
    assert status == 0, output
    assert "meddled: stop" in (tmp_path / f"runs/job/latest/rank_{rank:03d}.log").read_text()
    check_books(metrics, STALENESS)
    assert [metrics[-1][f"tickets/{name}"] for name in ("issued", "trained")] == [4 * STEPS] * 2
    trained = [(line["ticket"], line["sample"]) for line in samples(tmp_path)]
    assert len(trained) == len({*trained}) > 0


@pytest.mark.parametrize(("place", "shared"), [("bucket", False), ("bucket", True), ("root", False)])
def test_damaged_weights_are_never_sampled_with_and_tensor_and_sender_are_named(
    tmp_path: Path, place: str, shared: bool
) -> None:
    _, output, status = run_program(config(place, shared), tmp_path, "meddles", f"corrupt:{place}:1:{MOMENT[place]}")
    assert status not in (0, 75), output
    told = re.search(r"Version (\d+) of the weights: tensor 'made_up.1' from trainer rank 1 arrived damaged", output)
    assert told, output
    assert "Traceback" not in output
    assert max(line["newest"] for line in samples(tmp_path)) < int(told[1])


@pytest.mark.parametrize("transport", ["mpi", pytest.param("collective", marks=SLOW)])
def test_an_exception_while_weights_are_loaded_ends_the_job_instead_of_leaving_it_paused(
    tmp_path: Path, transport: str
) -> None:
    began = time.monotonic()
    tree = config(weights={"transport": transport})
    _, output, status = run_program(tree, tmp_path, "meddles", f"raise:load:3:{MOMENT['load']}")
    assert status not in (0, 75), output
    assert time.monotonic() - began < END_LIMIT_S
    assert "Rank 3" in output, output
    assert "the engine is out of order" in output, output


@pytest.mark.parametrize("transport", ["mpi", "collective"])
def test_an_update_waits_for_no_sample_however_long(tmp_path: Path, transport: str) -> None:
    """A sample takes as long as many updates, and its tokens are of all these versions."""
    tree = config(
        run={"steps": 20},
        ledger={"max_staleness": 8},
        rollout={
            "max_tokens": 2000,
            "latency": {"token_ms": 0.5, "median_tokens": 20, "sigma": 2, "weight_bytes": 1000},
        },
        weights={"transport": transport},
    )
    run_job(tree, tmp_path)
    assert max(line["newest"] - line["born"] for line in samples(tmp_path)) >= 4
