"""An evaluation counts its own tasks, and nothing else."""

from __future__ import annotations

import json

import numpy as np
import pytest

from headrace.comm.errors import DataError, WaitLimitError
from headrace.comm.messages import EvalResult
from headrace.ranks.evaluation import LEAST, EvaluationFile, Share, evaluate_share, summed_up
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

    def __init__(self, foreign=(), silent=False, failing=("4",)):
        self.ready = [Scored(key, 100.0, 1, None, None) for key in foreign]
        self.silent = silent
        self.failing = failing

    def submit(self, key, task, text):
        if task.question in self.failing:
            self.ready.append(Scored(key, None, 3, "reward_raised", f"no verdict on {text}\nTraceback"))
        else:
            self.ready.append(Scored(key, float(text), 1))

    def poll(self):
        ready, self.ready = self.ready, []
        return [] if self.silent else ready


def run(scorer, share, shares, limit=5.0):
    progress = []
    result = evaluate_share(
        EchoEngine(), Tasks(), scorer, PARAMS, share, shares, limit, lambda *done: progress.append(done)
    )
    return result, progress


ERROR = "held-out task 4 (reward_raised): no verdict on 4"


def test_every_task_is_answered_by_one_share_and_a_failed_reward_counts_as_0_and_is_told(capfd):
    first, progress = run(Scorer(), 0, 2)
    second, _ = run(Scorer(), 1, 2)
    assert first == Share(0 + 2 + 6, 4, 1, ERROR)
    assert second == Share(1 + 3 + 5, 3, 0, "")
    assert progress[-1] == (4, 4)
    assert capfd.readouterr().err == f"evaluation: no reward for {ERROR}\nTraceback\n"
    assert summed_up([EvalResult("after", 5, *first), EvalResult("after", 5, *second)]) == Share(17, 7, 1, ERROR)


def test_an_evaluation_without_any_reward_ends_the_run():
    every = Scorer(failing=[task.question for task in Tasks.held_out])
    share, _ = run(every, 0, 1)
    assert share.failed == share.total == 7
    with pytest.raises(DataError, match=r"any of the 7 held-out tasks .*; the last, held-out task 0 \(reward"):
        summed_up([EvalResult("before", 0, *share)])


def test_it_does_not_wait_for_all_of_many_rewards_that_fail(monkeypatch):
    monkeypatch.setattr(Tasks, "held_out", [Task(question=str(index)) for index in range(100)])
    scorer = Scorer(failing=list(map(str, range(100))))
    with pytest.raises(DataError, match=rf"the first {LEAST} held-out tasks .*: no verdict on {100 - LEAST}\. "):
        run(scorer, 0, 1)
    share, _ = run(Scorer(failing=list(map(str, range(93)))), 0, 1)
    assert share.failed == 93, "some came, so all are waited for"


def test_rewards_of_training_samples_do_not_count():
    share, _ = run(Scorer(foreign=[(0, 0, 0), ("eval", 99)]), 0, 1)
    assert share == Share(17.0, 7, 1, ERROR)


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
