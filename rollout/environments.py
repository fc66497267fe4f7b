"""Where tasks come from: a reasoning-gym family, a function of the user's, or a JSONL file."""

from __future__ import annotations

import difflib
import hashlib
import inspect
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, overload

from headrace.comm.errors import ConfigError, DataError
from headrace.comm.imports import load_function
from headrace.rollout.config import DataConfig
from headrace.rollout.task import Environment, Reward, Task

REASONING_GYM = "reasoning_gym:"
ROUNDS = 64
"""How many times as many reasoning-gym tasks as wanted are looked at to find distinct ones."""

LIST_FAMILIES = "python -c 'import reasoning_gym.factory as f; print(*sorted(f.DATASETS))'"

Question = str | list[dict[str, str]]


class Indexed(Protocol):
    """All that is asked of the tasks of a user's function."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Task: ...


def load_environment(data: DataConfig, held_out: int, seed: int) -> Environment:
    """The tasks that `data` names, `held_out` of them kept for evaluation, and the function that scores them.

    The same arguments give the same tasks in every process. No question is both in `tasks` and in `held_out`.

    - `reasoning_gym:FAMILY`: `data.size` tasks made when they are indexed; the held-out ones come from another seed.
    - A function of the user's: called with `data.options`; of what it returns the last `held_out` are kept for
      evaluation and at most `data.size` others are used.
    - A JSONL file: the last `held_out` lines are kept for evaluation.

    Raises:
        ConfigError: unknown family or option (the nearest names are told), or a function that can't be imported.
        DataError: a file that can't be read (with the line), or too few distinct tasks.
    """
    if data.file is not None:
        environment = _split(read_jsonl(data.file), held_out, None, str(data.file), exact_match)
    elif data.environment is not None and data.environment.startswith(REASONING_GYM):
        environment = _reasoning_gym(data.environment.removeprefix(REASONING_GYM), data, held_out, seed)
    else:
        environment = _own(data, held_out)
    if data.reward is None:
        return environment
    return Environment(environment.tasks, environment.held_out, NamedReward(data.reward))


def environment_fingerprint(environment: Environment) -> str:
    """A hash over the sizes and the first and last three tasks: ranks that see the same tasks agree in it."""
    digest = hashlib.sha256()
    for tasks in (environment.tasks, environment.held_out):
        ends = sorted({*range(min(3, len(tasks))), *range(max(0, len(tasks) - 3), len(tasks))})
        shown = [(task.question, task.answer) for task in map(tasks.__getitem__, ends)]
        digest.update(json.dumps([len(tasks), shown]).encode())
    return digest.hexdigest()[:16]


def exact_match(task: Task, answer: str) -> float:
    """1 if the answer is the task's, white space around both aside, otherwise 0."""
    return float(task.answer is not None and answer.strip() == task.answer.strip())


class NamedReward:
    """A reward function of the user's. It is pickled as its import path and loaded again in the other process."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._function: Reward = load_function(path, "data.reward")
        _check_call("data.reward", f"{path} is called with (task, answer), which it can't take", self._function, 0, 0)

    def __call__(self, task: Task, answer: str) -> float:
        return self._function(task, answer)

    def __reduce__(self) -> tuple[type[NamedReward], tuple[str]]:
        return NamedReward, (self.path,)


class ReasoningGymReward:
    """The scorer of a reasoning-gym family, from 0 to 1; pickled as the family's name and options."""

    def __init__(self, family: str, options: dict[str, Any]) -> None:
        self.family, self.options = family, options
        self._dataset = _dataset(family, options, size=1, seed=0)

    def __call__(self, task: Task, answer: str) -> float:
        score: float = self._dataset.score_answer(answer, task.fields)
        return score

    def __reduce__(self) -> tuple[type[ReasoningGymReward], tuple[str, dict[str, Any]]]:
        return ReasoningGymReward, (self.family, self.options)


