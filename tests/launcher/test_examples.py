"""The example configs say what they mean: they validate, their tasks load, and their prompts fit."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from headrace.launcher.models import make_tiny_model
from headrace.ranks.config import JobConfig
from headrace.rollout.environments import load_environment
from headrace.rollout.prompts import PromptEncoder

EXAMPLES = sorted(Path("examples").glob("*.yaml"))


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_an_example_trains_asynchronously_on_tasks_that_it_does_not_evaluate_on(file: Path) -> None:
    config = JobConfig.model_validate(yaml.safe_load(file.read_text()))
    assert config.ranks.generators >= 2
    assert config.ranks.trainers >= 2
    assert config.ledger.max_staleness >= 1
    environment = load_environment(config.data, config.eval.tasks, config.run.seed)
    assert len(environment.held_out) == 200
    assert not {str(task.question) for task in environment.held_out} & {
        str(task.question) for task in environment.tasks
    }
    for task in environment.held_out:
        assert task.answer is not None
        assert environment.reward(task, task.answer) == 1.0
        assert environment.reward(task, f"{task.answer}0") == 0.0


def test_the_alphabet_of_the_tiny_example_covers_its_prompts_and_answers(tmp_path: Path) -> None:
    config = JobConfig.model_validate(yaml.safe_load(Path("examples/addition-tiny.yaml").read_text()))
    tiny = config.model.tiny
    assert tiny is not None
    make_tiny_model(tmp_path / "tiny", tiny, config.run.seed)
    encoder = PromptEncoder(
        tmp_path / "tiny", config.data, config.rollout.stop, tiny.context, config.rollout.max_tokens
    )
    for task in load_environment(config.data, config.eval.tasks, config.run.seed).tasks:
        assert encoder.decode(encoder.encode(task)) == task.question
        assert len(str(task.answer)) < config.rollout.max_tokens
