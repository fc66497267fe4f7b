"""An evaluation counts its own tasks, and nothing else."""

from __future__ import annotations

import json

import numpy as np
import pytest

from headrace.comm.errors import WaitLimitError
from headrace.ranks.evaluation import EvaluationFile, evaluate_share
from headrace.rollout.engine import Chunk, SamplingParams
from headrace.rollout.rewards import Scored
from headrace.rollout.task import Task

PARAMS = SamplingParams(max_tokens=4, temperature=1.0, top_p=0.5)


class Tasks:
    held_out = [Task(question=str(index)) for index in range(7)]
    stop_token_ids = ()

    def encode(self, task):
        return np.array([int(task.question)], np.int32)

    def decode(self, tokens):
        return " ".join(map(str, tokens))


class EchoEngine:
    """Answers every prompt with its own token, one request a step."""

    def __init__(self):
        self.requests = []

    def add(self, request):
        assert (request.params.temperature, request.params.top_p) == (0.0, 1.0)
        self.requests.append(request)

    def step(self):
        if not self.requests:
            return []
        request = self.requests.pop()
        return [Chunk(request.id, (int(request.prompt[0]),), (0.0,), 3, "stop")]


class Scorer:
    """The answer as reward; `foreign` are rewards of training samples that come in between."""

    def __init__(self, foreign=(), silent=False):
        self.ready = [Scored(key, 100.0, 1, None, None) for key in foreign]
        self.silent = silent

    def submit(self, key, task, text):
        failed = task.question == "4"
        self.ready.append(Scored(key, None if failed else float(text), 1, "raised" if failed else None, None))

    def poll(self):
        ready, self.ready = self.ready, []
        return [] if self.silent else ready


def run(scorer, share, shares, limit=5.0):
    progress = []
    result = evaluate_share(
        EchoEngine(), Tasks(), scorer, PARAMS, share, shares, limit, lambda *done: progress.append(done)
    )
    return result, progress


def test_every_task_is_answered_by_one_share_and_a_failed_reward_counts_as_0():
    (first, count), progress = run(Scorer(), 0, 2)
    (second, other), _ = run(Scorer(), 1, 2)
    assert (count, other) == (4, 3)
    assert first + second == 0 + 1 + 2 + 3 + 5 + 6
    assert progress[-1] == (4, 4)


def test_rewards_of_training_samples_do_not_count():
    (total, count), _ = run(Scorer(foreign=[(0, 0, 0), ("eval", 99)]), 0, 1)
    assert (total, count) == (17.0, 7)


def test_an_evaluation_that_stands_still_ends():
    with pytest.raises(WaitLimitError, match="0 of 7 held-out tasks"):
        run(Scorer(silent=True), 0, 1, limit=0.1)


def evaluated(folder):
    lines = [json.loads(line) for line in (folder / "evaluations.jsonl").read_text().splitlines()]
    return [(line["label"], line["version"], line["accuracy"]) for line in lines]


def line(label, version, accuracy):
    return {"label": label, "version": version, "accuracy": accuracy}


def test_there_is_one_line_per_label_and_version(tmp_path):
    file = EvaluationFile(tmp_path, 0)
    for one in (line("before", 0, 0.1), line("after", 5, 0.4), line("after", 5, 0.5)):
        file.write(one)
    assert evaluated(tmp_path) == [("before", 0, 0.1), ("after", 5, 0.5)]
    EvaluationFile(tmp_path, 5).write(line("after", 10, 0.7))
    assert evaluated(tmp_path) == [("before", 0, 0.1), ("after", 5, 0.5), ("after", 10, 0.7)]


def test_a_resume_forgets_the_evaluations_of_steps_that_are_done_again(tmp_path):
    for one in (line("before", 0, 0.1), line("after", 5, 0.4)):
        EvaluationFile(tmp_path, 5).write(one)
    EvaluationFile(tmp_path, 3)
    assert evaluated(tmp_path) == [("before", 0, 0.1)]