class ReasoningGymTasks(Sequence[Task]):
    """`size` tasks of a family, made when they are indexed; a question in `excluded` is replaced by another."""

    def __init__(self, make_round: Callable[[int], Any], size: int, excluded: frozenset[str]) -> None:
        self._make_round, self._size, self._excluded = make_round, size, excluded
        self._rounds: dict[int, Any] = {}

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Task]: ...
    def __getitem__(self, index: int | slice) -> Task | Sequence[Task]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._size))]
        return self._make(range(self._size)[index])

    def _make(self, index: int) -> Task:
        """Take the index from the first round of the dataset (each has its own seed) where it isn't excluded."""
        for number in range(ROUNDS):
            if number not in self._rounds:
                self._rounds[number] = self._make_round(number)
            entry = self._rounds[number][index]
            if entry["question"] not in self._excluded:
                return _task_of(entry)
        raise DataError(
            f"data.environment: nearly all questions of this family are held out for evaluation "
            f"({len(self._excluded)}). Lower eval.tasks, or widen data.options."
        )


def read_jsonl(file: Path) -> list[Task]:
    """The tasks of a JSONL file: per line an object with `prompt`, a text or a list of chat messages, and optionally
    `answer`; every other key is kept in `fields`. Empty lines are skipped.

    Raises:
        DataError: the file can't be read or is empty, or a line is broken (its number is told).
    """
    lines = _read(file).split("\n")
    tasks = [_parse_line(line, f"{file}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not tasks:
        raise DataError(f"data.file: {file} holds no tasks.")
    return tasks


def _read(file: Path) -> str:
    """Text in UTF-8, with or without the mark that some editors put before it."""
    try:
        return (data := file.read_bytes()).decode("utf-8-sig")
    except OSError as error:
        raise DataError(f"data.file: {file} can't be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        number = data.count(b"\n", 0, error.start) + 1
        raise DataError(f"{file}, line {number}: this isn't UTF-8 text ({error.reason}). Convert the file.") from None


def _parse_line(line: str, where: str) -> Task:
    try:
        record = json.loads(line)
        if "\\ud" in line.lower():
            json.dumps(record, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: this isn't JSON ({error.msg}, column {error.colno}).") from None
    except UnicodeEncodeError:
        raise DataError(f"{where}: there is half a character, \\ud800 to \\udfff without its partner.") from None
    if not isinstance(record, dict) or "prompt" not in record:
        raise DataError(f'{where}: there is no "prompt". Every line is an object such as {{"prompt": "2+3=", …}}.')
    prompt = record.pop("prompt")
    if not _is_question(prompt):
        raise DataError(f"{where}: the prompt must be a text, or a list of messages with role and content, not empty.")
    answer = record.pop("answer", None)
    return Task(prompt, None if answer is None else str(answer), record)


def _is_question(prompt: Any) -> bool:
    """Whether it is a text, or chat messages."""
    if isinstance(prompt, str):
        return bool(prompt)
    return isinstance(prompt, list) and bool(prompt) and all(map(_is_message, prompt))


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))


def _own(data: DataConfig, held_out: int) -> Environment:
    """The tasks that a function of the user's returns, scored by exact match."""
    assert data.environment is not None, "the config has an environment or a file"
    make = load_function(data.environment, "data.environment")
    _check_call("data.options", f"{data.environment} can't be called with them", make, **data.options)
    tasks = make(**data.options)
    if not _is_indexed(tasks) or (len(tasks) and not isinstance(tasks[0], Task)):
        raise ConfigError(
            f"data.environment: {data.environment} must return a sequence of Task (a list, or anything with a length "
            f"and an index), not {type(tasks)}."
        )
    return _split(tasks, held_out, data.size, data.environment, exact_match)


def _check_call(key: str, complaint: str, function: Callable[..., Any], /, *arguments: Any, **options: Any) -> None:
    """Raise if the arguments don't fit the function."""
    try:
        inspect.signature(function).bind(*arguments, **options)
    except TypeError as error:
        raise ConfigError(f"{key}: {complaint}: {error}.") from error
    except ValueError:
        return  # a built-in function may have no signature to look at


def _is_indexed(tasks: Any) -> bool:
    return hasattr(tasks, "__len__") and hasattr(tasks, "__getitem__") and not isinstance(tasks, Mapping)


def _split(tasks: Indexed, held_out: int, size: int | None, name: str, reward: Reward) -> Environment:
    """The last `held_out` tasks for evaluation, the others (without repetitions of those) for training."""
    count = len(tasks) - held_out
    if count <= 0:
        raise DataError(f"{name} has {len(tasks)} tasks; eval.tasks keeps {held_out} of them, which leaves none.")
    kept = [tasks[index] for index in range(count, len(tasks))]
    excluded = {_question_key(task.question) for task in kept}
    others = (tasks[index] for index in range(count))
    rest = list(islice((task for task in others if _question_key(task.question) not in excluded), size))
    if not rest:
        raise DataError(f"{name}: all other tasks repeat questions of the last {held_out} (eval.tasks).")
    return Environment(rest, kept, reward)


def _question_key(question: Question) -> str:
    return question if isinstance(question, str) else json.dumps(question)


def _reasoning_gym(family: str, data: DataConfig, held_out: int, seed: int) -> Environment:
    """Tasks of a reasoning-gym family, scored by the family's own function."""
    _check_family(family)
    _check_options(family, data.options)
    kept = list(_distinct(family, data.options, held_out, seed))
    excluded = frozenset(str(task.question) for task in kept)

    def make_round(number: int) -> Any:
        return _dataset(family, data.options, data.size, _derived_seed(seed, "train", number))

    tasks = ReasoningGymTasks(make_round, data.size, excluded)
    for index in range(min(8, data.size)):  # too few questions shall show at the start, not in the middle of a run
        tasks[index]
    return Environment(tasks, kept, ReasoningGymReward(family, data.options))


def _distinct(family: str, options: dict[str, Any], count: int, seed: int) -> Iterator[Task]:
    """`count` tasks with distinct questions, from seeds that training doesn't use."""
    seen: set[str] = set()
    for number in range(ROUNDS if count else 0):
        for entry in _dataset(family, options, count, _derived_seed(seed, "held out", number)):
            if entry["question"] not in seen:
                seen.add(entry["question"])
                yield _task_of(entry)
            if len(seen) == count:
                return
    if count:
        raise DataError(
            f"data.environment: only {len(seen)} distinct questions were found in {ROUNDS * count} tasks of "
            f"{REASONING_GYM}{family}, but eval.tasks wants {count}. Lower it, or widen data.options."
        )


def _task_of(entry: dict[str, Any]) -> Task:
    answer = entry["answer"]
    return Task(entry["question"], None if answer is None else str(answer), entry)


def _derived_seed(seed: int, purpose: str, number: int) -> int:
    """Seeds far from each other: a reasoning-gym dataset uses all numbers from its seed up to seed + size.

    Below 2^31, since some families hand the sum to numpy, which takes 32 bits.
    """
    return int.from_bytes(hashlib.sha256(f"{seed} {purpose} {number}".encode()).digest()[:4], "big") >> 1


def _dataset(family: str, options: dict[str, Any], size: int, seed: int) -> Any:
    """A reasoning-gym dataset; making one is cheap for nearly all families."""
    import reasoning_gym

    try:
        return reasoning_gym.create_dataset(family, size=size, seed=seed, **options)
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError(f"data.options: {REASONING_GYM}{family} refuses {options} (size {size}): {error}") from error


def _check_family(family: str) -> None:
    from reasoning_gym.factory import DATASETS

    if family not in DATASETS:
        raise ConfigError(
            f"data.environment: reasoning-gym has no family {family!r}{_nearest(family, DATASETS)} "
            f"`{LIST_FAMILIES}` lists all {len(DATASETS)}."
        )


def _check_options(family: str, options: dict[str, Any]) -> None:
    from reasoning_gym.factory import DATASETS

    known = {field.name for field in fields(DATASETS[family][1])} - {"seed", "size"}
    for name in options:
        if name in ("seed", "size"):
            raise ConfigError(f"data.options: {name} is set by {'run.seed' if name == 'seed' else 'data.size'}.")
        if name not in known:
            raise ConfigError(
                f"data.options: {family} has no option {name!r}{_nearest(name, known)} "
                f"There are: {', '.join(sorted(known)) or 'none'}."
            )


def _nearest(name: str, known: Collection[str]) -> str:
    """The end of a sentence about an unknown name: what may have been meant."""
    close = difflib.get_close_matches(name, sorted(known), n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(close)}?" if close else "."
