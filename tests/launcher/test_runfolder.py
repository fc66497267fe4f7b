"""The run folder, its attempts, what a resumed run may change, and the export of a checkpoint."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from headrace.comm.errors import ConfigError, DataError, HeadraceError
from headrace.launcher.config import Config, validate
from headrace.launcher.export import export
from headrace.launcher.lock import held
from headrace.launcher.models import make_tiny_model
from headrace.launcher.runfolder import (
    RECORDS,
    begin_again,
    begin_attempt,
    check_new,
    check_resume,
    checkpoints,
    claim,
    claim_fresh,
    flatten,
    fresh_config,
)
from headrace.ranks.config import TinyModelConfig
from headrace.train.checkpoint import CheckpointStore


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


TINY = {
    "model": {"tiny": {"layers": 1, "hidden": 16, "heads": 2, "kv_heads": 1}},
    "data": {"environment": "reasoning_gym:gcd"},
    "rollout": {"max_tokens": 8},
}


def config(**run: object) -> Config:
    return validate({"run": {"name": "x", **run}, "rollout": {"engine": "latency"}}, "test")


def test_attempts_are_counted_and_latest_is_the_last() -> None:
    assert [begin_attempt(config()).number for _ in range(11)] == list(range(1, 12))
    assert Path("runs/x/latest").readlink() == Path("attempt_11")
    assert Path("runs/x/config.yaml").is_file()


def test_fresh_takes_the_next_free_name() -> None:
    assert fresh_config(config()).run.folder == Path("runs/x")
    Path("runs/x").mkdir(parents=True)
    Path("runs/x-2").mkdir()
    assert fresh_config(config()).run.folder == Path("runs/x-3")
    assert fresh_config(config(dir="runs/x")).run.folder == Path("runs/x-3")


def test_fresh_runs_of_one_moment_take_different_folders() -> None:
    Path("runs").mkdir()
    Path("runs/x").symlink_to("nowhere")
    with ThreadPoolExecutor() as pool:
        claimed = list(pool.map(lambda _: claim_fresh(config()).run.folder, range(20)))
    assert set(claimed) == {Path(f"runs/x-{number}") for number in range(2, 22)}
    assert all(folder.is_dir() for folder in claimed)
    with pytest.raises(ConfigError, match=r"Another run has just begun in runs/x-2, .*Submit this one once more"):
        claim(Path("runs/x-2"))


def test_a_place_that_cannot_be_written_is_told() -> None:
    Path("runs").write_text("in the way")
    with pytest.raises(HeadraceError, match=r"The run folder runs/x can't be written: File exists"):
        claim_fresh(config())


def test_an_empty_folder_may_be_used() -> None:
    Path("runs/x").mkdir(parents=True)
    check_new(config())
    (Path("runs/x") / "notes.txt").write_text("somebody else's")
    with pytest.raises(ConfigError, match="exists already"):
        check_new(config())


def finish_a_step(run: Path) -> None:
    (run / "metrics.jsonl").write_text('{"step": 1}\n')


def test_a_run_that_never_finished_a_step_makes_room_for_another() -> None:
    run = begin_attempt(config()).run
    (run / "metrics.jsonl").write_text("")
    (run / "evaluations.jsonl").write_text('{"label": "before"}\n')
    (run / "initial_model").mkdir()
    check_new(config(seed=7))
    assert check_resume(config(seed=7)) == ["run.seed 0 → 7"]
    begin_again(begin_attempt(config(seed=7)))
    assert not (run / "initial_model").exists()
    assert (run / "attempt_01" / "evaluations.jsonl").exists()


@pytest.mark.parametrize("work", ["a step", "a checkpoint"])
def test_a_run_that_has_finished_a_step_is_not_overwritten(work: str) -> None:
    run = begin_attempt(config()).run
    if work == "a step":
        finish_a_step(run)
    else:
        checkpoint(run, 20, [])
    with pytest.raises(ConfigError, match="exists already"):
        check_new(config())


def test_a_resumed_run_may_change_what_keeps_its_meaning_and_says_so() -> None:
    begin_attempt(config())
    assert check_resume(config()) == []
    assert check_resume(config(steps=99, wait_limit_s=7)) == ["run.steps 60 → 99", "run.wait_limit_s 600.0 → 7.0"]


@pytest.mark.parametrize("change", [{"seed": 3}, {"deterministic": True}])
def test_a_resumed_run_may_not_change_the_rest(change: dict[str, object]) -> None:
    finish_a_step(begin_attempt(config()).run)
    with pytest.raises(ConfigError, match="started with other values: run"):
        check_resume(config(**change, steps=99))


@pytest.mark.parametrize("steps", [20, 21])
def test_a_run_goes_on_to_a_step_that_is_not_behind_it(steps: int) -> None:
    checkpoint(begin_attempt(config()).run, 20, [])
    assert check_resume(config(steps=steps)) == [f"run.steps 60 → {steps}"]


def test_a_run_does_not_go_back() -> None:
    for step in (20, 40):
        checkpoint(begin_attempt(config()).run, step, [])
    with pytest.raises(ConfigError, match=r"run\.steps=39, but .* runs/x has a checkpoint of step 40 already") as error:
        check_resume(config(steps=39))
    assert "\n" not in str(error.value)


def test_the_records_of_steps_that_are_done_again_move_to_their_attempt() -> None:
    first = begin_attempt(config())
    for name in RECORDS[1:]:
        (first.run / name).write_text(name)
    begin_again(begin_attempt(config()))
    assert not any((first.run / name).exists() for name in RECORDS)
    assert {file.name for file in first.folder.iterdir()} == {"samples.jsonl", "evaluations.jsonl"}
    assert (first.folder / "samples.jsonl").read_text() == "samples.jsonl"


def test_leaves_by_dotted_path() -> None:
    assert flatten({"a": {"b": 1, "c": {}}, "d": [2]}) == {"a.b": 1, "a.c": {}, "d": [2]}


def checkpoint(run: Path, step: int, tensors: list[dict[str, torch.Tensor]]) -> None:
    """A checkpoint as the trainers write it, its weights spread over one file per trainer."""
    store = CheckpointStore(run / "checkpoints", keep=5)
    folder = store.begin(step)
    for rank, part in enumerate(tensors):
        whole = {f"master/{name}": tensor.float() for name, tensor in part.items()}
        moments = {f"exp_avg/{name}": torch.zeros_like(tensor) for name, tensor in whole.items()}
        save_file(whole | moments, folder / f"engine_{rank:05d}_of_{len(tensors):05d}.safetensors", {"updates": "1"})
    store.commit(step, {"step": step})


@pytest.fixture
def trained() -> Path:
    """A run of a tiny model with checkpoints of steps 20 and 40, whose weights are the initial ones times 2 and 3."""
    loaded = validate(TINY | {"run": {"name": "x"}}, "test")
    run = begin_attempt(loaded).run
    make_tiny_model(run / "initial_model", loaded.model.tiny or TinyModelConfig(), 0)
    weights = load_file(run / "initial_model" / "model.safetensors")
    names = sorted(weights)
    for step, factor in ((20, 2.0), (40, 3.0)):
        halves = [{name: factor * weights[name] for name in half} for half in (names[::2], names[1::2])]
        checkpoint(run, step, halves)
    return run


def test_the_newest_checkpoint_becomes_a_hugging_face_folder(trained: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = export(trained, Path("out"))
    initial = load_file(trained / "initial_model" / "model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.dtype == torch.bfloat16
    state = model.state_dict()
    for name, tensor in initial.items():
        torch.testing.assert_close(state[name], (3 * tensor.float()).bfloat16(), rtol=0, atol=0)
    assert AutoTokenizer.from_pretrained(out)("12+3").input_ids
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    assert {file.stat().st_mode & 0o777 for file in out.iterdir()} == {0o644}


def test_a_checkpoint_can_be_chosen_and_has_a_place_of_its_own(trained: Path) -> None:
    assert list(checkpoints(trained)) == [20, 40]
    out = export(trained, step=20)
    assert out == trained / "export" / "step_000020"
    initial = load_file(trained / "initial_model" / "model.safetensors")
    exported = load_file(out / "model.safetensors")
    assert set(exported) == set(initial)
    name = next(iter(initial))
    torch.testing.assert_close(exported[name], (2 * initial[name].float()).bfloat16(), rtol=0, atol=0)


def test_what_cannot_be_exported_is_told(trained: Path) -> None:
    with pytest.raises(ConfigError, match="no checkpoint of step 30; there are: 20, 40"):
        export(trained, step=30)
    Path("taken").mkdir()
    with pytest.raises(ConfigError, match="taken exists already"):
        export(trained, Path("taken"))
    with pytest.raises(ConfigError, match="isn't a run folder"):
        export(Path("nowhere"))
    begun = begin_attempt(validate(TINY | {"run": {"name": "begun"}}, "test")).run
    make_tiny_model(begun / "initial_model", TinyModelConfig(layers=1, hidden=16, heads=2, kv_heads=1), 0)
    with pytest.raises(DataError, match="has no checkpoint yet"):
        export(begun)
    latency = begin_attempt(config(name="latency")).run
    checkpoint(latency, 20, [])
    with pytest.raises(ConfigError, match=r"latency is a run of `rollout\.engine: latency`, .* no weights to export"):
        export(latency)


def test_an_export_to_a_full_disk_is_one_paragraph_and_leaves_nothing(
    trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(HeadraceError, match=r"The export out can't be written: .*No space left on device") as error:
        export(trained, Path("out"))
    assert "\n" not in str(error.value)
    assert [path.name for path in Path().iterdir()] == ["runs"]


def test_a_run_folder_in_use_is_refused_and_free_again_afterwards(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with held(run, 1), pytest.raises(ConfigError, match=rf"still going on \(process {os.getpid()}\)"), held(run, 1):
        pass
    with held(run, 1):
        pass


def test_a_folder_with_nothing_but_the_lock_is_new(tmp_path: Path) -> None:
    config = Config.model_validate({"rollout": {"engine": "latency"}, "run": {"dir": tmp_path / "run"}})
    with held(tmp_path / "run", 1):
        check_new(config)
