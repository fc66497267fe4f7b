"""The engine that the config names."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from headrace.comm.errors import ConfigError
from headrace.rollout.config import RolloutConfig
from headrace.rollout.engine import Engine
from headrace.rollout.latency_engine import LatencyEngine

if TYPE_CHECKING:
    import torch


def make_engine(
    config: RolloutConfig,
    model_folder: Path | None,
    dtype: str,
    device: torch.device | str,
    seed: int,
    deterministic: bool,
    max_context: int | None,
) -> Engine:
    """Make the engine of `rollout.engine`. torch is imported only for the engine that needs it.

    Args:
        model_folder: Hugging Face folder; the latency engine needs none.
        dtype: `float32` or `bfloat16`, of the torch engine's weights and cache.
        seed: of the latency engine's random delays; what is sampled depends on the requests' keys only.
        deterministic: results don't depend on batch company, order of arrival or instance (torch engine).
        max_context: longest prompt plus response, in tokens, if shorter than the model's own limit.

    Raises:
        ConfigError: the torch engine has no model folder.
        DataError: the model folder can't be used.
    """
    if config.engine == "latency":
        return LatencyEngine(config.latency, config.slots, seed)
    if model_folder is None:
        raise ConfigError("rollout.engine: torch needs a model; set model.path or model.tiny.")
    import torch

    from headrace.rollout.torch_engine import load_torch_engine

    return load_torch_engine(
        model_folder,
        dtype,
        torch.device(device),
        config.slots,
        config.kv,
        deterministic,
        config.group_size,
        max_context,
    )
