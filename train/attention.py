"""Attention over packed sequences for Hugging Face models, in torch's own kernels, on any device.

A micro-batch is one row [1, N] of sequences laid end to end. Only attention needs to know where one ends. It runs over
*groups*: neighbouring sequences of like length, padded to the longest of them inside this function alone. Padding goes
to the end of a sequence, where a causal query can't see it, so no mask over tokens is ever built.

Each group goes through torch's fused attention (SDPA). Only in bfloat16 on a CPU, where that is two to three times
slower than plain matrix products for short sequences, those take a path of their own (`_ShortAttention`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

PACKED_ATTENTION = "headrace_packed"
"""Name under which `packed_attention` is known to Hugging Face (`attn_implementation`)."""

SHORTEST_SHARE = 0.75
"""A sequence joins a group if it's at least this share of the group's longest …"""

ALWAYS_JOINED = 32
"""… or if the longest is no longer than this: then a call costs more than the padding."""


SHORT_LENGTH = 512
"""On a CPU in bfloat16, groups of at most this length use `_ShortAttention`."""

SHORT_SCORES = 1 << 19
"""Query-key pairs of a head that it holds at a time: more would leave the caches."""


@dataclass(frozen=True, slots=True)
class SequenceGroup:
    """Neighbouring sequences, attended to in one call."""

    rows: int
    """Tokens."""
    count: int
    """Sequences."""
    length: int
    """Of the longest."""
    gather: Tensor | None
    """int64 [count · length]: the row that each padded slot takes (past a sequence's end its last row, to be ignored);
    None if all sequences have one length."""
    slots: Tensor | None
    """int64 [rows]: the padded slot of each row."""


def group_sequences(lengths: Sequence[int], device: torch.device) -> list[SequenceGroup]:
    """Cut sequences of these lengths, in this order, into groups; best if sorted by length, longest first."""
    groups: list[list[int]] = []
    for length in lengths:
        if groups and _joins(length, groups[-1]):
            groups[-1].append(length)
        else:
            groups.append([length])
    return [_make_group(members, device) for members in groups]


def _joins(length: int, members: list[int]) -> bool:
    longest, shortest = max(length, *members), min(length, *members)
    return longest <= ALWAYS_JOINED or shortest >= SHORTEST_SHARE * longest


def _make_group(members: list[int], device: torch.device) -> SequenceGroup:
    count, longest = len(members), max(members)
    if min(members) == longest:
        return SequenceGroup(count * longest, count, longest, None, None)
    lengths = torch.tensor(members)
    first = torch.cumsum(lengths, 0) - lengths
    offset = torch.arange(longest)
    gather = first[:, None] + torch.minimum(offset[None, :], lengths[:, None] - 1)
    real = offset[None, :] < lengths[:, None]
    slots = real.flatten().nonzero().flatten()
    return SequenceGroup(sum(members), count, longest, gather.flatten().to(device), slots.to(device))


class _Pad(torch.autograd.Function):
    """[rows, …] → [count · length, …]. No gradient comes back from padding: its queries' outputs are dropped."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, gather: Tensor, slots: Tensor) -> Tensor:
        ctx.save_for_backward(slots)
        return rows.index_select(0, gather)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (slots,) = ctx.saved_tensors
        return grads[0].index_select(0, slots), None, None


class _Unpad(torch.autograd.Function):
    """[count · length, …] → [rows, …]."""

    @staticmethod
    def forward(ctx: Any, padded: Tensor, slots: Tensor) -> Tensor:
        ctx.save_for_backward(slots)
        ctx.padded_rows = padded.shape[0]
        return padded.index_select(0, slots)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (slots,) = ctx.saved_tensors
        padded = grads[0].new_zeros(ctx.padded_rows, *grads[0].shape[1:])
        return padded.index_copy_(0, slots, grads[0]), None


class _ShortAttention(torch.autograd.Function):
    """Causal attention by plain matrix products; the backward pass computes the scores again instead of keeping them.

    [n, heads, L, head_dim] and for keys and values [n, kv_heads, L, head_dim]; softmax in float32.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        n, heads, length, dim = query.shape
        q = query.reshape(n * key.shape[1], -1, dim)  # the heads that share keys lie side by side
        k, v = (rows.reshape(-1, length, dim) for rows in (key, value))
        ctx.save_for_backward(q, k, v)
        ctx.scaling = scaling
        out = torch.empty_like(q)
        for part in _parts(q, length):
            torch.bmm(_probabilities(q[part], k[part], scaling).to(q.dtype), v[part], out=out[part])
        return out.view(n, heads, length, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v = ctx.saved_tensors
        n, _, length, dim = grads[0].shape
        grad_out = grads[0].reshape(q.shape)
        grad_q, grad_k, grad_v = (torch.empty_like(rows) for rows in (q, k, v))
        for part in _parts(q, length):
            probabilities = _probabilities(q[part], k[part], ctx.scaling)
            torch.bmm(probabilities.to(q.dtype).transpose(1, 2), grad_out[part], out=grad_v[part])
            grad_probabilities = torch.bmm(grad_out[part], v[part].transpose(1, 2)).float()
            grad_scores = torch._softmax_backward_data(grad_probabilities, probabilities, -1, torch.float32)
            grad_scores = grad_scores.mul_(ctx.scaling).to(q.dtype)
            torch.bmm(grad_scores, k[part], out=grad_q[part])
            torch.bmm(grad_scores.transpose(1, 2), q[part], out=grad_k[part])
        query_grad, key_grad, value_grad = (rows.view(n, -1, length, dim) for rows in (grad_q, grad_k, grad_v))
        return query_grad, key_grad, value_grad, None


def _parts(q: Tensor, length: int) -> list[slice]:
    step = max(1, SHORT_SCORES // (q.shape[1] * length))
    return [slice(start, start + step) for start in range(0, q.shape[0], step)]


def _probabilities(q: Tensor, k: Tensor, scaling: float) -> Tensor:
    """float32 [m, share · L, L] of [m, share · L, head_dim] and [m, L, head_dim]."""
    length = k.shape[1]
    scores = torch.bmm(q, k.transpose(1, 2)).float().view(q.shape[0], -1, length, length)
    later = torch.full((length, length), -torch.inf).triu_(1)
    return torch.add(later, scores, alpha=scaling).softmax(-1).view(q.shape[0], -1, length)


def _causal_attention(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    if query.device.type == "cpu" and query.dtype == torch.bfloat16 and query.shape[2] <= SHORT_LENGTH:
        return _ShortAttention.apply(query, key, value, scaling)  # type: ignore[no-untyped-call, no-any-return]
    grouped = query.shape[1] != key.shape[1]
    return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=grouped)


def _attend(group: SequenceGroup, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """[rows, heads, head_dim] of each, with fewer heads for keys and values allowed → [rows, heads, head_dim]."""

    def lay_out(rows: Tensor) -> Tensor:
        if group.gather is not None:
            rows = _Pad.apply(rows, group.gather, group.slots)  # type: ignore[no-untyped-call]
        return rows.view(group.count, group.length, *rows.shape[1:]).transpose(1, 2)

    q, k, v = lay_out(query), lay_out(key), lay_out(value)
    rows = _causal_attention(q, k, v, scaling).transpose(1, 2).reshape(group.count * group.length, *query.shape[1:])
    if group.slots is not None:
        rows = _Unpad.apply(rows, group.slots)  # type: ignore[no-untyped-call]
    return rows


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    packed_groups: Sequence[SequenceGroup],
    sliding_window: int | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Attention function for Hugging Face models: [1, heads, N, head_dim] → [1, N, heads, head_dim].

    `packed_groups` comes from the caller of the model. Dropout is left out on purpose: it would make the trainer's
    log-probs differ from the generators'. Raises ValueError for a sequence longer than the model's sliding window.
    """
    if sliding_window is not None and max(group.length for group in packed_groups) > sliding_window:
        raise ValueError(f"a sequence is longer than the model's sliding window of {sliding_window} tokens")
    sizes = [group.rows for group in packed_groups]
    columns = [torch.split(rows[0].transpose(0, 1).contiguous(), sizes) for rows in (query, key, value)]
    parts = [_attend(group, q, k, v, scaling) for group, q, k, v in zip(packed_groups, *columns, strict=True)]
    return torch.cat(parts).unsqueeze(0), None


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
