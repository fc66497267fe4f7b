"""An environment and a reward of your own: `data.environment=examples/my_environment.py:addition`.

What the two functions are given and what they must return is explained in docs/environment.md.
"""

import random

from headrace.rollout.task import Task


def addition(digits: int = 2, count: int = 10_000, seed: int = 0) -> list[Task]:
    """Different sums of two numbers of `digits` digits, such as `12+34=`, in an order fixed by the seed."""
    smallest, end = 10 ** (digits - 1), 10**digits
    span = end - smallest
    chosen = random.Random(seed).sample(range(span * span), min(count, span * span))
    pairs = ((smallest + number // span, smallest + number % span) for number in chosen)
    return [Task(question=f"{a}+{b}=", answer=str(a + b)) for a, b in pairs]


def right_digits(task: Task, answer: str) -> float:
    """1 for the right sum; otherwise up to 0.5, by the share of digits that are right, counted from the last."""
    expected = task.answer or ""
    if answer == expected:
        return 1.0
    right = sum(a == b for a, b in zip(reversed(answer), reversed(expected), strict=False))
    return 0.5 * right / max(len(answer), len(expected))
