"""Generators with memory for next to nothing: finished groups leave it, or fewer are begun; all of them are trained."""

from __future__ import annotations

import contextlib
import time

import pytest
from jobs import check_books, latency_config, metrics_of, run_job, start_job, trained
from tiny import assert_same_bits, tiny_config

NOTHING = 1e-5
"""MiB: ten bytes."""

REWARD = """
import time

def quick(task, answer):
    return sum(a == b for a, b in zip(answer, task.answer)) / 3

def slow(task, answer):
    if int(task.answer) % 2:
        time.sleep(2.5)
    return quick(task, answer)
"""


@pytest.mark.slow
def test_spilled_groups_are_trained_bit_for_bit(tmp_path):
    """Half of the groups wait for the slow rewards of the others, long enough to be spilled."""
    for name in ("quick", "slow"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "reward.py").write_text(REWARD)
        config = tiny_config(
            run={"steps": 3},
            data={"reward": f"reward.py:{name}", "reward_workers": 4},
            rollout={"memory_mb": NOTHING if name == "slow" else 100},
        )
        metrics, _ = run_job(config, tmp_path / name)
        check_books(metrics, 0)
        assert metrics[-1]["tickets/trained"] == 3 * 4
        assert (metrics[-1]["groups/spilled"] > 0) == (name == "slow")
        assert max(line["groups/kept_mb"] for line in metrics) > 0
    last = "runs/job/checkpoints/step_000003"
    assert_same_bits(tmp_path / "quick" / last, tmp_path / "slow" / last)


def test_without_an_archive_a_generator_begins_no_more_than_a_steps_groups(tmp_path):
    config = latency_config(
        run={"steps": 30},
        ranks={"generators": 1},
        ledger={"max_staleness": 4},
        rollout={"memory_mb": NOTHING, "slots": 4, "latency": {"train_s": 0.05}},
        checkpoint={"archive": False},
    )
    metrics, _ = run_job(config, tmp_path)
    check_books(metrics, 4)
    assert metrics[-1]["tickets/trained"] == 30 * 4
    assert max(line["tickets/outstanding"] for line in metrics) <= 4 + 2, "with 20 credits"
    assert {line["groups/spilled"] for line in metrics} == {0}


def test_groups_that_cannot_be_read_back_are_generated_again(tmp_path):
    """Whatever gets into the archive vanishes."""
    config = latency_config(
        run={"steps": 12},
        ledger={"max_staleness": 3},
        rollout={"memory_mb": NOTHING, "latency": {"train_s": 1.0}},
    )
    job = start_job(config, tmp_path)
    while job.poll() is None:
        for path in (tmp_path / "runs/job/archive").glob("*.h5"):
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
        time.sleep(0.01)
    output, _ = job.communicate()
    assert job.returncode == 0, output
    metrics = metrics_of(tmp_path)
    check_books(metrics, 3)
    assert metrics[-1]["tickets/trained"] == 12 * 4
    assert metrics[-1]["groups/spilled"] > 0
    assert max(attempt for keys in trained(tmp_path).values() for _, attempt in keys) > 0
    log = (tmp_path / "runs/job/latest/rank_000.log").read_text()
    assert "can't be read back from runs/job/archive/" in log
    assert "They are generated again." in log
