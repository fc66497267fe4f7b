"""Which deaths a run gets over."""

from __future__ import annotations

import pytest

from headrace.comm.errors import PeerLostError
from headrace.ranks.config import RanksConfig
from headrace.ranks.living import Living
from headrace.ranks.topology import plan_roles

ROLES = plan_roles(["a"] * 4, RanksConfig(trainers=2, generators=2))


def under_way() -> Living:
    living = Living(ROLES)
    living.under_way = True
    return living


def test_those_concerned_are_told_of_a_generator_that_died_once_it_counts_as_dead() -> None:
    living = under_way()
    told: list[tuple[int, tuple[int, ...], frozenset[int]]] = []
    living.on_loss.append(lambda rank: told.append((rank, living.generators, living.lost)))
    living.lose(2)
    assert told == [(2, (3,), frozenset({2}))]


def test_a_trainer_and_the_last_generator_are_missed() -> None:
    living = under_way()
    with pytest.raises(PeerLostError, match=r"rank 1 \(trainer 1 on a\) has died"):
        living.lose(1)
    living.lose(3)
    with pytest.raises(PeerLostError, match=r"rank 2 \(generator 0 on a\) has died.*the last generator"):
        living.lose(2)


def test_before_the_run_has_begun_every_rank_is_needed() -> None:
    with pytest.raises(PeerLostError, match=r"rank 2 \(generator 0 on a\) has died.*only after it has begun"):
        Living(ROLES).lose(2)
