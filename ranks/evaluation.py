"""Greedy accuracy on held-out tasks, each generator taking its share."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from headrace.comm.errors import WaitLimitError
from headrace.ranks.metrics import keep_lines
from headrace.ranks.tasks import Scorer, TaskSource
from headrace.rollout.engine import Engine, Request, SamplingParams

POLL_S = 0.002


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
) -> tuple[float, int]:
    """Answer every `shares`-th held-out task greedily, with the weights the engine holds now.

    A reward that fails counts as 0: an evaluation measures what the model can be credited with. `on_progress` is called
    with the number of scored tasks and of all whenever tokens or rewards have come.

    Returns:
        (sum of the rewards, number of tasks).

    Raises:
        WaitLimitError: neither tokens nor rewards came for `limit_s` seconds.
    """
    greedy = replace(params, temperature=0.0, top_p=1.0, top_k=0)
    answers: dict[tuple[str, int], list[int]] = {}
    for index in range(share, len(tasks.held_out), shares):
        answers["eval", index] = []
        prompt = tasks.encode(tasks.held_out[index])
        engine.add(Request(("eval", index), prompt, greedy, (0, index, 0)))
    rewards: dict[tuple[str, int], float] = {}
    moved = time.monotonic()
    while len(rewards) < len(answers):
        chunks = engine.step()
        for chunk in chunks:
            assert isinstance(chunk.id, tuple)
            answers[chunk.id].extend(chunk.tokens)
            if chunk.finish is not None:
                scorer.submit(chunk.id, tasks.held_out[chunk.id[1]], tasks.decode(answers[chunk.id]))
        # Rewards of training samples that were given up may still come in: they don't count.
        scored = {one.key: one.reward or 0.0 for one in scorer.poll() if one.key in answers}
        rewards |= {key: reward for key, reward in scored.items() if isinstance(key, tuple)}
        if chunks or scored:
            moved = time.monotonic()
            on_progress(len(rewards), len(answers))
        elif time.monotonic() - moved > limit_s:
            raise WaitLimitError(
                f"The evaluation has stood still for {limit_s:.0f} s (run.wait_limit_s), with {len(rewards)} of "
                f"{len(answers)} held-out tasks scored on this rank."
            )
        else:
            time.sleep(POLL_S)
    return sum(rewards.values()), len(answers)
