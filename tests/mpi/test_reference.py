"""The KL penalty refers to the model after the warm start, also after a crash."""

from __future__ import annotations

import pytest
from jobs import check_books, metrics_of, run_job, start_job
from tiny import assert_same_bits, kill_after, tiny_config

STEPS = 24


@pytest.mark.slow
def test_a_killed_job_with_a_kl_penalty_resumes_with_the_reference_that_it_began_with(tmp_path):
    config = tiny_config(
        run={"steps": STEPS},
        ranks={"generators": 1, "trainers": 2},
        train={"kl": "k3", "kl_weight": 0.1},
        checkpoint={"every": 5},
    )
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    run_job(config, whole)
    job = start_job(config, killed)
    kill_after(job, killed, 8, rank=2)
    job.communicate(timeout=60)
    reference = (killed / "runs/job/reference/model.safetensors").read_bytes()
    metrics, _ = run_job(config, killed, "--resume")
    check_books(metrics, 0)
    assert (killed / "runs/job/reference/model.safetensors").read_bytes() == reference
    last = f"runs/job/checkpoints/step_{STEPS:06d}"
    assert_same_bits(whole / last, killed / last)
    divergence = [line["policy/kl_reference"] for line in metrics]
    assert divergence == [line["policy/kl_reference"] for line in metrics_of(whole)]
    assert abs(divergence[0]) < 1e-6, "the first step is taken by the reference itself"
    assert max(divergence) > 1e-3
