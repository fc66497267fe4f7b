"""Whether the ranks can use what a config names, before any of them is started and before the run has a folder.

    headrace run   ── config, as YAML on stdin ──▶ python -m headrace.ranks.preflight     as the ranks will be started
                   ◀── what is wrong, on stdout ──
    headrace debug ── check_data(config)                                                  where it will be used

Nothing here starts MPI, and no weights are loaded.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from heapq import nlargest
from itertools import chain

import yaml

from headrace.comm.errors import HeadraceError
from headrace.ranks.config import JobConfig
from headrace.ranks.tasks import environment_of, load_examples, make_encoder
from headrace.rollout.architecture import read_architecture
from headrace.rollout.rewards import pickled_reward
from headrace.rollout.task import Task

LONGEST = 1000
"""How many of the longest prompts are encoded."""


def check_data(config: JobConfig) -> None:
    """Load tasks, reward, tokenizer and algorithms as the ranks will, and encode the prompts that may be too long.

    Runs the code that the config names: module level and the environment's function, but no reward. `model.path` has to
    be there; it needn't hold weights.

    Raises:
        HeadraceError: the ranks couldn't use them; the message is theirs.
        Exception: whatever the user's own code raises.
    """
    if config.rollout.engine == "latency":
        return
    encoder = make_encoder(config)
    assert config.model.path is not None
    read_architecture(config.model.path)
    environment = environment_of(config)
    pickled_reward(environment.reward)
    for task in chain(_telling(environment.tasks), _telling(environment.held_out), _telling(_warm_tasks(config))):
        encoder.encode(task)
    _check_algorithms(config)


def _telling(tasks: Sequence[Task]) -> Iterator[Task]:
    """Tasks that show whether all can be encoded: the longest where they lie in memory; where each is made when it is
    asked for, the first and the last."""
    if isinstance(tasks, list):
        yield from nlargest(LONGEST, tasks, key=_length)
    elif tasks:
        yield from (tasks[0], tasks[-1])


def _length(task: Task) -> int:
    """Characters of the question."""
    if isinstance(task.question, str):
        return len(task.question)
    return sum(len(message["content"]) for message in task.question)


def _warm_tasks(config: JobConfig) -> list[Task]:
    warm = config.train.warm_start
    return [] if warm is None or warm.file is None else load_examples(warm.file)


def _check_algorithms(config: JobConfig) -> None:
    from headrace.train.advantages import ADVANTAGES
    from headrace.train.objective import make_objective

    ADVANTAGES.get(config.train.advantage)
    make_objective(config.train)


def main() -> int:
    """Check the config on stdin; status 0 if it is fine, otherwise 1 and what is wrong on stdout."""
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what the user's code prints
    try:
        check_data(JobConfig.model_validate(yaml.safe_load(sys.stdin)))
    except HeadraceError as error:
        answer.write(str(error))
    except BaseException as error:  # SystemExit, too: it is the user's code that raises
        answer.write(f"The code that the config names failed:\n{_own_traceback(error)}")
    else:
        return 0
    answer.close()
    return 1


def _own_traceback(error: BaseException) -> str:
    """The traceback without the frames of headrace that come first."""
    trace = error.__traceback__
    while trace is not None and (trace.tb_frame.f_globals.get("__package__") or "").startswith("headrace."):
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace or error.__traceback__)).rstrip()


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # threads that the user's code has left don't hold it up
