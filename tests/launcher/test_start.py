"""What the launcher decides before it starts ranks."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import pytest

from headrace.comm.errors import ConfigError
from headrace.launcher.config import Config, validate
from headrace.launcher.runfolder import begin_attempt
from headrace.launcher.start import is_finished, prepare, run_job
from headrace.launcher.supervise import check_memory, crowded
from headrace.train.checkpoint import CheckpointStore


@pytest.mark.parametrize(("ranks", "cores", "warns"), [(8, 2, False), (9, 2, True), (500, 2, True), (500, 128, False)])
def test_far_more_ranks_than_cores_are_warned_of_in_one_line(ranks: int, cores: int, warns: bool) -> None:
    warning = crowded(ranks, cores)
    assert (warning is not None) == warns
    if warning is not None:
        assert warning.startswith(f"warning: {ranks} ranks share {cores} cores.")
        assert "\n" not in warning


def test_more_ranks_than_fit_into_memory_are_refused() -> None:
    check_memory(72, 24 << 30)
    with pytest.raises(ConfigError, match="1000 ranks don't fit into the 24 GiB of memory here") as error:
        check_memory(1000, 24 << 30)
    assert "\n" not in str(error.value)


def test_they_are_refused_before_anything_is_made(tmp_path: Path) -> None:
    wanted = validate({"run": {"dir": str(tmp_path / "run")}, "rollout": {"engine": "latency"}}, "test")
    many = wanted.model_copy(update={"ranks": wanted.ranks.model_copy(update={"generators": 10**6})})
    with pytest.raises(ConfigError, match="1000001 ranks don't fit"):
        run_job(many, False, False)
    assert not (tmp_path / "run").exists()


def config(folder: Path, steps: int, tasks: int) -> Config:
    tree = {"run": {"dir": str(folder), "steps": steps}, "model": {"tiny": {}}, "eval": {"tasks": tasks}}
    return validate(tree | {"data": {"environment": "reasoning_gym:gcd"}, "rollout": {"max_tokens": 8}}, "test")


@pytest.mark.parametrize(
    ("steps", "tasks", "evaluated", "finished"),
    [
        (20, 0, (), True),
        (21, 0, (), False),
        (20, 4, ("before", 0), False),
        (20, 4, ("after", 10), False),
        (20, 4, ("after", 20), True),
    ],
)
def test_a_run_is_finished_when_its_last_version_is_evaluated(
    tmp_path: Path, steps: int, tasks: int, evaluated: tuple[str, int], finished: bool
) -> None:
    store = CheckpointStore(tmp_path / "checkpoints", keep=2)
    store.begin(20)
    store.commit(20, {})
    if evaluated:
        line = {"label": evaluated[0], "version": evaluated[1], "accuracy": 0.5}
        (tmp_path / "evaluations.jsonl").write_text(json.dumps(line) + "\n")
    assert is_finished(config(tmp_path, steps, tasks)) == finished


def test_a_run_that_another_job_has_made_meanwhile_is_not_gone_on_with(tmp_path: Path) -> None:
    mine = config(tmp_path / "run", 60, 0)

    def another_job_comes_and_goes(_: Config) -> None:
        folder = begin_attempt(mine).run
        (folder / "metrics.jsonl").write_text('{"step": 1}\n')

    with ExitStack() as stack, pytest.raises(ConfigError, match="exists already"):
        prepare(mine, False, False, another_job_comes_and_goes, stack)
