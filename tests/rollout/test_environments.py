"""Tasks from reasoning-gym, from a user's function and from JSONL files."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import reasoning_gym
from hypothesis import given
from hypothesis import strategies as st
from reasoning_gym.factory import DATASETS

from headrace.comm.errors import ConfigError, DataError
from headrace.rollout.config import DataConfig
from headrace.rollout.environments import (
    NamedReward,
    ReasoningGymReward,
    environment_fingerprint,
    exact_match,
    load_environment,
    read_jsonl,
)
from headrace.rollout.task import Task

OWN = """
from headrace.rollout.task import Task

def squares(count=10, repeat=1):
    return [Task(f"{i}*{i}=", str(i * i)) for i in range(count)] * repeat

class Lazy:
    '''A length and an index, nothing else; only the first and the last tasks can be made.'''

    def __len__(self):
        return 10**6

    def __getitem__(self, index):
        if not isinstance(index, int) or 5 <= index < 10**6 - 5:
            raise RuntimeError(f"task {index} isn't needed")
        return Task(f"task {index}", str(index))

def lazy():
    return Lazy()

def by_name():
    return {"first": Task("a", "b")}

def broken(count=2):
    return count + "tasks"

def numbers():
    return [1, 2, 3]

def half(task, answer):
    return 0.5
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("own") / "own_environment.py"
    file.write_text(OWN)
    return str(file)


def gym(family: str = "chain_sum", **settings: object) -> DataConfig:
    return DataConfig.model_validate({"environment": f"reasoning_gym:{family}", **settings})


def test_reasoning_gym_tasks_are_the_same_in_every_process_and_differ_by_seed() -> None:
    first, again, other = (load_environment(gym(size=20), 5, seed) for seed in (1, 1, 2))
    assert list(first.tasks) == list(again.tasks)
    assert list(first.held_out) == list(again.held_out)
    assert environment_fingerprint(first) == environment_fingerprint(again)
    assert environment_fingerprint(first) != environment_fingerprint(other)
    assert len({task.question for task in first.tasks} & {task.question for task in other.tasks}) <= 1


def test_options_reach_the_family() -> None:
    options = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    tasks = load_environment(gym(size=50, options=options), 0, 0).tasks
    assert {task.fields["metadata"]["num_terms"] for task in tasks} == {2}


def test_no_held_out_question_is_trained_on_even_when_there_are_few() -> None:
    options = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    environment = load_environment(gym(size=500, options=options), 100, 0)
    held_out = [task.question for task in environment.held_out]
    assert len(set(held_out)) == len(held_out) == 100
    assert len(environment.tasks) == 500
    assert not set(held_out) & {task.question for task in environment.tasks}


def test_more_held_out_tasks_than_distinct_questions_is_said() -> None:
    options = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    with pytest.raises(DataError, match=r"only 200 distinct questions .* eval\.tasks wants 250"):
        load_environment(gym(size=10, options=options), 250, 0)
    with pytest.raises(DataError, match="nearly all questions"):
        load_environment(gym(size=10, options=options), 200, 0)


def test_tasks_are_made_only_when_asked_for() -> None:
    tasks = load_environment(gym(size=10**9), 0, 0).tasks
    assert len(tasks) == 10**9
    assert tasks[-1] == tasks[10**9 - 1]
    assert tasks[2:6:2] == [tasks[2], tasks[4]]
    with pytest.raises(IndexError):
        tasks[10**9]


