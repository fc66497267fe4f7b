"""The sample exchange by itself between real ranks, under both MPIs, and the example of its documentation."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from launch import MPIS, PROGRAMS, run_ranks

ROOT = Path(__file__).parents[2]
EXAMPLE = "../../../examples/exchange"
GROUPS = 6
LINE = re.compile(r"(?:scorer|trainer): group \d+, (?:lengths \[\d+, \d+\]|\d samples, \d with a picture)")

pytestmark = pytest.mark.parametrize("mpi", MPIS)


def test_the_example_gives_every_group_to_both_consumers(mpi: str) -> None:
    assert (PROGRAMS / f"{EXAMPLE}.py").resolve() == ROOT / "examples" / "exchange.py"
    ended = run_ranks(mpi, 3, EXAMPLE).check()
    lines = [
        line.format(key=key, more=key + 1)
        for key in range(GROUPS)
        for line in (
            "scorer: group {key}, lengths [{key}, {more}]",
            "trainer: group {key}, 2 samples, 1 with a picture",
        )
    ]
    said = LINE.findall(ended.stdout)  # the launcher may put the ends of two ranks' lines together
    assert sorted(said) == sorted(lines)
    document = (ROOT / "docs" / "exchange.md").read_text()
    shown = LINE.findall(document)
    assert len(shown) == 2
    assert set(shown) <= {*lines}
    program = (ROOT / "examples" / "exchange.py").read_text().split('"""\n\n', 1)[1]
    assert f"```python\n{program}```\n" in document


def test_large_columns_of_every_kind_arrive_bit_for_bit_and_a_wrong_schema_is_told(mpi: str) -> None:
    ended = run_ranks(mpi, 4, "share_samples").check()
    assert ended.stdout.count("all groups were right") == 3
    assert ended.stdout.count("tokens is int32 [*] there and int64 [*] here") == 1


def test_an_owner_that_is_stopped_in_the_middle_of_an_answer_goes_on_and_nothing_is_lost(mpi: str) -> None:
    ended = run_ranks(mpi, 3, "owner_fails", "stop", limit_s=60).check()
    assert sorted(re.findall(r"rank \d has it all", ended.stdout)) == ["rank 0 has it all", "rank 2 has it all"]


def test_an_owner_that_is_killed_in_the_middle_of_an_answer_ends_the_program(mpi: str) -> None:
    ended = run_ranks(mpi, 3, "owner_fails", "kill", limit_s=60)
    assert ended.status not in (0, 124), f"{ended.status} {ended.stdout} {ended.stderr}"
    assert re.search(r"EXIT CODE: 9|process rank 1 with PID|rank 1 has died", ended.stdout + ended.stderr), ended
