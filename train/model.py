"""The model that is trained: a Hugging Face decoder, packed attention and a chunked head, sharded over the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

from headrace.comm.errors import DataError
from headrace.train.attention import PACKED_ATTENTION, SequenceGroup
from headrace.train.logprobs import chunked_logprobs

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""`model_type`s whose head is a plain linear layer over `model`'s last hidden states."""

GATHERED_LIMIT_BYTES = 2 << 30
"""Up to this size a sharded model stays gathered from the first forward pass of a step to its last backward pass, which
saves most of the gathering; a larger one is gathered layer by layer for each pass."""


def load_model(folder: Path, activation_checkpointing: bool) -> Any:
    """The causal LM of a Hugging Face folder in float32; raises DataError if the folder can't be used."""
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        if config.model_type not in FAMILIES:
            raise DataError(
                f"The model in {folder} is of type {config.model_type!r}, which the torch engine can't train; it knows "
                f"{', '.join(FAMILIES)}. Choose a model of one of these families for model.path."
            )
        model = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=torch.float32, attn_implementation=PACKED_ATTENTION, local_files_only=True
        )
    except (OSError, ValueError) as error:
        raise DataError(
            f"The model folder {folder} can't be loaded ({str(error).splitlines()[0]}). Give model.path a Hugging Face "
            "folder with config.json and *.safetensors."
        ) from error
    if activation_checkpointing:
        _checkpoint_activations(model)
    return model.train()


def _checkpoint_activations(model: Any) -> None:
    """Under the name that this version of transformers has for it; the older one warns in newer versions."""
    options = {"use_reentrant": False}
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(options)
    else:
        model.gradient_checkpointing_enable(options)


class PolicyModel(nn.Module):
    """Packed tokens → log-probs at chosen rows."""

    def __init__(self, causal_lm: Any, temperature: float) -> None:
        super().__init__()
        self.causal_lm = causal_lm
        self.temperature = temperature
        self.stays_gathered = True

    def forward(
        self, tokens: Tensor, positions: Tensor, rows: Tensor, groups: Sequence[SequenceGroup]
    ) -> tuple[Tensor, Tensor]:
        """`tokens`, `positions` int64 [N]; `rows` int64 [M]: the tokens whose log-prob is wanted, none the first of its
        sequence → log-probs with gradient and entropies without, float32 [M] each."""
        decoded = self.causal_lm.model(
            input_ids=tokens[None], position_ids=positions[None], use_cache=False, packed_groups=groups
        )
        hidden = decoded.last_hidden_state[0].index_select(0, rows - 1)
        return chunked_logprobs(hidden, self.causal_lm.lm_head.weight, tokens[rows], self.temperature)


def shard(policy: PolicyModel, group: dist.ProcessGroup, device: torch.device, compute_dtype: torch.dtype) -> None:
    """FSDP2 in place: one unit per decoder layer, one for the rest; compute in `compute_dtype`, reduce in float32."""
    elements = sum(parameter.numel() for parameter in policy.parameters())
    policy.stays_gathered = elements * compute_dtype.itemsize <= GATHERED_LIMIT_BYTES
    regather = not policy.stays_gathered
    mesh = DeviceMesh.from_group(group, device.type)
    precision = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    for layer in policy.causal_lm.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision, reshard_after_forward=regather)
    fully_shard(policy, mesh=mesh, mp_policy=precision, reshard_after_forward=False)


def prepare_round(policy: PolicyModel, last: bool) -> None:
    """Before each micro-batch of a step: gradients are reduced, and gathered weights freed, after the last one only."""
    if isinstance(policy, FSDPModule):
        policy.set_requires_gradient_sync(last)
        policy.set_reshard_after_backward(last or not policy.stays_gathered)


def fsdp_units(policy: PolicyModel) -> list[FSDPModule]:
    """The sharded modules, outermost first; none on a single rank."""
    return [module for module in policy.modules() if isinstance(module, FSDPModule)]
