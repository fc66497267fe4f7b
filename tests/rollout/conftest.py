"""Tiny random models of every family, as Hugging Face folders, for the tests of the inference engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

VOCABULARY = 97
CONTEXT = 64


def make_folder(folder: Path, family: str, tied: bool = False, seed: int = 0, **changes: Any) -> Path:
    """Write a tiny random model; weights are large enough that its predictions are sharp and differ by position."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        family,
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=tied,
        **changes,
    )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3 + (parameter.ndim == 1))
    model.save_pretrained(folder)
    return folder


@pytest.fixture(
    scope="session",
    params=["llama", "llama-tied", "llama3-rope", "llama-bias", "qwen2", "qwen2-tied", "qwen3", "qwen3-tied"],
)
def any_model_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, _, variant = request.param.partition("-")
    changes: dict[str, Any] = {}
    if variant == "rope":
        family = "llama"
        changes["rope_parameters"] = {
            "rope_type": "llama3",
            "rope_theta": 500.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    if variant == "bias":
        changes["attention_bias"] = True
    return make_folder(tmp_path_factory.mktemp(request.param), family, tied=variant == "tied", **changes)


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="session")
def other_llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with other weights: a later version."""
    return make_folder(tmp_path_factory.mktemp("other"), "llama", seed=1)
