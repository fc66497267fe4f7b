"""From a ticket to a prompt, and from a response to a reward: what a generator needs to know of the data.

Every rank maps a ticket number to the same task (`ranks.order`), so a number is all that travels.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.comm.errors import ConfigError, DataError
from headrace.ranks.config import JobConfig
from headrace.ranks.order import TicketOrder
from headrace.rollout.environments import environment_fingerprint, load_environment
from headrace.rollout.prompts import PromptEncoder
from headrace.rollout.rewards import RewardPool, Scored
from headrace.rollout.task import Environment, Task

SYNTHETIC_PROMPT_TOKENS = 8


class TaskSource(Protocol):
    """Prompts for tickets, texts for tokens."""

    held_out: Sequence[Task]
    stop_token_ids: tuple[int, ...]

    def task(self, ticket: int) -> Task: ...

    def encode(self, task: Task) -> npt.NDArray[np.int32]: ...

    def decode(self, tokens: Sequence[int]) -> str: ...


class Scorer(Protocol):
    """Rewards for responses, computed elsewhere; never blocks."""

    def submit(self, key: Hashable, task: Task, text: str) -> None: ...

    def poll(self) -> list[Scored]: ...

    def close(self) -> None: ...


class EnvironmentTasks:
    """Tasks of an environment, encoded by the model's tokenizer."""

    def __init__(self, environment: Environment, encoder: PromptEncoder, order: TicketOrder) -> None:
        self.held_out = environment.held_out
        self.stop_token_ids = tuple(encoder.stop_token_ids)
        self._environment = environment
        self._encoder = encoder
        self._order = order

    def task(self, ticket: int) -> Task:
        return self._environment.tasks[self._order.task(ticket)]

    def encode(self, task: Task) -> npt.NDArray[np.int32]:
        return self._encoder.encode(task)

    def decode(self, tokens: Sequence[int]) -> str:
        return self._encoder.decode(tokens)


class SyntheticTasks:
    """Made-up prompts for the latency engine."""

    held_out: Sequence[Task] = ()
    stop_token_ids: tuple[int, ...] = ()

    def __init__(self, order: TicketOrder) -> None:
        self._order = order

    def task(self, ticket: int) -> Task:
        return Task(question=str(self._order.task(ticket)))

    def encode(self, task: Task) -> npt.NDArray[np.int32]:
        return np.full(SYNTHETIC_PROMPT_TOKENS, int(str(task.question)) % 1000, np.int32)

    def decode(self, tokens: Sequence[int]) -> str:
        return f"{len(tokens)} tokens"


class InstantScorer:
    """Rewards for the latency engine: the parity of the response length, known at once."""

    def __init__(self) -> None:
        self._ready: list[Scored] = []

    def submit(self, key: Hashable, task: Task, text: str) -> None:
        reward = float(int(text.split()[0]) % 2)
        self._ready.append(Scored(key=key, reward=reward, attempts=1, reason=None, error=None))

    def poll(self) -> list[Scored]:
        ready, self._ready = self._ready, []
        return ready

    def close(self) -> None:
        """Nothing runs."""


def environment_of(config: JobConfig) -> Environment:
    return load_environment(config.data, config.eval.tasks, config.run.seed)


def ticket_order(config: JobConfig, tasks: int) -> TicketOrder:
    """The order in which tickets take the tasks, the same on every rank."""
    return TicketOrder(tasks, config.run.seed, config.data.shuffle, config.data.epochs)


def make_task_source(config: JobConfig, environment: Environment | None, encoder: PromptEncoder | None) -> TaskSource:
    if environment is None or encoder is None:
        return SyntheticTasks(ticket_order(config, config.data.size))
    return EnvironmentTasks(environment, encoder, ticket_order(config, len(environment.tasks)))


def make_scorer(config: JobConfig, environment: Environment | None) -> Scorer:
    if environment is None:
        return InstantScorer()
    return RewardPool(environment.reward, config.data)


def make_encoder(config: JobConfig) -> PromptEncoder:
    """The tokenizer of the model, with the model's own limit of the context."""
    folder = config.model.path
    if folder is None:
        raise ConfigError("model.tiny is made by `headrace run`. To start ranks without it, give model.path a folder.")
    context = json.loads((folder / "config.json").read_text(encoding="utf-8"))["max_position_embeddings"]
    return PromptEncoder(folder, config.data, config.rollout.stop, context, config.rollout.max_tokens)


def warm_examples(
    config: JobConfig, environment: Environment, encoder: PromptEncoder
) -> list[tuple[list[int], list[int]]]:
    """(prompt, response) pairs of the supervised warm start, as tokens."""
    warm = config.train.warm_start
    assert warm is not None
    tasks: Sequence[Task] = environment.tasks
    if warm.file is not None:
        tasks = load_examples(warm.file)
    elif len(tasks) > warm.steps * warm.batch:
        tasks = [tasks[index] for index in range(warm.steps * warm.batch)]
    return [(encoder.encode(task).tolist(), encoder.encode_response(task.answer or "")) for task in tasks]


def load_examples(file: Path) -> list[Task]:
    """The tasks of a JSONL file with `prompt` and `response`.

    Raises:
        DataError: names the file and the line that can't be used.
    """
    tasks = []
    for number, line in enumerate(_lines(file), 1):
        try:
            entry = msgspec.json.decode(line, type=_Example)
        except msgspec.DecodeError as error:
            raise DataError(
                f"train.warm_start.file: line {number} of {file} isn't a JSON object with the texts `prompt` and "
                f"`response`: {error}."
            ) from None
        tasks.append(Task(question=entry.prompt, answer=entry.response))
    return tasks


class _Example(msgspec.Struct):
    prompt: str
    response: str


def _lines(file: Path) -> list[bytes]:
    try:
        lines = file.read_bytes().removeprefix(codecs.BOM_UTF8).splitlines()
    except OSError as error:
        raise DataError(f"train.warm_start.file: {file} can't be read: {error.strerror}.") from None
    if not lines:
        raise DataError(f"train.warm_start.file: {file} is empty.")
    return lines


def data_facts(environment: Environment | None, encoder: PromptEncoder | None) -> dict[str, str]:
    """What must be the same on every rank, as hashes."""
    facts = {}
    if environment is not None:
        facts["data"] = environment_fingerprint(environment)
    if encoder is not None:
        facts["tokenizer"] = encoder.fingerprint()
    return facts
