"""The weight channels between real ranks, on gloo and either MPI."""

from __future__ import annotations

import re

import pytest
from launch import MPIS, run_ranks

from headrace.comm.network import outer_addresses

VERSIONS = 3
CHANNELS = ("mpi", "delta", "node", "nodedelta", "collective")


def check(stdout: str, trainers: int, ranks: int) -> None:
    taken = re.findall(r"(\w+) taken (\d+) by (\d+) digest (\w+) of (\w+)", stdout)
    assert all(found == expected for *_, found, expected in taken)
    by_rank = {
        (name, int(rank)): list(dict.fromkeys(int(v) for n, v, r, *_ in taken if (n, r) == (name, rank)))
        for name, _, rank, *_ in taken
    }
    generators = range(trainers, ranks)
    assert sorted(by_rank) == sorted((name, rank) for name in CHANNELS for rank in generators)
    for (name, _), versions in by_rank.items():
        assert versions == sorted(set(versions))
        assert versions[-1] == VERSIONS - 1
        assert name != "collective" or versions == list(range(VERSIONS))
    assert len(re.findall(r"published \d+ by \d+", stdout)) == len(CHANNELS) * VERSIONS * trainers


WORLDS = [
    pytest.param(mpi, trainers, ranks, marks=[pytest.mark.slow] if mpi == "openmpi" and ranks != 3 else [])
    for mpi in MPIS
    for trainers, ranks in ((1, 2), (2, 3), (1, 4), (3, 5))
]


@pytest.mark.parametrize(("mpi", "trainers", "ranks"), WORLDS)
def test_every_generator_gets_the_bits_of_all_trainers_over_every_channel(mpi: str, trainers: int, ranks: int) -> None:
    ended = run_ranks(mpi, ranks, "weights", trainers, "one", limit_s=90).check()
    check(ended.stdout, trainers, ranks)
    assert set(re.findall(r"store (\S+)", ended.stdout)) == {"127.0.0.1"}


def test_ranks_on_several_hosts_meet_at_an_address_that_isnt_loopback() -> None:
    if not outer_addresses():
        pytest.skip("this machine has no network but loopback")
    ended = run_ranks("mpich", 3, "weights", 1, "many", limit_s=90).check()
    check(ended.stdout, 1, 3)
    (address,) = set(re.findall(r"store (\S+)", ended.stdout))
    assert address == outer_addresses()[0]
