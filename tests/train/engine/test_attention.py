"""Packed attention against torch's attention on one sequence at a time."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from headrace.train import attention
from headrace.train.attention import group_sequences, packed_attention

SHAPES = [[7], [9, 9, 9], [64, 60, 50, 20, 18, 5, 1], [1, 1, 1], [600, 3, 2], [40, 2, 39]]


def run(lengths: list[int], dtype: torch.dtype) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Output and gradients: packed, and of one sequence at a time."""
    torch.manual_seed(0)
    rows = sum(lengths)
    query, key, value = (torch.randn(1, heads, rows, 16).to(dtype).requires_grad_() for heads in (6, 2, 2))
    upstream = torch.randn(1, rows, 6, 16).to(dtype)
    groups = group_sequences(lengths, torch.device("cpu"))
    packed, _ = packed_attention(torch.nn.Module(), query, key, value, None, scaling=0.3, packed_groups=groups)
    parts = zip(*(tensor.split(lengths, dim=2) for tensor in (query, key, value)), strict=True)
    alone = [
        scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=True, scale=0.3, enable_gqa=True)
        for q, k, v in parts
    ]
    reference = torch.cat(alone, dim=2).transpose(1, 2).to(dtype)
    inputs = (query, key, value)
    return [packed, *torch.autograd.grad(packed, inputs, upstream)], [
        reference,
        *torch.autograd.grad(reference, inputs, upstream),
    ]


@pytest.mark.parametrize("lengths", SHAPES)
def test_packed_attention_is_attention_of_each_sequence_alone(lengths: list[int]) -> None:
    for found, expected in zip(*run(lengths, torch.float32), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("lengths", SHAPES)
def test_packed_attention_in_bfloat16_stays_within_its_rounding(lengths: list[int]) -> None:
    for found, expected in zip(*run(lengths, torch.bfloat16), strict=True):
        difference = (found - expected).detach().float().norm()
        assert difference < 0.02 * expected.detach().float().norm() + 1e-5


def test_short_sequences_in_bfloat16_dont_depend_on_how_many_are_held_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = run([30, 30, 30, 29], torch.bfloat16)[0]
    monkeypatch.setattr(attention, "SHORT_SCORES", 1)
    for found, expected in zip(run([30, 30, 30, 29], torch.bfloat16)[0], whole, strict=True):
        torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)


def test_groups_hold_like_lengths_and_every_row_once() -> None:
    groups = group_sequences([100, 90, 76, 74, 30, 20, 4], torch.device("cpu"))
    assert [(group.count, group.length, group.rows) for group in groups] == [(3, 100, 266), (1, 74, 74), (3, 30, 54)]
    slots, gather = groups[0].slots, groups[0].gather
    assert slots is not None
    assert gather is not None
    assert gather[slots].tolist() == list(range(266))


def test_a_sequence_beyond_the_sliding_window_is_refused() -> None:
    query = torch.zeros(1, 1, 5, 4)
    groups = group_sequences([5], torch.device("cpu"))
    with pytest.raises(ValueError, match="sliding window of 4"):
        packed_attention(
            torch.nn.Module(), query, query, query, None, scaling=1, packed_groups=groups, sliding_window=4
        )
