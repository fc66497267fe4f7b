"""Many publications beside the collectives of training: one order on all ranks, and nothing is set up anew."""

from __future__ import annotations

import re

import pytest
from launch import run_ranks

SYNCS = 200
LINE = re.compile(
    r"(collective|mpi) rank (\d+): (\d+) versions, broadcasts (\w+), collectives (\w+), "
    r"files (\d+) (\d+), threads (\d+) (\d+)"
)


@pytest.mark.parametrize(
    ("ranks", "trainers"),
    [
        (2, 1),
        (4, 2),
        *(
            pytest.param(ranks, trainers, marks=pytest.mark.slow)
            for ranks, trainers in ((3, 2), (5, 2), (6, 5), (7, 3), (8, 4))
        ),
    ],
)
def test_collectives_have_one_order_and_200_syncs_need_no_more_than_ten(ranks: int, trainers: int) -> None:
    ended = run_ranks("mpich", ranks, "interleaved", trainers, SYNCS, limit_s=200).check()
    lines = [match.groups() for match in LINE.finditer(ended.stdout)]
    assert sorted((name, int(rank)) for name, rank, *_ in lines) == [
        (name, rank) for name in ("collective", "mpi") for rank in range(ranks)
    ]
    for name, rank, versions, *_, files, last_files, threads, last_threads in lines:
        assert (files, threads) == (last_files, last_threads), f"{name}: rank {rank} needs more and more"
        assert int(versions) == SYNCS
    by_broadcast = [line for line in lines if line[0] == "collective"]
    assert len({broadcasts for _, _, _, broadcasts, *_ in by_broadcast}) == 1
    assert len({line[4] for line in by_broadcast if int(line[1]) < trainers}) == 1
    if trainers > 1:
        assert {line[4] for line in by_broadcast if int(line[1]) < trainers}.isdisjoint({by_broadcast[0][3]})
