"""Keys and values of the running sequences, one slot each, and the attention over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from headrace.rollout.architecture import Architecture

LENGTH_STEP = 16
"""Attention spans and the cache's length are rounded up to a multiple of this."""


def rounded(length: int) -> int:
    return -(-length // LENGTH_STEP) * LENGTH_STEP


class KVCache:
    """[layers, slots, 2 * kv_heads, length, head_dim], keys above values; it grows in length as sequences need it."""

    def __init__(self, arch: Architecture, slots: int, dtype: torch.dtype, device: torch.device) -> None:
        self.arch = arch
        # Zeros, because masked positions are multiplied by 0, and garbage might be NaN.
        self.data = torch.zeros((arch.layers, slots, 2 * arch.kv_heads, 0, arch.head_dim), dtype=dtype, device=device)

    def reserve(self, length: int) -> None:
        """Make room for sequences of `length` tokens; what is cached stays."""
        old = self.data.shape[3]
        if length > old:
            # Doubling keeps the number of copies small when ever longer sequences arrive.
            extent = rounded(min(max(length, 2 * old), max(length, self.arch.context)))
            grown = self.data.new_zeros((*self.data.shape[:3], extent, self.arch.head_dim))
            grown[:, :, :, :old] = self.data
            self.data = grown

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of one slot to another."""
        self.data[:, target, :, :length] = self.data[:, source, :, :length]


@dataclass(frozen=True, slots=True)
class Prompt:
    """Tokens `start` to `stop` of the packed tokens: a sequence from its beginning, to be cached in `slots`."""

    start: int
    stop: int
    slots: Tensor
    """[m] int64: several where samples share the prompt."""


class CachedAttention:
    """The attention of one forward pass whose packed tokens are one next token for each of the slots 0 to n - 1, and
    then whole prompts. It writes the keys and values it is given into the cache."""

    def __init__(self, cache: KVCache, positions: Tensor, span: int, prompts: Sequence[Prompt]) -> None:
        """`positions` [n] int64 are those of the next tokens; `span` is larger than any of them."""
        self.cache = cache
        self.positions = positions
        self.span = span
        self.prompts = prompts
        self.rows = torch.arange(len(positions), device=positions.device)
        seen = torch.arange(span, device=positions.device) <= positions[:, None]
        mask = torch.zeros(seen.shape, dtype=cache.data.dtype, device=positions.device)
        self.mask = mask.masked_fill_(~seen, float("-inf"))[:, None, None]

    def __call__(self, layer: int, query: Tensor, kv: Tensor) -> Tensor:
        parts = [self._prompt(layer, prompt, query, kv) for prompt in self.prompts]
        if count := len(self.positions):
            parts.insert(0, self._next_tokens(layer, query[:count], kv[:count]))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _next_tokens(self, layer: int, query: Tensor, kv: Tensor) -> Tensor:
        """One token per slot against the slot's cache. The query heads that share a key/value head take the place of
        query positions, so grouped-query attention copies nothing."""
        arch, cached = self.cache.arch, self.cache.data[layer]
        cached[self.rows, :, self.positions] = kv
        seen = cached[: len(self.rows), :, : self.span]
        grouped = query.reshape(-1, arch.kv_heads, arch.query_groups, arch.head_dim)
        keys, values = seen.chunk(2, 1)
        return scaled_dot_product_attention(grouped, keys, values, attn_mask=self.mask).flatten(1, 2)

    def _prompt(self, layer: int, prompt: Prompt, query: Tensor, kv: Tensor) -> Tensor:
        """Causal attention within one prompt. The heads of a group see one key/value head through a stride of 0."""
        arch, part = self.cache.arch, slice(prompt.start, prompt.stop)
        by_head = kv[part].transpose(0, 1)
        self.cache.data[layer][prompt.slots, :, : prompt.stop - prompt.start] = by_head
        grouped = query[part].reshape(-1, arch.kv_heads, arch.query_groups, arch.head_dim).permute(1, 2, 0, 3)
        keys, values = by_head[:, None].expand(-1, arch.query_groups, -1, -1).chunk(2, 0)
        out = scaled_dot_product_attention(grouped, keys, values, is_causal=True)
        return out.permute(2, 0, 1, 3).flatten(1, 2)
