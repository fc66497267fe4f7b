"""A task: what is asked, and what a reward needs to score an answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Task:
    """One prompt. Everything in it is plain data, so that it can go to a reward process."""

    question: str | list[dict[str, str]]
    """Text, or chat messages (`role`, `content`)."""
    answer: str | None = None
    """The reference answer, where there is one."""
    fields: dict[str, Any] = field(default_factory=dict)
    """What else came with the task, for instance the entry of a reasoning-gym dataset."""


Reward = Callable[[Task, str], float]
"""(task, text of the extracted answer) → reward. May raise, hang or return nonsense: callers are ready for it."""


@dataclass(frozen=True, slots=True)
class Environment:
    """Tasks with the function that scores them."""

    tasks: Sequence[Task]
    held_out: Sequence[Task]
    """Tasks for evaluation, none of them in `tasks`."""
    reward: Reward
    """Picklable: it is sent once to each reward process of this rank."""
