"""The forward pass of Llama, Qwen2 and Qwen3, and where their Hugging Face weights go.

Query, key and value projections are one matrix, and so are gate and up; every name of a checkpoint is a view into
these, so that loading a version is a plain copy, in place.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn.functional import embedding, linear, rms_norm, silu

from headrace.comm.errors import DataError
from headrace.rollout.architecture import Architecture

LM_HEAD = "lm_head.weight"


class Attention(Protocol):
    """Attention of the tokens of one forward pass, each to what its sequence holds so far."""

    def __call__(self, layer: int, query: Tensor, kv: Tensor) -> Tensor:
        """[T, heads, head_dim] from queries of that shape and keys above values [T, 2 * kv_heads, head_dim]."""
        ...


@dataclass(frozen=True, slots=True)
class Layer:
    """The weights of one decoder layer, [out, in] each."""

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Tensor
    output_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


class Transformer:
    """Weights and forward pass. Weights are undefined until `load_folder` or `check` and `copy` have filled them."""

    def __init__(self, arch: Architecture, dtype: torch.dtype, device: torch.device) -> None:
        self.arch = arch
        self.dtype = dtype
        self.device = device
        self.embedding = self._empty(arch.vocabulary, arch.hidden)
        self.norm = self._empty(arch.hidden)
        self.lm_head = self.embedding if arch.tied else self._empty(arch.vocabulary, arch.hidden)
        self.layers = [self._new_layer() for _ in range(arch.layers)]
        self.parameters = self._named_views()
        self._cos, self._sin = self._rotary_tables()

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attention) -> Tensor:
        """Last hidden states [T, hidden], before the final norm, of packed tokens [T] at positions [T]."""
        cos, sin = self._cos[positions], self._sin[positions]
        hidden = embedding(tokens, self.embedding)
        for index, layer in enumerate(self.layers):
            query, kv = self._project(layer, self._rms_norm(hidden, layer.input_norm), cos, sin)
            attended = attend(index, query, kv).flatten(1)
            hidden = hidden + linear(attended, layer.output, layer.output_bias)
            gate, up = linear(self._rms_norm(hidden, layer.mlp_norm), layer.gate_up).chunk(2, -1)
            hidden = hidden + linear(silu(gate).mul_(up), layer.down)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, vocabulary] float32 from last hidden states [n, hidden]."""
        return linear(self._rms_norm(hidden, self.norm), self.lm_head).float()

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise `DataError` unless these are just the names and shapes of this model. A tied output layer may be
        among them or not."""
        expected = {name: tuple(view.shape) for name, view in self.parameters.items()}
        if self.arch.tied and LM_HEAD in shapes:
            expected[LM_HEAD] = tuple(self.embedding.shape)
        missing = [f"{name} is missing" for name in expected if name not in shapes]
        unknown = [f"{name} is unknown" for name in shapes if name not in expected]
        wrong = [
            f"{name} has shape {list(shapes[name])} instead of {list(shape)}"
            for name, shape in expected.items()
            if name in shapes and tuple(shapes[name]) != shape
        ]
        if problems := missing + unknown + wrong:
            more = f", and {len(problems) - 5} more" if len(problems) > 5 else ""
            raise DataError(f"These weights don't fit the model of the engine: {'; '.join(problems[:5])}{more}.")

    def copy(self, name: str, tensor: Tensor) -> None:
        """Copy one checked tensor, of any floating-point format, into its place."""
        if name in self.parameters:  # a tied output layer is not
            self.parameters[name].copy_(tensor)

    def load_folder(self, folder: Path) -> None:
        """Fill all weights from the safetensors files of a Hugging Face folder.

        Raises:
            DataError: there are none, or their names or shapes don't fit.
        """
        shapes: dict[str, tuple[int, ...]] = {}
        for file in _weight_files(folder):
            with safe_open(file, framework="pt") as tensors:
                shapes |= {name: tuple(tensors.get_slice(name).get_shape()) for name in _weight_names(tensors.keys())}
        self.check(shapes)
        for file in _weight_files(folder):
            with safe_open(file, framework="pt") as tensors:
                for name in _weight_names(tensors.keys()):
                    self.copy(name, tensors.get_tensor(name))

    def _project(self, layer: Layer, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated queries [T, heads, head_dim], and rotated keys above values [T, 2 * kv_heads, head_dim]."""
        heads, kv_heads = self.arch.heads, self.arch.kv_heads
        qkv = linear(hidden, layer.qkv, layer.qkv_bias).view(-1, heads + 2 * kv_heads, self.arch.head_dim)
        rotated = qkv[:, : heads + kv_heads]
        if layer.q_norm is not None and layer.k_norm is not None:
            rotated[:, :heads] = self._rms_norm(rotated[:, :heads], layer.q_norm)
            rotated[:, heads:] = self._rms_norm(rotated[:, heads:], layer.k_norm)
        halves_swapped = rotated.roll(self.arch.head_dim // 2, -1)
        rotated.mul_(cos).addcmul_(halves_swapped, sin)
        return qkv[:, :heads], qkv[:, heads:]

    def _rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight.shape, weight, self.arch.norm_eps)

    def _rotary_tables(self) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines [context, 1, head_dim] such that x * cos + swapped(x) * sin rotates x."""
        frequencies = torch.tensor(self.arch.frequencies, dtype=torch.float32)
        angles = torch.arange(self.arch.context, dtype=torch.float32)[:, None] * frequencies
        cos, sin = angles.cos(), angles.sin()
        tables = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        first, second = (table[:, None].to(self.device, self.dtype) for table in tables)
        return first, second

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def _new_layer(self) -> Layer:
        arch, empty = self.arch, self._empty
        rows = (arch.heads + 2 * arch.kv_heads) * arch.head_dim
        return Layer(
            input_norm=empty(arch.hidden),
            qkv=empty(rows, arch.hidden),
            qkv_bias=empty(rows) if arch.qkv_bias else None,
            q_norm=empty(arch.head_dim) if arch.qk_norm else None,
            k_norm=empty(arch.head_dim) if arch.qk_norm else None,
            output=empty(arch.hidden, arch.heads * arch.head_dim),
            output_bias=empty(arch.hidden) if arch.output_bias else None,
            mlp_norm=empty(arch.hidden),
            gate_up=empty(2 * arch.intermediate, arch.hidden),
            down=empty(arch.hidden, arch.intermediate),
        )

    def _named_views(self) -> dict[str, Tensor]:
        """Every tensor of the checkpoint, by its Hugging Face name, as a view into the weights."""
        views = {"model.embed_tokens.weight": self.embedding, "model.norm.weight": self.norm}
        if not self.arch.tied:
            views[LM_HEAD] = self.lm_head
        for index, layer in enumerate(self.layers):
            views |= {f"model.layers.{index}.{name}": view for name, view in self._layer_views(layer)}
        return views

    def _layer_views(self, layer: Layer) -> Iterable[tuple[str, Tensor]]:
        arch = self.arch
        widths = [arch.heads * arch.head_dim] + [arch.kv_heads * arch.head_dim] * 2
        for suffix, fused in (("weight", layer.qkv), ("bias", layer.qkv_bias)):
            if fused is not None:
                for name, view in zip("qkv", torch.split(fused, widths), strict=True):
                    yield f"self_attn.{name}_proj.{suffix}", view
        gate, up = layer.gate_up.chunk(2)
        others = {
            "input_layernorm.weight": layer.input_norm,
            "self_attn.q_norm.weight": layer.q_norm,
            "self_attn.k_norm.weight": layer.k_norm,
            "self_attn.o_proj.weight": layer.output,
            "self_attn.o_proj.bias": layer.output_bias,
            "post_attention_layernorm.weight": layer.mlp_norm,
            "mlp.gate_proj.weight": gate,
            "mlp.up_proj.weight": up,
            "mlp.down_proj.weight": layer.down,
        }
        yield from ((name, view) for name, view in others.items() if view is not None)


def _weight_names(names: Iterable[str]) -> list[str]:
    """Without the rotary frequencies that old checkpoints carry; they follow from the config."""
    return [name for name in names if not name.endswith("rotary_emb.inv_freq")]


def _weight_files(folder: Path) -> list[Path]:
    """The safetensors files that make up the checkpoint: those of the index where there is one."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        files = [folder / name for name in names]
    else:
        files = [folder / "model.safetensors"]
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        raise DataError(
            f"The model folder {folder} lacks {', '.join(absent)}. Weights are read from safetensors only; a folder "
            "with other formats can be converted by from_pretrained(...).save_pretrained(...) of transformers."
        )
    return files