@pytest.mark.parametrize("family", ["chain_sum", "gcd", "letter_counting", "countdown", "acre", "propositional_logic"])
def test_the_reward_is_the_family_s_own_after_a_trip_to_another_process(family: str) -> None:
    environment = load_environment(gym(family, size=5), 2, 3)
    reward = pickle.loads(pickle.dumps(environment.reward))
    assert isinstance(reward, ReasoningGymReward)
    dataset = reasoning_gym.create_dataset(family, size=5, seed=3)
    for task in [*environment.tasks, *environment.held_out]:
        for answer in (task.answer or "", "", "12"):
            assert reward(task, answer) == dataset.score_answer(answer, task.fields)
        if task.answer is not None:
            assert reward(task, task.answer) > 0


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(set(DATASETS) - {"composite"}))
def test_every_family_loads(family: str) -> None:
    environment = load_environment(gym(family, size=20), 3, 0)
    assert environment.tasks[0].question
    assert len(environment.held_out) == 3
    pickle.loads(pickle.dumps(environment.reward))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"environment": "reasoning_gym:chain_sums"}, "did you mean chain_sum"),
        ({"environment": "reasoning_gym:zzzzzz"}, r"no family 'zzzzzz'\. `python -c .* lists all \d+\.$"),
        ({"options": {"min_term": 2}}, "no option 'min_term'; did you mean min_terms"),
        ({"options": {"zzzzzz": 2}}, r"no option 'zzzzzz'\. There are: .*min_terms"),
        ({"options": {"seed": 2}}, "seed is set by run.seed"),
        ({"options": {"size": 2}}, "size is set by data.size"),
        ({"options": {"min_terms": 5, "max_terms": 2}}, "chain_sum refuses"),
        ({"options": {"min_terms": "many"}}, "chain_sum refuses"),
        ({"environment": "no_such_module:f"}, "importing no_such_module failed"),
        ({"environment": "nowhere/mine.py:f"}, "there is no file nowhere/mine.py"),
        ({"environment": "math"}, "isn't of the form"),
        ({"environment": "math:pi"}, "math:pi is a float; it must be a function"),
        ({"reward": "math:no_such_name"}, r"has no 'no_such_name'\.$"),
        ({"reward": "math:hypo"}, "has no 'hypo'; did you mean hypot?"),
        ({"reward": "math:pi"}, "data.reward: math:pi is a float; it must be a function"),
        ({"reward": "random:seed_all"}, "data.reward: random has no 'seed_all'"),
        ({"reward": "textwrap:dedent"}, r"called with \(task, answer\), which it can't take: too many positional"),
    ],
)
def test_a_mistake_in_the_config_is_named(settings: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_environment(gym(**{"environment": "reasoning_gym:chain_sum", **settings}), 0, 0)


def test_the_message_about_an_unknown_family_stays_short() -> None:
    with pytest.raises(ConfigError) as error:
        load_environment(gym("chain_sums"), 0, 0)
    assert len(str(error.value)) < 250


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import math\nmath.sqrt(-1)\n", r"failed: ValueError: .*domain.* \(.*broken\.py, line 2\)\."),
        ("def f(:\n", r"failed: SyntaxError: .* \(broken\.py, line 1\)\."),
        ("import no_such_module\n", r"failed: ModuleNotFoundError: .* \(.*broken\.py, line 1\)\."),
        ("open('nothing')\n", r"failed: FileNotFoundError: .*nothing.* \(.*broken\.py, line 1\)\."),
    ],
)
def test_an_error_in_a_file_of_the_user_s_is_told_with_its_place(tmp_path: Path, code: str, words: str) -> None:
    (tmp_path / "broken.py").write_text(code)
    with pytest.raises(ConfigError, match=words) as error:
        load_environment(DataConfig(environment=f"{tmp_path / 'broken.py'}:f"), 0, 0)
    assert "\n" not in str(error.value)


def test_a_function_of_the_user_s_makes_tasks_and_the_last_are_held_out(own: str) -> None:
    data = DataConfig(environment=f"{own}:squares", options={"count": 8})
    environment = load_environment(data, 3, 0)
    assert [task.answer for task in environment.tasks] == ["0", "1", "4", "9", "16"]
    assert [task.answer for task in environment.held_out] == ["25", "36", "49"]
    assert environment.reward is exact_match


def test_repetitions_of_held_out_questions_are_left_out_of_training(own: str) -> None:
    data = DataConfig(environment=f"{own}:squares", options={"count": 6, "repeat": 2})
    environment = load_environment(data, 2, 0)
    assert [task.answer for task in environment.tasks] == ["0", "1", "4", "9"] * 2
    small = DataConfig(environment=f"{own}:squares", options={"count": 6}, size=3)
    assert len(load_environment(small, 0, 0).tasks) == len(load_environment(small, 2, 0).tasks) == 3


