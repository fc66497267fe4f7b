"""The examples of a loss and of an environment of one's own, in a real job (docs/loss.md, docs/environment.md)."""

from __future__ import annotations

from jobs import check_books, run_job
from tiny import ENVIRONMENT, EXAMPLES, tiny_config


def test_a_users_loss_advantage_environment_and_reward_train_a_job(tmp_path):
    config = tiny_config(
        run={"steps": 3, "deterministic": False},
        ranks={"generators": 1},
        ledger={"max_staleness": 1},
        data={"environment": f"{ENVIRONMENT}:addition", "reward": f"{ENVIRONMENT}:right_digits"},
        train={"loss": f"{EXAMPLES / 'my_loss.py'}:cispo", "advantage": f"{EXAMPLES / 'my_loss.py'}:rloo"},
    )
    metrics, _ = run_job(config, tmp_path)
    assert len(metrics) == 3
    check_books(metrics, 1)
    assert all("policy/clip_fraction" in line and "policy/ratio_mean" not in line for line in metrics), "not cispo"
    assert all(line["train/grad_norm"] > 0 for line in metrics)
    assert metrics[0]["policy/kl_mismatch"] < 1e-6, "the first samples are made by the model after its warm start"
    sums = [line["reward/mean"] * 16 for line in metrics]
    assert any(abs(total - round(total)) > 1e-3 for total in sums), "only this reward gives parts of a point"
