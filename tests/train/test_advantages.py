from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.comm.errors import ConfigError
from headrace.train.advantages import ADVANTAGES, dr_grpo, grpo

SAMPLES = st.lists(st.tuples(st.floats(-10, 10), st.integers(0, 3)), min_size=1, max_size=16)


def columns(samples: list[tuple[float, int]]) -> tuple[torch.Tensor, torch.Tensor]:
    rewards, groups = zip(*samples, strict=True)
    return torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo"])
def test_agree_with_verl(name: str, verl_cases: list[Any]) -> None:
    for case in verl_cases:
        ours = ADVANTAGES.get(name)(case.found["rewards"], case.found["groups"])
        torch.testing.assert_close(ours, case.verl(f"advantage/{name}"), rtol=1e-5, atol=1e-5)


def test_values_by_hand() -> None:
    rewards, groups = torch.tensor([0.0, 5.0, 1.0, 2.0]), torch.tensor([7, 3, 7, 7])
    assert dr_grpo(rewards, groups).tolist() == [-1.0, 5.0, 0.0, 1.0]
    torch.testing.assert_close(grpo(rewards, groups), torch.tensor([-1.0, 5.0, 0.0, 1.0]) / (1 + 1e-6))


@pytest.mark.parametrize("name", ["grpo", "dr_grpo"])
@given(reward=st.floats(-1e3, 1e3), size=st.integers(2, 9))
def test_equal_rewards_give_exactly_zero(name: str, reward: float, size: int) -> None:
    for dtype in (torch.float32, torch.float64):
        rewards = torch.full((size,), reward, dtype=dtype)
        assert ADVANTAGES.get(name)(rewards, torch.zeros(size, dtype=torch.int64)).tolist() == [0.0] * size


@pytest.mark.parametrize("name", ["grpo", "dr_grpo"])
@given(samples=SAMPLES, data=st.data())
def test_order_of_samples_does_not_matter(name: str, samples: list[tuple[float, int]], data: st.DataObject) -> None:
    rewards, groups = columns(samples)
    order = torch.tensor(data.draw(st.permutations(range(len(samples)))))
    function = ADVANTAGES.get(name)
    shuffled = function(rewards[order], groups[order])
    torch.testing.assert_close(shuffled, function(rewards, groups)[order], rtol=1e-6, atol=1e-6)


@given(samples=SAMPLES)
def test_advantages_of_a_group_sum_to_zero(samples: list[tuple[float, int]]) -> None:
    rewards, groups = columns(samples)
    advantages = dr_grpo(rewards, groups)
    for group in groups.unique():
        members = groups == group
        if members.sum() > 1:
            assert advantages[members].sum().abs() < 1e-9


def test_the_inputs_are_left_alone() -> None:
    rewards, groups = torch.tensor([0.0, 1.0]), torch.tensor([0, 0])
    grpo(rewards, groups)
    assert rewards.tolist() == [0.0, 1.0]


def test_an_unknown_name_is_refused_with_the_nearest_ones() -> None:
    with pytest.raises(ConfigError, match=r"train\.advantage: there is no 'gpro'\. Did you mean .*grpo"):
        ADVANTAGES.get("gpro")


def test_an_import_path_that_is_no_function_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"train\.advantage: math:pi is a float; it must be a function"):
        ADVANTAGES.get("math:pi")


def test_a_function_of_ones_own_is_loaded_once() -> None:
    assert ADVANTAGES.get("examples/my_loss.py:rloo") is ADVANTAGES.get("examples/my_loss.py:rloo")


def test_the_example_agrees_with_verl(verl_cases: list[Any]) -> None:
    rloo = ADVANTAGES.get("examples/my_loss.py:rloo")
    for case in verl_cases:
        ours = rloo(case.found["rewards"], case.found["groups"])
        torch.testing.assert_close(ours, case.verl("advantage/rloo"), rtol=1e-5, atol=1e-5)
