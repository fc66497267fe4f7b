from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.train.aggregation import AGGREGATIONS, sum_per_sequence, weighted_sum
from headrace.train.batch import Denominators, TrainSample
from headrace.train.config import TrainConfig
from headrace.train.objective import denominators_of

MODES = ["token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "seq_mean_token_sum_norm"]
MASKS = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6), min_size=1, max_size=8)


def sample(mask: list[int], values: list[float] | None = None) -> TrainSample:
    """A sample whose token losses stand in the column of advantages."""
    length = len(mask)
    return TrainSample(
        tokens=np.zeros(length, np.int32),
        loss_mask=np.array(mask, np.float32),
        advantages=np.array(values if values else np.arange(1, length + 1), np.float32),
        rollout_logprobs=np.zeros(length, np.float32),
        versions=np.zeros(length, np.int32),
        group=0,
    )


def aggregate(mode: str, samples: list[TrainSample], denominators: Denominators, pack: Any) -> torch.Tensor:
    batch = pack(samples)
    return weighted_sum(batch.advantages, AGGREGATIONS.get(mode)(batch, denominators))


@pytest.mark.parametrize("mode", MODES)
def test_agree_with_verl(mode: str, verl_cases: list[Any]) -> None:
    for case in verl_cases:
        ours = weighted_sum(case.current, AGGREGATIONS.get(mode)(case.batch, case.denominators))
        theirs = case.verl(f"aggregate/{mode.replace('_', '-')}")
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token_mean", (2 + 3 + 10) / 3),
        ("seq_mean_token_sum", (5 + 10) / 2),
        ("seq_mean_token_mean", (2.5 + 10) / 2),
        ("seq_mean_token_sum_norm", (5 + 10) / 2 / 4),
    ],
)
def test_values_by_hand(mode: str, expected: float, pack: Any) -> None:
    samples = [sample([0, 1, 1], [99, 2, 3]), sample([0, 1], [99, 10]), sample([0, 0], [99, 99])]
    total = aggregate(mode, samples, denominators_of(samples, max_tokens=4), pack)
    assert total.item() == pytest.approx(expected)


@pytest.mark.parametrize("mode", MODES)
@given(masks=MASKS, data=st.data())
def test_micro_batches_add_up_in_any_split_and_order(mode: str, masks: Any, data: st.DataObject, pack: Any) -> None:
    samples = [sample(mask) for mask in masks]
    denominators = denominators_of(samples, max_tokens=6)
    whole = aggregate(mode, samples, denominators, pack)
    shuffled = data.draw(st.permutations(samples))
    cut = data.draw(st.integers(0, len(samples)))
    parts = [aggregate(mode, part, denominators, pack) for part in (shuffled[:cut], shuffled[cut:])]
    torch.testing.assert_close(parts[0] + parts[1], whole)


@pytest.mark.parametrize("mode", MODES)
def test_nothing_in_the_loss_gives_zero(mode: str, pack: Any) -> None:
    samples = [sample([0, 0]), sample([0])]
    assert aggregate(mode, samples, denominators_of(samples, max_tokens=6), pack).item() == 0
    assert aggregate(mode, [], denominators_of([], max_tokens=6), pack).item() == 0


def test_fractions_in_the_mask_weigh_tokens(pack: Any) -> None:
    one = sample([0, 1, 1], [0, 2, 6])
    one.loss_mask[2] = 0.5
    total = aggregate("token_mean", [one], denominators_of([one], max_tokens=6), pack)
    assert total.item() == pytest.approx((2 + 3) / 1.5)


def test_what_is_masked_out_does_not_matter_not_even_nan() -> None:
    values = torch.tensor([torch.nan, 2.0, torch.inf])
    assert weighted_sum(values, torch.tensor([0.0, 0.5, 0.0])).item() == 1.0


def test_sums_per_sequence(pack: Any) -> None:
    batch = pack([sample([0, 1, 1]), sample([1]), sample([0, 1])])
    assert sum_per_sequence(batch.advantages, batch).tolist() == [6.0, 1.0, 3.0]


def test_the_config_offers_what_there_is() -> None:
    assert set(get_args(TrainConfig.model_fields["aggregation"].annotation)) == set(AGGREGATIONS.names)