@pytest.mark.parametrize(
    ("function", "options", "held_out", "error", "words"),
    [
        ("squares", {"amount": 3}, 0, ConfigError, "can't be called with them.*amount"),
        ("squares", {"self": 3, "count": 2}, 0, ConfigError, "can't be called with them.*self"),
        ("numbers", {}, 0, ConfigError, "must return a sequence of Task"),
        ("by_name", {}, 0, ConfigError, "must return a sequence of Task.*dict"),
        ("squares", {"count": 3}, 3, DataError, "has 3 tasks; eval.tasks keeps 3"),
        ("squares", {"count": 1, "repeat": 3}, 1, DataError, "repeat questions"),
        ("squares", {"count": 0}, 0, DataError, "has 0 tasks"),
    ],
)
def test_a_function_that_does_not_fit_is_refused(
    own: str, function: str, options: dict[str, object], held_out: int, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        load_environment(DataConfig(environment=f"{own}:{function}", options=options), held_out, 0)


@pytest.mark.parametrize("held_out", [0, 2])
def test_a_length_and_an_index_are_all_that_tasks_need(own: str, held_out: int) -> None:
    environment = load_environment(DataConfig(environment=f"{own}:lazy", size=4), held_out, 0)
    assert [task.answer for task in environment.tasks] == ["0", "1", "2", "3"]
    assert [task.answer for task in environment.held_out] == ["999998", "999999"][:held_out]


def test_an_error_inside_the_user_s_function_is_shown_as_it_is(own: str) -> None:
    with pytest.raises(TypeError, match="unsupported operand") as error:
        load_environment(DataConfig(environment=f"{own}:broken"), 0, 0)
    assert error.traceback[-1].name == "broken"


def test_a_named_reward_replaces_the_environment_s_own_and_survives_the_trip(own: str) -> None:
    environment = load_environment(gym(size=5, reward=f"{own}:half"), 0, 0)
    reward = pickle.loads(pickle.dumps(environment.reward))
    assert isinstance(reward, NamedReward)
    assert reward(environment.tasks[0], "x") == 0.5


@given(st.text(alphabet=" \n\t0123ab"), st.text(alphabet=" \n\t0123ab"))
def test_exact_match_forgives_white_space_only(expected: str, answer: str) -> None:
    assert exact_match(Task("q", expected), answer) == float(expected.strip() == answer.strip())
    assert exact_match(Task("q"), answer) == 0.0


def jsonl(file: Path, *lines: str) -> DataConfig:
    file.write_text("\n".join(lines), encoding="utf-8")
    return DataConfig(file=file, reward="headrace.rollout.environments:exact_match")


def test_a_file_gives_prompts_answers_and_fields_and_keeps_its_last_lines(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "你好\u2028😀"}]
    lines = [json.dumps(line, ensure_ascii=False) for line in (
        {"prompt": "1+1=", "answer": 2, "level": [1]},
        {"prompt": chat},
        {"prompt": "last", "answer": "x"},
    )]  # fmt: skip
    environment = load_environment(jsonl(tmp_path / "a.jsonl", lines[0], "", lines[1], lines[2], ""), 1, 0)
    assert list(environment.tasks) == [Task("1+1=", "2", {"level": [1]}), Task(chat)]
    assert list(environment.held_out) == [Task("last", "x")]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"prompt": "a"', "isn't JSON"),
        ('{"prompt": "a\\udc00"}', "half a character"),
        ('{"prompt": "a", "hint": ["\\uD83D x"]}', "half a character"),
        ("[1]", 'no "prompt"'),
        ('{"promt": "a"}', 'no "prompt"'),
        ('{"prompt": 5}', "must be a text, or a list of messages .*, not empty"),
        ('{"prompt": ""}', "must be a text, or a list of messages .*, not empty"),
        ('{"prompt": []}', "must be a text, or a list of messages .*, not empty"),
        ('{"prompt": [{"role": "user"}]}', "must be a text, or a list of messages .*, not empty"),
    ],
)
def test_a_broken_line_is_named_by_file_and_number(tmp_path: Path, line: str, words: str) -> None:
    data = jsonl(tmp_path / "broken.jsonl", '{"prompt": "a"}', "", line, '{"prompt": "b"}')
    with pytest.raises(DataError, match=rf"broken\.jsonl, line 3: .*{words}"):
        load_environment(data, 0, 0)


def test_an_empty_missing_or_binary_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "a"}\n{"prompt": "\xe4"}\n')
    (tmp_path / "empty.jsonl").write_text("\n \n")
    with pytest.raises(DataError, match="holds no tasks"):
        read_jsonl(tmp_path / "empty.jsonl")
    with pytest.raises(DataError, match=r"latin\.jsonl, line 2: this isn't UTF-8 text"):
        read_jsonl(tmp_path / "latin.jsonl")
    with pytest.raises(DataError, match=r"missing\.jsonl can't be read: No such file"):
        read_jsonl(tmp_path / "missing.jsonl")


def test_a_file_of_an_editor_that_marks_utf_8_is_read(tmp_path: Path) -> None:
    (tmp_path / "marked.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt": "\\ud83d\\ude00"}\r\n')
    assert read_jsonl(tmp_path / "marked.jsonl") == [Task("😀")]


EXAMPLE = "examples/my_environment.py"


def test_the_example_environment_gives_different_sums_and_holds_some_out() -> None:
    data = DataConfig(environment=f"{EXAMPLE}:addition", options={"digits": 2, "count": 500})
    environment = load_environment(data, 100, 0)
    assert (len(environment.tasks), len(environment.held_out)) == (400, 100)
    everything = [*environment.tasks, *environment.held_out]
    assert len({task.question for task in everything}) == 500
    for task in everything:
        a, b = str(task.question).removesuffix("=").split("+")
        assert (len(a), len(b)) == (2, 2)
        assert str(int(a) + int(b)) == task.answer
    assert environment_fingerprint(environment) == environment_fingerprint(load_environment(data, 100, 0))


def test_the_example_environment_can_give_every_sum_there_is() -> None:
    data = DataConfig(environment=f"{EXAMPLE}:addition", options={"digits": 1})
    assert len({task.question for task in load_environment(data, 0, 0).tasks}) == 81


@pytest.mark.parametrize(
    ("answer", "reward"), [("123", 1.0), ("124", 1 / 3), ("23", 1 / 3), ("", 0.0), ("9123", 3 / 8)]
)
def test_the_example_reward_counts_right_digits_from_the_end(answer: str, reward: float) -> None:
    data = DataConfig(environment=f"{EXAMPLE}:addition", reward=f"{EXAMPLE}:right_digits")
    assert load_environment(data, 0, 0).reward(Task("61+62=", "123"), answer) == pytest.approx(reward)
