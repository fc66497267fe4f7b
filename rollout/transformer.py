"""The forward pass of Llama, Qwen2 and Qwen3, and where their Hugging Face weights go.

Query, key and value projections are one matrix, and so are gate and up; every name of a checkpoint is a view into
these, so that loading a version is a plain copy, or none at all: weights may be used where they are.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
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


@dataclass(slots=True)
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


IN_LAYER = {
    "input_norm": ("input_layernorm.weight",),
    "qkv": ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
    "qkv_bias": ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"),
    "q_norm": ("self_attn.q_norm.weight",),
    "k_norm": ("self_attn.k_norm.weight",),
    "output": ("self_attn.o_proj.weight",),
    "output_bias": ("self_attn.o_proj.bias",),
    "mlp_norm": ("post_attention_layernorm.weight",),
    "gate_up": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "down": ("mlp.down_proj.weight",),
}
"""Field of a layer → names of what it holds, within the layer."""

InPlace = Callable[[Sequence[str]], Tensor | None]


class Transformer:
    """Weights and forward pass. Weights are undefined until `load_folder` or `check` and `load` have set them."""

    def __init__(self, arch: Architecture, dtype: torch.dtype, device: torch.device) -> None:
        self.arch = arch
        self.dtype = dtype
        self.device = device
        self.embedding = self._empty(arch.vocabulary, arch.hidden)
        self.norm = self._empty(arch.hidden)
        self.lm_head = self.embedding if arch.tied else self._empty(arch.vocabulary, arch.hidden)
        self.layers = [self._new_layer() for _ in range(arch.layers)]
        self.parameters = self._named_views()
        self._own = {names: getattr(holder, field) for holder, field, names in self._places()}
        """Memory of the model's own, by what is in it; not of weights that are used in place."""
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

    def load(self, tensors: Mapping[str, Tensor], in_place: InPlace | None = None) -> None:
        """Take checked tensors, of any floating-point format, as the weights: copied, or where they are.

        Args:
            tensors: by name.
            in_place: gives what is under these names as one flat tensor, if it is one piece of memory; that memory is
                used until the next call. None copies everything.
        """
        for holder, field, names in self._places():
            flat = in_place(names) if in_place is not None else None
            if flat is not None and (flat.dtype, flat.device) == (self.dtype, self.device):
                self._own.pop(names, None)
                setattr(holder, field, flat.view(getattr(holder, field).shape))
            else:
                own = self._own.get(names)
                if own is None:
                    own = self._own[names] = torch.empty_like(getattr(holder, field))
                for name, view in zip(names, torch.split(own, [len(tensors[name]) for name in names]), strict=True):
                    view.copy_(tensors[name])
                setattr(holder, field, own)
        if self.arch.tied:
            self.lm_head = self.embedding
        self.parameters = self._named_views()

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
                    if name in self.parameters:  # a tied output layer is not
                        self.parameters[name].copy_(tensors.get_tensor(name))

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
        arch = self.arch
        heads = [arch.heads * arch.head_dim] + [arch.kv_heads * arch.head_dim] * 2
        rows = {"qkv": heads, "qkv_bias": heads, "gate_up": [arch.intermediate] * 2}
        views: dict[str, Tensor] = {}
        for holder, field, names in self._places():
            whole: Tensor = getattr(holder, field)
            views |= zip(names, torch.split(whole, rows.get(field, [len(whole)])), strict=True)
        return views

    def _places(self) -> Iterable[tuple[object, str, tuple[str, ...]]]:
        """(object, attribute, names in the checkpoint of what it holds, one behind the other), of all weights."""
        yield self, "embedding", ("model.embed_tokens.weight",)
        yield self, "norm", ("model.norm.weight",)
        if not self.arch.tied:
            yield self, "lm_head", (LM_HEAD,)
        for index, layer in enumerate(self.layers):
            for field, names in IN_LAYER.items():
                if getattr(layer, field) is not None:
                    yield layer, field, tuple(f"model.layers.{index}.{name}" for name in names)


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
