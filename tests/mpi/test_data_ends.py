"""Data that end, with real training: fewer tasks than a batch, several epochs, short last batches."""

from __future__ import annotations

import json
import math
from collections import Counter

import pytest
from jobs import check_books, run_job
from tiny import ENVIRONMENT, tiny_config


@pytest.mark.slow
@pytest.mark.parametrize(("tasks", "epochs", "groups", "trainers"), [(5, 3, 8, 2), (5, 3, 4, 1)])
def test_every_prompt_is_trained_once_per_epoch_and_the_last_batch_is_short(tmp_path, tasks, epochs, groups, trainers):
    prompts = [f"{20 + i}+{30 + i}=" for i in range(tasks)]
    file = tmp_path / "tasks.jsonl"
    file.write_text("".join(json.dumps({"prompt": prompt, "answer": "50"}) + "\n" for prompt in prompts))
    config = tiny_config(
        run={"steps": 50, "deterministic": False, "keep_samples": groups},
        ranks={"generators": 2, "trainers": trainers},
        data={"environment": None, "file": str(file), "reward": f"{ENVIRONMENT}:right_digits", "epochs": epochs},
        ledger={"max_staleness": 1, "groups_per_step": groups},
        train={"warm_start": None},
    )
    metrics, _ = run_job(config, tmp_path)
    check_books(metrics, 1)
    total = tasks * epochs
    assert len(metrics) == math.ceil(total / groups)
    assert metrics[-1]["tickets/trained"] == metrics[-1]["tickets/issued"] == total
    if trainers == 1:
        samples = [json.loads(line) for line in (tmp_path / "runs/job/samples.jsonl").read_text().splitlines()]
        groups_seen = {sample["ticket"]: sample["prompt"] for sample in samples}
        assert Counter(groups_seen.values()) == dict.fromkeys(prompts, epochs)
