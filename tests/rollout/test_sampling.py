"""Sampling: the numbers behind the draws, and the distributions drawn from."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from headrace.comm.errors import HeadraceError
from headrace.rollout import sampling
from headrace.rollout.random import splitmix64, stream_of, uniforms
from headrace.rollout.sampling import sample


def draw(
    logits: torch.Tensor, temperature: float, top_k: int, top_p: float, uniform: np.ndarray
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same parameters for every row."""
    n = len(logits)
    return sample(
        logits,
        np.full(n, temperature, np.float32),
        np.full(n, top_k, np.int64),
        np.full(n, top_p, np.float32),
        uniform.astype(np.float32),
    )


def chisquare_p(seen: np.ndarray, expected: np.ndarray) -> float:
    """p-value of Pearson's test: the chance of counts at least so far from the expected ones."""
    statistic = float(((seen - expected) ** 2 / expected).sum())
    freedom = torch.tensor((len(seen) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, torch.tensor(statistic / 2, dtype=torch.float64)))


def hf_distribution(logits: torch.Tensor, temperature: float, top_k: int, top_p: float) -> torch.Tensor:
    """[n, vocabulary] probabilities by Hugging Face's own processors."""
    scores = TemperatureLogitsWarper(temperature)(None, logits)
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    return scores.softmax(-1)


def test_splitmix64_gives_the_published_sequence() -> None:
    outputs = splitmix64(np.full(3, 1234567, np.uint64), np.arange(3, dtype=np.uint64))
    assert outputs.tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@settings(deadline=None)
@given(st.tuples(*[st.integers(0, 2**31)] * 3), st.tuples(*[st.integers(0, 2**31)] * 3))
def test_streams_of_different_keys_differ(a: tuple[int, int, int], b: tuple[int, int, int]) -> None:
    assert (stream_of(a) == stream_of(b)) == (a == b)


def test_uniforms_over_neighbouring_keys_and_positions_are_uniform_and_below_one() -> None:
    streams = np.array([stream_of((0, ticket, k)) for ticket in range(20) for k in range(10)])
    values = np.concatenate([uniforms(streams, np.full(200, position)) for position in range(50)])
    assert values.min() >= 0
    assert values.max() < 1
    assert chisquare_p(np.histogram(values, 100, (0, 1))[0], np.full(100, len(values) / 100)) > 1e-3
    assert abs(np.corrcoef(values[:-200], values[200:])[0, 1]) < 0.04


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.7, 0, 0.8), (1.3, 12, 1.0), (1.0, 20, 0.6)]
)
def test_frequencies_follow_the_exact_distribution(temperature: float, top_k: int, top_p: float) -> None:
    torch.manual_seed(0)
    logits, count = torch.randn(1, 50) * 0.7, 40_000
    streams = np.array([stream_of((3, i, 0)) for i in range(count)])
    tokens, _ = draw(logits.expand(count, -1), temperature, top_k, top_p, uniforms(streams, np.full(count, 17)))
    expected = hf_distribution(logits, temperature, top_k, top_p)[0].double().numpy()
    seen = np.bincount(tokens.numpy(), minlength=50)
    assert seen[expected == 0].sum() == 0
    kept = expected > 0
    assert kept.sum() > 3
    assert chisquare_p(seen[kept], expected[kept] / expected.sum() * count) > 1e-3


@settings(deadline=None, max_examples=60)
@given(
    st.integers(0, 1000),
    st.floats(0.2, 3.0),
    st.one_of(st.just(0), st.integers(1, 400)),
    st.one_of(st.just(1.0), st.floats(0.05, 0.999)),
)
def test_logprobs_are_those_of_hugging_face_processors(seed: int, temperature: float, top_k: int, top_p: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(4, 300, generator=generator) * 2
    tokens, logprobs = draw(logits, temperature, top_k, top_p, np.random.default_rng(seed).random(4) * 0.999)
    # The edge of the nucleus may fall on either side by rounding: then the neighbouring bound must agree.
    candidates = [hf_distribution(logits, temperature, top_k, p) for p in (top_p, top_p - 1e-6, min(1.0, top_p + 1e-6))]
    gaps = torch.stack([(c.gather(1, tokens[:, None])[:, 0].log() - logprobs).abs() for c in candidates])
    assert gaps.amin(0).max() < 1e-4


def test_the_nucleus_is_found_when_it_is_wider_than_the_first_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "FIRST_WIDTH", 4)
    torch.manual_seed(0)
    logits = torch.randn(64, 200) * torch.linspace(0.01, 5, 64)[:, None]
    tokens, logprobs = draw(logits, 1.0, 0, 0.9, np.random.default_rng(0).random(64))
    expected = hf_distribution(logits, 1.0, 0, 0.9).gather(1, tokens[:, None])[:, 0].log()
    torch.testing.assert_close(logprobs, expected, atol=1e-4, rtol=0)


def test_parameters_may_differ_within_a_batch() -> None:
    torch.manual_seed(1)
    logits = torch.randn(4, 60) * 2
    temperature, top_k, top_p = [0.0, 1.0, 0.5, 2.0], [0, 3, 0, 10], [1.0, 1.0, 0.7, 0.5]
    uniform = np.array([0.2, 0.9, 0.5, 0.7], np.float32)
    tokens, logprobs = sample(
        logits,
        np.float32(temperature),
        np.array(top_k),
        np.float32(top_p),
        uniform,  # type: ignore[arg-type]
    )
    for i in range(4):
        alone = draw(logits[i : i + 1], temperature[i], top_k[i], top_p[i], uniform[i : i + 1])
        assert (tokens[i], logprobs[i]) == (alone[0][0], alone[1][0])


def test_greedy_takes_the_likeliest_token_with_its_logprob_at_temperature_one() -> None:
    torch.manual_seed(2)
    logits = torch.randn(5, 40)
    tokens, logprobs = draw(logits, 0.0, 3, 0.5, np.full(5, 0.99))
    assert tokens.tolist() == logits.argmax(-1).tolist()
    torch.testing.assert_close(logprobs, logits.log_softmax(-1).amax(-1))


def test_tokens_as_likely_as_the_last_one_kept_are_kept_too() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 1.0, 1.0]]).expand(300, -1)
    tokens, logprobs = draw(logits, 1.0, 2, 1.0, np.arange(300) / 300)
    assert set(tokens.tolist()) == {1, 2, 3, 4}
    expected = torch.tensor([2.0, 1.0, 1.0, 1.0]).log_softmax(-1)
    torch.testing.assert_close(logprobs[tokens == 3][0], expected[1])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_not_numbers_are_an_error(value: float) -> None:
    logits = torch.zeros(3, 10)
    logits[1, 4] = value
    with pytest.raises(HeadraceError, match="diverged"):
        draw(logits, 1.0, 0, 1.0, np.full(3, 0.5))


@given(st.integers(0, 2**24 - 1), st.integers(0, 500))
@settings(deadline=None)
def test_a_token_without_weight_is_never_drawn(bits: int, seed: int) -> None:
    """Also by the smallest and the largest random number."""
    logits = torch.randn(1, 30, generator=torch.Generator().manual_seed(seed)) * 30
    logits[0, [0, 13, 29]] = -float("inf")
    for number in (0, bits, 2**24 - 1):
        tokens, logprobs = draw(logits, 1.0, 0, 1.0, np.array([number * 2.0**-24]))
        assert tokens[0] not in (0, 13, 29)
        assert torch.isfinite(logprobs).all()
