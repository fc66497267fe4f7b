"""Greedy accuracy on held-out tasks, each generator taking its share."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from headrace.comm.errors import DataError, WaitLimitError
from headrace.comm.messages import EvalResult
from headrace.ranks.metrics import keep_lines
from headrace.ranks.tasks import Scorer, TaskSource
from headrace.rollout.engine import Engine, Request, SamplingParams
from headrace.rollout.rewards import Scored

POLL_S = 0.002

Answers = dict[tuple[str, int], list[int]]
"""Key of the request → the tokens of its answer so far."""

LEAST = 8
"""If the first so many rewards of a rank all fail, the run ends, rather than after hours of time limits."""


class Share(NamedTuple):
    """What one generator makes of its held-out tasks."""

    correct: float
    """Sum of the rewards."""
    total: int
    """Number of the tasks."""
    failed: int
    """How many of them have no reward, since it failed; they count as 0."""
    error: str
    """Of the last one that failed, in one line; empty if none did."""


class EvaluationFile:
    """`evaluations.jsonl` of a run: one line per label (`before`, `after`) and version of the weights."""

    def __init__(self, folder: Path, start_step: int) -> None:
        """Forget the evaluations of steps that will be done again after a resume."""
        self._path = folder / "evaluations.jsonl"
        keep_lines(self._path, lambda line: line["version"] <= start_step)

    def write(self, line: dict[str, Any]) -> None:
        """Append a line, in the place of an older one of the same label and version."""
        same = line["label"], line["version"]
        keep_lines(self._path, lambda old: (old["label"], old["version"]) != same)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def evaluate_share(
    engine: Engine,
    tasks: TaskSource,
    scorer: Scorer,
    params: SamplingParams,
    share: int,
    shares: int,
    limit_s: float,
    on_progress: Callable[[int, int], None],
) -> Share:
    """Answer every `shares`-th held-out task greedily, with the weights the engine holds now.

    A reward that fails counts as 0, since an evaluation measures what the model can be credited with; its error goes
    into the log of this rank. `on_progress` is called with the number of scored tasks and of all whenever tokens or
    rewards have come.

    Raises:
        DataError: the first `LEAST` rewards all failed.
        WaitLimitError: neither tokens nor rewards came for `limit_s` seconds.
    """
    greedy = replace(params, temperature=0.0, top_p=1.0, top_k=0)
    answers: Answers = {}
    for index in range(share, len(tasks.held_out), shares):
        answers["eval", index] = []
        prompt = tasks.encode(tasks.held_out[index])
        engine.add(Request(("eval", index), prompt, greedy, (0, index, 0)))
    rewards = _Rewards()
    moved = time.monotonic()
    while rewards.count < len(answers):
        if _turn(engine, tasks, scorer, answers, rewards):
            moved = time.monotonic()
            on_progress(rewards.count, len(answers))
        elif time.monotonic() - moved > limit_s:
            raise WaitLimitError(
                f"The evaluation has stood still for {limit_s:.0f} s (run.wait_limit_s), with {rewards.count} of "
                f"{len(answers)} held-out tasks scored on this rank."
            )
        else:
            time.sleep(POLL_S)
    return Share(rewards.sum, len(answers), rewards.failed, rewards.error)


def _turn(engine: Engine, tasks: TaskSource, scorer: Scorer, answers: Answers, rewards: _Rewards) -> bool:
    """Take in tokens and rewards; returns whether any have come."""
    chunks = engine.step()
    for chunk in chunks:
        assert isinstance(chunk.id, tuple)
        answers[chunk.id].extend(chunk.tokens)
        if chunk.finish is not None:
            scorer.submit(chunk.id, tasks.held_out[chunk.id[1]], tasks.decode(answers[chunk.id]))
    # Rewards of training samples that were given up may still come in: they don't count.
    scored = [one for one in scorer.poll() if one.key in answers]
    rewards.take_in(scored)
    return bool(chunks or scored)


@dataclass(slots=True)
class _Rewards:
    """The rewards so far."""

    count: int = 0
    sum: float = 0.0
    failed: int = 0
    error: str = ""

    def take_in(self, scored: Iterable[Scored]) -> None:
        for one in scored:
            self.count += 1
            if one.reward is not None:
                self.sum += one.reward
                continue
            assert isinstance(one.key, tuple)
            self.failed += 1
            told = f"held-out task {one.key[1]} ({one.reason}): {one.error}"
            self.error = told.partition("\n")[0]
            print(f"evaluation: no reward for {told}", file=sys.stderr, flush=True)
            if self.failed == self.count == LEAST:
                raise _no_rewards(f"the first {LEAST} held-out tasks", self.error)


def _no_rewards(tasks: str, error: str) -> DataError:
    return DataError(
        f"No reward could be computed for {tasks} of the evaluation; the last, {error}. Mend data.reward and start "
        "again, or go on by --resume. The whole errors are in the logs of the generators."
    )


def summed_up(results: Iterable[EvalResult]) -> Share:
    """The shares of all generators as one.

    Raises:
        DataError: every reward failed.
    """
    results = list(results)
    error = next((result.error for result in results if result.error), "")
    share = Share(
        sum(result.correct for result in results),
        sum(result.total for result in results),
        sum(result.failed for result in results),
        error,
    )
    if share.failed == share.total:
        raise _no_rewards(f"any of the {share.total} held-out tasks", error)
    return share
