"""A job that is asked to stop leaves a checkpoint and goes on from it."""

from __future__ import annotations

import pytest
from jobs import check_books, metrics_of, run_job, start_job
from tiny import await_steps, tiny_config

STOPPED = 75
STEPS = 40


@pytest.mark.slow
def test_sigterm_ends_a_job_with_a_checkpoint_and_resume_completes_it(tmp_path):
    config = tiny_config(
        run={"steps": STEPS, "deterministic": False},
        ranks={"generators": 2, "trainers": 2},
        ledger={"max_staleness": 2},
        checkpoint={"every": 0},
    )
    job = start_job(config, tmp_path)
    await_steps(job, tmp_path, 5)
    job.terminate()
    output, _ = job.communicate(timeout=60)
    assert job.returncode == STOPPED, output
    done = metrics_of(tmp_path)
    check_books(done, 2)
    assert 5 <= len(done) < STEPS
    checkpoint = tmp_path / f"runs/job/checkpoints/step_{len(done):06d}"
    assert (checkpoint / "COMPLETE").exists()
    metrics, _ = run_job(config, tmp_path, "--resume")
    assert metrics[: len(done)] == done, "steps that were done are not done again"
    check_books(metrics, 2)
    last = metrics[-1]
    assert [last[f"tickets/{name}"] for name in ("issued", "trained", "outstanding", "returned")] == [160, 160, 0, 0]
    assert len(metrics) == STEPS
