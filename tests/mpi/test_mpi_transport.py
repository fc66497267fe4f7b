"""The MPI transport, and the exchange over it, between real ranks under both MPI implementations."""

from __future__ import annotations

import re

import pytest
from launch import MPIS, run_ranks

pytestmark = pytest.mark.parametrize("mpi", MPIS)

IDLE_CORES = 0.10
"""The most that 8 idle ranks may use together."""


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
def test_random_messages_arrive_whole_and_in_the_order_of_each_pair(mpi: str, ranks: int) -> None:
    ended = run_ranks(mpi, ranks, "random_traffic", ranks).check()
    counts = [int(count) for count in re.findall(r"(\d+) messages", ended.stdout)]
    assert len(counts) == ranks
    assert sum(counts) == 40 * ranks * ranks + ranks * ranks


def test_large_messages_of_two_sources_arrive_in_turn(mpi: str) -> None:
    ended = run_ranks(mpi, 3, "many_large").check()
    assert "all arrived, in turn" in ended.stdout


def test_samples_are_pulled_from_several_owners(mpi: str) -> None:
    ended = run_ranks(mpi, 3, "pull_samples").check()
    assert "refused: Pulling samples from rank 0 failed: Not in the store" in ended.stdout


def test_a_courier_thread_answers_while_the_main_thread_computes(mpi: str) -> None:
    ended = run_ranks(mpi, 2, "busy_main_thread").check()
    assert len(re.findall(r"\d+ turns", ended.stdout)) == 2


def test_idle_ranks_leave_the_cores_alone(mpi: str) -> None:
    ended = run_ranks(mpi, 8, "idle_ranks").check()
    (cores,) = re.findall(r"cores: ([\d.]+)", ended.stdout)
    assert 0 < float(cores) < IDLE_CORES


def test_closing_is_limited_and_names_the_rank_waited_for(mpi: str) -> None:
    ended = run_ranks(mpi, 2, "unfinished").check()
    assert (
        "limit: Rank 0 waited 0.5 s at its end for its messages: 1 messages to ranks [1] haven't left" in ended.stdout
    )


def test_an_unreadable_frame_is_refused_and_its_source_named(mpi: str) -> None:
    ended = run_ranks(mpi, 2, "unreadable").check()
    assert "refused: Rank 1 sent protocol 255" in ended.stdout


@pytest.mark.slow
def test_a_buffer_beyond_2_gib_arrives(mpi: str) -> None:
    run_ranks(mpi, 1, "beyond_int").check()


def test_a_world_of_another_size_than_asked_for_is_refused(mpi: str) -> None:
    ended = run_ranks(mpi, 2, "world_size", 3)
    assert ended.status == 3
    assert "3 ranks were asked for, but the MPI world has 2" in ended.stdout


def test_a_world_of_one_is_refused_with_the_remedy_when_the_number_is_known(mpi: str) -> None:
    ended = run_ranks(mpi, 1, "world_size", 4)
    assert ended.status == 3
    assert "each of them is a world of its own" in ended.stdout
    assert "--mpi=pmix" in ended.stdout


def test_a_program_that_hangs_is_ended_at_its_limit(mpi: str) -> None:
    ended = run_ranks(mpi, 2, "hang", limit_s=3)
    assert ended.status == 124
