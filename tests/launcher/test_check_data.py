"""Mistakes in tasks, rewards and algorithms are found before any rank starts, and leave no run folder."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headrace.comm.errors import DataError
from headrace.launcher.check_data import check_data_of_ranks
from headrace.launcher.cli import app
from headrace.launcher.config import Config, validate

OWN = """
from headrace.rollout.task import Task

print("noise of the user's module")

def sums():
    return [Task("1+1=", "2"), Task("1+2=", "3"), Task("2+2=", "4")]

def strange():
    return [Task("1+1=", "2"), Task("what?", "3")]

def leaving():
    raise SystemExit("enough")

def reward(task, answer):
    return 1.0

def other_reward(task):
    return 1.0

number = 3
"""
TINY = {"characters": "0123456789+=", "layers": 1, "hidden": 16, "heads": 2, "kv_heads": 1, "context": 16}


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("own_tasks.py").write_text(OWN)
    lines = [json.dumps({"prompt": "1+1="})] * 5
    Path("good.jsonl").write_text("\n".join(lines))
    Path("broken.jsonl").write_text("\n".join([*lines[:3], '{"prompt": ', lines[4]]))
    Path("long.jsonl").write_text("\n".join([*lines[:3], json.dumps({"prompt": "1+" * 9}), lines[4]]))


def config(**sections: dict[str, object]) -> dict[str, object]:
    tree: dict[str, object] = {
        "run": {"name": "x"},
        "model": {"tiny": TINY},
        "data": {"environment": "own_tasks.py:sums", "chat": False},
        "rollout": {"max_tokens": 4},
    }
    for name, values in sections.items():
        tree[name] = {**tree.get(name, {}), **values}  # type: ignore[dict-item]
    return tree


def refused(command: str, tree: dict[str, object]) -> str:
    """What a command says that finds a mistake in its data; no run folder is there afterwards."""
    Path("c.yaml").write_text(json.dumps(tree))
    result = CliRunner().invoke(app, [command, "c.yaml"])
    assert result.exit_code == 2, result.output
    assert not Path("runs").exists()
    assert result.stderr.startswith("headrace: ")
    return result.stderr.strip()


def file(name: str, **more: object) -> dict[str, object]:
    return {"environment": None, "file": name, "reward": "own_tasks.py:reward", **more}


MISTAKES = [
    ({"data": file("broken.jsonl")}, "broken.jsonl, line 4: this isn't JSON"),
    ({"data": file("nothing.jsonl")}, "data.file: there is no file nothing.jsonl"),
    ({"data": file("long.jsonl")}, "has 18 tokens, but there is room for 12"),
    ({"data": {"environment": "reasoning_gym:chain_sums"}}, "did you mean chain_sum"),
    ({"data": {"environment": "reasoning_gym:gcd", "options": {"nothing": 1}}}, "gcd has no option 'nothing'"),
    ({"data": {"environment": "own_tasks.py:strange"}}, "characters that the tokenizer"),
    ({"data": {"environment": "own_tasks.py:sum"}}, "has no 'sum'; did you mean sums?"),
    ({"data": {"environment": "own_tasks.py:number"}}, "own_tasks.py:number is a int; it must be a function"),
    ({"data": {"environment": "nowhere.py:f"}}, "data.environment: there is no file nowhere.py"),
    ({"data": {"environment": "no_such_module:f"}}, "data.environment: importing no_such_module failed"),
    ({"data": {"options": {"count": 3}}}, "data.options: own_tasks.py:sums can't be called with them"),
    ({"data": {"reward": "own_tasks.py:other_reward"}}, "data.reward: own_tasks.py:other_reward is called with"),
    ({"data": {"reward": "own_tasks.py:number"}}, "data.reward: own_tasks.py:number is a int"),
    ({"data": {"chat": True}}, "data.chat: the tokenizer in"),
    ({"eval": {"tasks": 3}}, "own_tasks.py:sums has 3 tasks; eval.tasks keeps 3"),
    ({"rollout": {"stop": ["12"]}}, "rollout.stop: '12' isn't a single token"),
    ({"train": {"loss": "ppoo"}}, "train.loss: there is no 'ppoo'. Did you mean ppo?"),
    ({"train": {"advantage": "own_tasks.py:nothing"}}, "train.advantage: own_tasks.py has no 'nothing'"),
    ({"train": {"warm_start": {"file": "good.jsonl"}}}, "train.warm_start.file: line 1 of good.jsonl"),
    ({"model": {"tiny": {**TINY, "characters": "0120"}}}, "model.tiny.characters holds a character twice"),
]


@pytest.mark.parametrize(("change", "words"), MISTAKES)
def test_debug_finds_a_mistake_before_there_is_a_run_folder(change: dict[str, dict[str, object]], words: str) -> None:
    paragraph = refused("debug", config(**change))
    assert words in paragraph
    assert "\n" not in paragraph


def test_run_finds_it_too() -> None:
    change, words = MISTAKES[0]
    paragraph = refused("run", config(**change))
    assert words in paragraph
    assert "\n" not in paragraph


def test_an_error_in_the_users_own_function_is_shown_whole_but_without_our_frames() -> None:
    told = refused("run", config(data={"environment": "own_tasks.py:leaving"}))
    first, *traceback = told.splitlines()
    assert first == "headrace: The code that the config names failed:"
    assert traceback[-1] == "SystemExit: enough"
    assert "in leaving" in told
    assert "noise" not in told
    assert "headrace" not in "".join(traceback)


def loaded(**sections: dict[str, object]) -> Config:
    return validate(config(**sections), "test")


def test_the_ranks_own_python_and_environment_decide() -> None:
    Path("elsewhere").mkdir()
    Path("own_tasks.py").rename("elsewhere/only_there.py")
    named = {"data": {"environment": "only_there:sums"}}
    with pytest.raises(DataError, match="importing only_there failed"):
        check_data_of_ranks(loaded(**named))
    check_data_of_ranks(loaded(**named, launch={"env": {"PYTHONPATH": "elsewhere"}}))


def test_a_check_that_dies_or_hangs_is_told() -> None:
    Path("own_tasks.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    with pytest.raises(DataError, match=r"ended by signal 11 \(SIGSEGV\)"):
        check_data_of_ranks(loaded())
    Path("own_tasks.py").write_text("import time\ntime.sleep(100)\n")
    with pytest.raises(DataError, match=r"takes more than 6 s \(run\.wait_limit_s\)"):
        check_data_of_ranks(loaded(run={"wait_limit_s": 6}))


def test_tasks_of_a_module_in_the_present_folder_are_found_by_debug() -> None:
    assert "has 3 tasks; eval.tasks keeps 5" in refused(
        "debug", config(data={"environment": "own_tasks:sums"}, eval={"tasks": 5})
    )
