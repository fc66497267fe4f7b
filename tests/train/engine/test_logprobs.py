"""Chunked log-probs and entropy against the full log_softmax."""

from __future__ import annotations

import pytest
import torch

from headrace.train import logprobs as module
from headrace.train.logprobs import chunked_logprobs


def problem(rows: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    hidden = torch.randn(rows, 12).to(dtype).requires_grad_()
    weight = torch.randn(700, 12).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, 700, (rows,))


def reference(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    everything = torch.log_softmax((hidden @ weight.T).float() / temperature, dim=-1)
    return everything.gather(1, targets[:, None])[:, 0], -(everything.exp() * everything).sum(1)


@pytest.mark.parametrize("elements", [1, 700, 1 << 20])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("rows", [1, 9, 40])
def test_chunked_logprobs_and_gradient_equal_log_softmax(
    monkeypatch: pytest.MonkeyPatch, elements: int, temperature: float, rows: int
) -> None:
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", {"cpu": elements})
    hidden, weight, targets = problem(rows)
    found, entropy = chunked_logprobs(hidden, weight, targets, temperature)
    expected, expected_entropy = reference(hidden, weight, targets, temperature)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy, expected_entropy, rtol=1e-5, atol=1e-5)
    upstream = torch.randn(rows)
    gradients = torch.autograd.grad(found, (hidden, weight), upstream)
    for gradient, right in zip(gradients, torch.autograd.grad(expected, (hidden, weight), upstream), strict=True):
        torch.testing.assert_close(gradient, right, rtol=1e-5, atol=1e-5)


def test_huge_logits_stay_finite() -> None:
    hidden, weight, targets = problem(5)
    found, entropy = chunked_logprobs(hidden * 1e4, weight, targets)
    assert torch.isfinite(found).all()
    assert torch.isfinite(entropy).all()


def test_bfloat16_rounds_only_the_matrix_products() -> None:
    hidden, weight, targets = problem(20, torch.bfloat16)
    found, _ = chunked_logprobs(hidden, weight, targets)
    expected, _ = reference(hidden, weight, targets, 1.0)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_no_rows_give_no_logprobs_and_zero_gradient() -> None:
    hidden, weight, targets = problem(0)
    found, entropy = chunked_logprobs(hidden, weight, targets)
    assert found.shape == entropy.shape == (0,)
    assert not torch.autograd.grad(found.sum(), weight)[0].any()
