"""What `config.json` of a Hugging Face folder says about a model of the Llama and Qwen families."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.comm.errors import DataError

Frequencies = npt.NDArray[np.float64]

FAMILIES = ("llama", "qwen2", "qwen3")


@dataclass(frozen=True, slots=True)
class Architecture:
    """A decoder with grouped-query attention, rotary positions, RMS norms and a SiLU-gated feed-forward block."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    context: int
    """Longest sequence, in tokens."""
    norm_eps: float
    tied: bool
    """The output layer is the input embedding."""
    qkv_bias: bool
    output_bias: bool
    qk_norm: bool
    """RMS norm of every head's query and key, before the rotation."""
    frequencies: tuple[float, ...]
    """[head_dim / 2] rotary frequencies, in radians per token."""

    @property
    def query_groups(self) -> int:
        """Query heads per key/value head."""
        return self.heads // self.kv_heads

    @property
    def attention_length(self) -> int:
        """Length of a sequence, in tokens, whose attention takes as many floating-point operations as its products with
        the weights of the layers: n² · heads · head_dim · layers against n · weights, causal."""
        attention = self.heads * self.head_dim
        weights = self.hidden * (2 * attention + 2 * self.kv_heads * self.head_dim + 3 * self.intermediate)
        return weights // attention


def read_architecture(folder: Path) -> Architecture:
    """Read the folder's config.json.

    Raises:
        DataError: there is none, or the model is of a kind that the engine doesn't know.
    """
    file = folder / "config.json"
    if not file.is_file():
        raise DataError(
            f"{folder} isn't a Hugging Face model folder: it has no config.json. Give model.path a folder with "
            "config.json, the weights as *.safetensors and the tokenizer's files."
        )
    return parse_architecture(json.loads(file.read_text()), file)


def parse_architecture(config: dict[str, Any], file: Path) -> Architecture:
    """The same from the parsed config; `file` is for the messages."""
    _refuse_unknown(config, file)
    family = config["model_type"]
    try:
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        attention_bias = bool(config.get("attention_bias", False))
        head_dim = config.get("head_dim") or hidden // heads
        return Architecture(
            layers=config["num_hidden_layers"],
            hidden=hidden,
            intermediate=config["intermediate_size"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=head_dim,
            vocabulary=config["vocab_size"],
            context=config["max_position_embeddings"],
            norm_eps=config.get("rms_norm_eps", 1e-6),
            tied=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=family == "qwen2" or attention_bias,
            output_bias=family != "qwen2" and attention_bias,
            qk_norm=family == "qwen3",
            frequencies=tuple(_frequencies(config, head_dim, file).tolist()),
        )
    except KeyError as error:
        raise DataError(f"{file} lacks the key {error.args[0]!r}, which a {family} model must have.") from None


def _refuse_unknown(config: dict[str, Any], file: Path) -> None:
    """Raise for everything that the forward pass would get wrong."""
    family = config.get("model_type")
    problems = {
        f"model_type {family!r}": family not in FAMILIES,
        f"hidden_act {config.get('hidden_act')!r}": config.get("hidden_act", "silu") != "silu",
        "mlp_bias": bool(config.get("mlp_bias", False)),
        "use_sliding_window": bool(config.get("use_sliding_window", False)),
        "quantization_config": config.get("quantization_config") is not None,
    }
    found = [name for name, present in problems.items() if present]
    if found:
        raise DataError(
            f"The torch engine can't run this model: {file} has {', '.join(found)}. Supported are unquantised "
            f"models of the families {', '.join(FAMILIES)}, with SiLU, full attention and no bias in the MLP."
        )


def _frequencies(config: dict[str, Any], head_dim: int, file: Path) -> Frequencies:
    """[head_dim / 2] rotary frequencies; both the older keys and `rope_parameters` of transformers 5 are read."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = rope.get("rope_theta") or config.get("rope_theta") or 10_000.0
    plain: Frequencies = theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return plain
    if kind == "llama3":
        return _llama3(plain, rope)
    raise DataError(
        f"{file}: rotary scaling of type {kind!r} isn't supported by the torch engine; default and llama3 are."
    )


def _llama3(plain: Frequencies, rope: dict[str, Any]) -> Frequencies:
    """Llama 3.1's stretching of long wavelengths (transformers, `_compute_llama3_parameters`): wavelengths above
    original / low_freq_factor are stretched by `factor`, those below original / high_freq_factor stay, with a linear
    blend between."""
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = rope["original_max_position_embeddings"] * plain / (2 * math.pi)
    blend = np.clip((turns - low) / (high - low), 0.0, 1.0)
    stretched: Frequencies = (1 - blend) * plain / rope["factor"] + blend * plain
    return stretched
