"""Greedy accuracy on held-out tasks, each generator taking its share."""

from __future__ import annotations

import time
from dataclasses import replace

from headrace.ranks.heartbeat import MainState
from headrace.ranks.tasks import Scorer, TaskSource
from headrace.rollout.engine import Engine, Request, SamplingParams


def evaluate_share(
    engine: Engine,
    tasks: TaskSource,
    scorer: Scorer,
    params: SamplingParams,
    share: int,
    shares: int,
    main: MainState,
) -> tuple[float, int]:
    """Answer every `shares`-th held-out task greedily, with the weights the engine holds now.

    A reward that fails counts as 0: an evaluation measures what the model can be credited with.

    Returns:
        (sum of the rewards, number of tasks).
    """
    greedy = replace(params, temperature=0.0, top_p=1.0, top_k=0)
    mine = list(range(share, len(tasks.held_out), shares))
    for index in mine:
        prompt = tasks.encode(tasks.held_out[index])
        engine.add(Request(("eval", index), prompt, greedy, (0, index, 0)))
    answers: dict[int, list[int]] = {index: [] for index in mine}
    total, scored = 0.0, 0
    while scored < len(mine):
        main.set(f"evaluating, {scored} of {len(mine)} tasks")
        chunks = engine.step()
        for chunk in chunks:
            assert isinstance(chunk.id, tuple)
            index = chunk.id[1]
            answers[index].extend(chunk.tokens)
            if chunk.finish is not None:
                scorer.submit(chunk.id, tasks.held_out[index], tasks.decode(answers[index]))
        results = scorer.poll()
        total += sum(result.reward or 0.0 for result in results)
        scored += len(results)
        if not chunks and not results:
            time.sleep(0.002)
    return total, len(mine)
