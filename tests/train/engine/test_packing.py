"""Planning and laying out micro-batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.train.batch import TrainSample
from headrace.train.packing import filler_sample, pack, plan_micro_batches

LENGTHS = st.lists(st.integers(1, 50), max_size=60)


@given(LENGTHS, st.integers(1, 120))
def test_every_sample_is_in_exactly_one_micro_batch(lengths: list[int], budget: int) -> None:
    plan = plan_micro_batches(lengths, budget)
    assert sorted(index for members in plan for index in members) == list(range(len(lengths)))
    assert all(plan)


@given(LENGTHS, st.integers(1, 120))
def test_the_budget_holds_except_for_a_longer_sample_alone(lengths: list[int], budget: int) -> None:
    for members in plan_micro_batches(lengths, budget):
        assert len(members) == 1 or sum(lengths[index] for index in members) <= budget


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(100, 300))
def test_micro_batches_are_few_and_balanced(lengths: list[int], budget: int) -> None:
    totals = [sum(lengths[index] for index in members) for members in plan_micro_batches(lengths, budget)]
    assert len(totals) <= max(1, -(-sum(lengths) // (budget - 50)))
    assert max(totals) - min(totals) <= max(lengths)


@given(LENGTHS)
def test_samples_of_a_micro_batch_are_sorted_longest_first(lengths: list[int]) -> None:
    for members in plan_micro_batches(lengths, 100):
        chosen = [lengths[index] for index in members]
        assert chosen == sorted(chosen, reverse=True)


def test_packing_lays_samples_end_to_end(samples: list[TrainSample]) -> None:
    batch = pack(samples[:3], 4, torch.device("cpu"))
    assert batch.starts.tolist() == [0, 5, 28, 30]
    assert batch.positions.tolist() == [*range(5), *range(23), *range(2)]
    assert batch.sequence_ids.tolist() == [0] * 5 + [1] * 23 + [2] * 2
    assert batch.tokens.tolist() == [int(token) for sample in samples[:3] for token in sample.tokens]
    np.testing.assert_array_equal(batch.advantages[5:28].numpy(), samples[1].advantages)
    assert batch.proximal_logprobs is None
    assert batch.policy_version == 4


def test_optional_columns_are_packed_when_all_have_them() -> None:
    sample = filler_sample()
    sample.reference_logprobs = np.array([0, -1.5], np.float32)
    packed = pack([sample, sample], 0, torch.device("cpu")).reference_logprobs
    assert packed is not None
    assert packed.tolist() == [0, -1.5, 0, -1.5]
    with pytest.raises(ValueError, match="some samples of a micro-batch have reference_logprobs"):
        pack([sample, filler_sample()], 0, torch.device("cpu"))
