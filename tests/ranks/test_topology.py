"""The planner of roles: a pure function of hosts and config."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.comm.errors import ConfigError
from headrace.ranks.config import RanksConfig
from headrace.ranks.topology import plan_roles


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=5),
    st.integers(1, 8),
    st.sampled_from(["spread", "by_node"]),
    st.booleans(),
)
def test_every_rank_has_one_role_and_rank_0_is_trainer_0(sizes, trainers, placement, cyclic):
    hosts = [f"node{node}" for node, size in enumerate(sizes) for _ in range(size)]
    hosts = hosts[::-1] if cyclic else hosts
    if trainers >= len(hosts):
        trainers = 1
    if len(hosts) == 1:
        return
    config = RanksConfig(trainers=trainers, generators=len(hosts) - trainers, placement=placement)
    roles = plan_roles(hosts, config)
    assert sorted(roles.trainers + roles.generators) == list(range(len(hosts)))
    assert len(roles.trainers) == trainers
    assert roles.trainers[0] == 0
    assert {roles.home_ledger(i) for i in range(len(roles.generators))} <= set(roles.trainers)


def test_spread_puts_both_roles_on_every_node_and_by_node_fills_nodes():
    hosts = ["a"] * 4 + ["b"] * 4
    spread = plan_roles(hosts, RanksConfig(trainers=2, generators=6, placement="spread"))
    assert spread.trainers == (0, 4)
    by_node = plan_roles(hosts, RanksConfig(trainers=4, generators=4, placement="by_node"))
    assert by_node.trainers == (0, 1, 2, 3)


def test_local_index_counts_within_the_host():
    roles = plan_roles(["a", "b", "a", "b"], RanksConfig(trainers=1, generators=3))
    assert [roles.local_index(rank) for rank in range(4)] == [0, 0, 1, 1]


def test_the_first_living_generator_of_every_host_comes_first():
    roles = plan_roles(["a", "a", "b", "b", "b", "a"], RanksConfig(generators=4, trainers=2, placement="spread"))
    assert roles.generators == (1, 3, 4, 5)
    assert [roles.node_mates(rank) for rank in roles.generators] == [(1, 5), (3, 4), (3, 4), (1, 5)]
    assert roles.first_of_nodes(roles.generators) == (1, 3)
    assert roles.first_of_nodes((5, 4)) == (4, 5)


def test_the_role_map_names_every_rank_once():
    text = plan_roles(["a"] * 3 + ["b"] * 3, RanksConfig(trainers=2, generators=4)).describe()
    assert text.splitlines() == [
        "6 ranks: 4 generators, 2 trainers",
        "  a: trainers 0, generators 1-2",
        "  b: trainers 3, generators 4-5",
    ]


def test_the_role_map_shows_the_cores_of_every_host_and_whether_ranks_share_them():
    roles = plan_roles(["a"] * 2 + ["b"] * 2, RanksConfig(trainers=1, generators=3))
    assert roles.describe(["0-1", "2-3", "0-3", "0-3"]).splitlines()[1:] == [
        "  a: trainers 0, generators 1; cores 0-1 | 2-3",
        "  b: generators 2-3; cores 0-3",
    ]


@pytest.mark.parametrize("ranks", [1, 4, 6])
def test_a_world_that_does_not_fit_the_roles_is_refused(ranks):
    with pytest.raises(ConfigError, match=f"{ranks} ranks.*ask for 5.*-n 5"):
        plan_roles(["a"] * ranks, RanksConfig(trainers=2, generators=3))
