"""What a rank says before it aborts reaches the user."""

from __future__ import annotations

import pytest
from launch import MPIS, run_ranks


@pytest.mark.parametrize("mpi", MPIS)
def test_the_last_words_arrive_through_a_launcher_that_had_no_time_to_read(mpi: str) -> None:
    ended = run_ranks(mpi, 3, "last_words", limit_s=30)
    assert ended.status == 3
    assert "last words" in ended.stdout
    assert "and a reason" in ended.stderr
