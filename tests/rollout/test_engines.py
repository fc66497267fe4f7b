"""From the config to an engine, and what is refused on the way."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from headrace.comm.errors import ConfigError, DataError
from headrace.rollout.config import RolloutConfig
from headrace.rollout.engine import Engine
from headrace.rollout.engines import make_engine

from .engine_tools import folder_weights, request, run


def torch_engine(folder: Path | None, **settings: object) -> Engine:
    return make_engine(RolloutConfig.model_validate(settings), folder, "float32", "cpu", 0, False, 40)


def altered(folder: Path, target: Path, **changes: object) -> Path:
    """A copy of the model folder with another config."""
    config = json.loads((folder / "config.json").read_text()) | changes
    target.mkdir(exist_ok=True)
    (target / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    save_file(load_file(folder / "model.safetensors"), target / "model.safetensors")
    return target


def test_the_torch_engine_is_made_by_its_config(llama_folder: Path) -> None:
    engine = torch_engine(llama_folder, slots=2)
    assert engine.capacity().slots == 2
    engine.add(request(0, np.arange(4, dtype=np.int32)))
    assert len(run(engine)[0].tokens) == 12
    with pytest.raises(DataError, match="context of 40"):
        engine.add(request(1, np.zeros(30, np.int32)))


def test_kv_of_the_config_reaches_the_engine(llama_folder: Path, other_llama_folder: Path) -> None:
    logprobs = {}
    for kv in ("keep", "recompute"):
        engine = torch_engine(llama_folder, kv=kv)
        engine.add(request(0, np.arange(9, dtype=np.int32)))
        engine.step()
        engine.load_weights(1, folder_weights(other_llama_folder))
        logprobs[kv] = engine.step()[0].logprobs
    assert logprobs["keep"] != logprobs["recompute"]


def test_the_torch_engine_without_a_model_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.path"):
        torch_engine(None)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "gpt2"}, ["gpt2", "llama, qwen2, qwen3"]),
        ({"mlp_bias": True}, ["mlp_bias", "llama, qwen2, qwen3"]),
        ({"hidden_act": "gelu"}, ["hidden_act 'gelu'"]),
        ({"use_sliding_window": True}, ["use_sliding_window"]),
        ({"quantization_config": {"bits": 4}}, ["quantization_config"]),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}}, ["'yarn'", "llama3"]),
        ({"hidden_size": None}, ["lacks the key 'hidden_size'"]),
        ({"intermediate_size": 44}, ["gate_proj.weight has shape [48, 32] instead of [44, 32]"]),
        ({"num_hidden_layers": 3}, ["model.layers.2", "is missing"]),
        ({"num_hidden_layers": 1}, ["model.layers.1", "is unknown", "more"]),
    ],
)
def test_a_model_the_engine_cannot_run_is_refused_in_one_paragraph(
    llama_folder: Path, tmp_path: Path, changes: dict[str, object], words: list[str]
) -> None:
    with pytest.raises(DataError) as error:
        torch_engine(altered(llama_folder, tmp_path / "model", **changes))
    message = str(error.value)
    assert all(word in message for word in words), message
    assert "\n" not in message


def test_the_keys_of_older_configs_are_read(llama_folder: Path, tmp_path: Path) -> None:
    """transformers 4 wrote rope_theta and rope_scaling instead of rope_parameters, and left head_dim out."""
    old = altered(llama_folder, tmp_path / "old", rope_parameters=None, rope_theta=10_000.0, rope_scaling=None)
    engines = [torch_engine(llama_folder), torch_engine(old)]
    for engine in engines:
        engine.add(request(0, np.arange(9, dtype=np.int32)))
    assert run(engines[0]) == run(engines[1])


def test_a_folder_without_config_or_weights_is_refused(llama_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no config\.json"):
        torch_engine(tmp_path)
    (altered(llama_folder, tmp_path / "bare") / "model.safetensors").unlink()
    with pytest.raises(DataError, match=r"lacks model\.safetensors"):
        torch_engine(tmp_path / "bare")
