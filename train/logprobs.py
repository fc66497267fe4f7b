"""Log-probabilities and entropy over a large vocabulary without ever holding all logits.

The vocabulary is walked in chunks. The forward pass keeps a running maximum, sum and first moment of the exponentials
(the online softmax of Milakov & Gimelshein 2018); the backward pass computes each chunk's logits again and finishes its
rows of the weight gradient at once, so nothing is summed over chunks in low precision.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

CHUNK_ELEMENTS = {"cpu": 1 << 22}
"""Logits held at a time, by device type: a CPU is fastest while they stay in its caches."""
CHUNK_ELEMENTS_ACCELERATOR = 1 << 26


def chunked_logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """log softmax(hidden · weightᵀ / temperature) at `targets`, and the entropy of the whole distribution.

    `hidden` [M, d] and `weight` [V, d] in the compute dtype, `targets` int64 [M] → two float32 [M], in nats.
    Matrix products run in the compute dtype, everything after them in float32. Only the log-probs have a gradient.
    """
    logprobs, entropy = _ChunkedLogprobs.apply(hidden, weight, targets, temperature)  # type: ignore[no-untyped-call]
    return logprobs, entropy


def _chunks(rows: int, weight: Tensor) -> Iterator[slice]:
    elements = CHUNK_ELEMENTS.get(weight.device.type, CHUNK_ELEMENTS_ACCELERATOR)
    width = max(64, elements // max(rows, 1))
    for start in range(0, weight.shape[0], width):
        yield slice(start, min(start + width, weight.shape[0]))


def _logits(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    """float32 [M, chunk], free to be changed in place."""
    logits = (hidden @ weight.T).float()
    return logits if temperature == 1 else logits.div_(temperature)


def _pick(chunk: slice, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Rows whose target lies in the chunk, and where in the chunk."""
    rows = ((targets >= chunk.start) & (targets < chunk.stop)).nonzero().flatten()
    return rows, targets[rows] - chunk.start


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        rows = hidden.shape[0]
        highest = hidden.new_full((rows,), -torch.inf, dtype=torch.float32)
        total, moment, target_logits = (hidden.new_zeros(rows, dtype=torch.float32) for _ in range(3))
        for chunk in _chunks(rows, weight):
            logits = _logits(hidden, weight[chunk], temperature)
            picked, columns = _pick(chunk, targets)
            target_logits[picked] = logits[picked, columns]
            higher = torch.maximum(highest, logits.amax(1))
            rescale = (highest - higher).exp_()
            exponentials = (logits - higher[:, None]).exp_()
            total = total * rescale + exponentials.sum(1)
            moment = moment * rescale + exponentials.mul_(logits).sum(1)
            highest = higher
        normalizer = highest + total.log()
        entropy = normalizer - moment / total
        ctx.save_for_backward(hidden, weight, targets, normalizer)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(entropy)
        return target_logits - normalizer, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """d logprob / d logits = (onehot − softmax) / temperature."""
        hidden, weight, targets, normalizer = ctx.saved_tensors
        scale = grads[0].float() / ctx.temperature
        grad_hidden = torch.zeros_like(hidden, dtype=torch.float32)
        grad_weight = torch.empty_like(weight)
        for chunk in _chunks(hidden.shape[0], weight):
            logits = _logits(hidden, weight[chunk], ctx.temperature)
            grad_logits = logits.sub_(normalizer[:, None]).exp_().mul_(-scale[:, None])
            picked, columns = _pick(chunk, targets)
            grad_logits[picked, columns] += scale[picked]
            low = grad_logits.to(hidden.dtype)
            grad_weight[chunk] = low.T @ hidden
            grad_hidden += low @ weight[chunk]
        return grad_hidden.to(hidden.dtype), grad_weight, None, None
