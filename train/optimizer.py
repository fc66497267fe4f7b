"""AdamW on fp32 master weights: the course of the learning rate, clipping, and which weights decay."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from headrace.train.collectives import Peers
from headrace.train.config import TrainConfig


def learning_rate(config: TrainConfig, step: int, total_steps: int) -> float:
    """Learning rate of optimizer step `step` (0, 1, …, total_steps - 1).

    Warm-up: lr · (step + 1) / warmup_steps, so that no step is wasted at 0. After it, with p running from 0 to 1 at the
    last step: constant lr, or lr · (floor + (1 - floor) · f) with f = 1 - p (`linear`), (1 + cos πp) / 2 (`cosine`).
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    span = max(1, total_steps - 1 - config.warmup_steps)
    progress = min(1.0, (step - config.warmup_steps) / span)
    fall = 1 - progress if config.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return config.lr * (config.lr_floor + (1 - config.lr_floor) * fall)


def make_adamw(config: TrainConfig, decayed: list[Tensor], undecayed: list[Tensor]) -> torch.optim.AdamW:
    """`weight_decay` applies to `decayed` only: matrices, embeddings included; not to norms, biases and other vectors.
    The update is elementwise, so shards of a tensor are updated like the whole."""
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": undecayed, "weight_decay": 0.0},
    ]
    betas = (config.betas[0], config.betas[1])
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=config.lr, betas=betas, eps=config.eps, fused=True
    )


def global_norm(gradients: Iterable[Tensor], peers: Peers) -> float:
    """L2 norm over all gradients of all ranks (each holds its own shards), summed in float64 in a fixed order."""
    squares = [float(torch.linalg.vector_norm(gradient)) ** 2 for gradient in gradients if gradient.numel()]
    return math.sqrt(peers.sum(math.fsum(squares)))


def clip(gradients: Sequence[Tensor], norm: float, limit: float) -> None:
    """Scale by limit / (norm + 1e-6) if the norm is above it, as `torch.nn.utils.clip_grad_norm_`; 0 is no limit."""
    if limit > 0 and norm > limit:
        torch._foreach_mul_(list(gradients), limit / (norm + 1e-6))
