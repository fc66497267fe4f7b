from __future__ import annotations

from typing import Any, get_args

import pytest
import torch

from headrace.train.config import TrainConfig
from headrace.train.kl import KL_PENALTIES, PENALTY_BOUND, bounded_k3, k1, k2, k3


def two_policies() -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of all tokens of a small vocabulary under two policies."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(2, 7, generator=generator, dtype=torch.float64)
    return logits[0].log_softmax(0), logits[1].log_softmax(0)


def exact_kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.kl_div(q, p, log_target=True, reduction="sum")


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
def test_values_and_gradients_agree_with_verl(name: str, verl_cases: list[Any]) -> None:
    for case in verl_cases:
        current = case.current.clone().requires_grad_()
        penalty = KL_PENALTIES.get(name)(current, case.batch.reference_logprobs)
        torch.testing.assert_close(penalty.detach(), case.verl(f"kl/{name}"), rtol=1e-5, atol=1e-5)
        (grad,) = torch.autograd.grad(penalty.sum(), current)
        torch.testing.assert_close(grad, case.verl(f"grad/kl/{name}"), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("estimator", [k1, k3])
def test_k1_and_k3_are_unbiased(estimator: Any) -> None:
    p, q = two_policies()
    torch.testing.assert_close((p.exp() * estimator(p, q)).sum(), exact_kl(p, q))


def test_the_expected_gradient_of_k2_is_that_of_the_kl() -> None:
    logits = torch.randn(7, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).requires_grad_()
    _, q = two_policies()
    (exact,) = torch.autograd.grad(exact_kl(logits.log_softmax(0), q), logits)
    p = logits.log_softmax(0)
    (of_k2,) = torch.autograd.grad((p.exp().detach() * k2(p, q)).sum(), logits)
    torch.testing.assert_close(of_k2, exact)


def test_the_expected_gradient_of_k1_vanishes() -> None:
    logits = torch.randn(7, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).requires_grad_()
    _, q = two_policies()
    p = logits.log_softmax(0)
    (grad,) = torch.autograd.grad((p.exp().detach() * k1(p, q)).sum(), logits)
    torch.testing.assert_close(grad, torch.zeros_like(grad))


def test_k3_is_never_negative_and_zero_only_for_equal_ones() -> None:
    x = torch.linspace(-6, 0, 25)
    assert (k3(x, x) == 0).all()
    assert (k3(x, x + 0.5) > 0).all()
    assert (k3(x, x - 0.5) > 0).all()


def test_only_the_k3_penalty_is_bounded() -> None:
    x, y = torch.tensor([-8.0]), torch.tensor([0.0])
    torch.testing.assert_close(k3(x, y), torch.tensor([8.0]).exp() - 9)
    assert bounded_k3(x, y).item() == PENALTY_BOUND


def test_an_impossible_token_overflows_nothing() -> None:
    assert k3(torch.tensor([-torch.inf]), torch.tensor([0.0])).isfinite().all()


def test_the_config_offers_what_there_is() -> None:
    assert set(get_args(TrainConfig.model_fields["kl"].annotation)) == {"none", *KL_PENALTIES.names}
