"""The soak itself: that it ends well when the exchange is right, and tells what went wrong when it isn't."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.soak import judge
from benchmarks.soakranks import NAMES, Plan, Report

ROOT = Path(__file__).parents[2]
SMALL = "--seconds 4 --producers 4 --consumers 2 --most-mb 16"


def soak(*options: str, limit_s: float = 120) -> tuple[dict[str, Any], str, int]:
    """What it found, what it said, and its status."""
    command = [sys.executable, "-m", "benchmarks.soak", "--json", *options]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit_s, check=False)
    return json.loads(ended.stdout), ended.stderr, ended.returncode


def test_a_small_soak_ends_well_and_sums_up() -> None:
    assert f"python -m benchmarks.soak {SMALL}\n" in (ROOT / "docs/exchange.md").read_text()
    assert (
        "\nsoak: setup\n\t$(BIN)/python -m benchmarks.soak --seconds $(SOAK_SECONDS)\n"
        in (ROOT / "Makefile").read_text()
    )
    found, said, status = soak(*SMALL.split())
    assert (status, said, found["wrong"]) == (0, "", [])
    assert found["ranks"] == 6
    assert found["groups"] > 20
    assert found["bytes"] > 64e6, "each producer begins with the largest group"


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("corrupt", r"of sample \d+ of group \(0, \d+\) of producer 0 is corrupted"),
        ("repeat", "groups of producer 0 came to trainers more than once"),
        pytest.param("lose", "groups of producer 0 have been lost: no trainer got them", marks=pytest.mark.slow),
        pytest.param("leak", "The memory of (rank [45]|all ranks together) grows", marks=pytest.mark.slow),
    ],
)
def test_the_soak_tells_what_went_wrong(fault: str, told: str) -> None:
    found, said, status = soak(*SMALL.split(), "--patience", "2", "--fault", fault)
    assert status == 1
    assert len(found["wrong"]) == said.count("soak: ")
    assert re.search(told, said), said


PLAN = Plan("", 60, 2, 1 << 20, 0)


def reports(**changes: Any) -> list[Report]:
    """Two producers with three groups each, and two consumers that share them; the last report is changed."""
    flat = {"peaks": [10 << 20] * 4}
    books = [{name: {0: [0, 1], 1: [2]} for name in NAMES}, {name: {0: [2], 1: [0, 1]} for name in NAMES}]
    producers = [Report(rank, groups=3, **flat) for rank in range(2)]
    consumers = [Report(2 + n, groups=3, **(flat | {"taken": books[n]})) for n in range(2)]
    last = msgspec.structs.replace(consumers[-1], **changes)
    return [*producers, consumers[0], last]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, []),
        ({"taken": {"scorer": {0: [2], 1: [0, 1]}, "trainer": {0: [2], 1: [1]}}}, ["1 of the 3 .* 1 have been lost"]),
        (
            {"taken": {name: {0: [2, 1], 1: [0, 1]} for name in NAMES}},
            ["producer 0 came to scorers more", "to trainers"],
        ),
        ({"taken": {name: {0: [2, 7], 1: [0, 1]} for name in NAMES}}, ["never put. The first: 7", "never put"]),
        (
            {"peaks": [10 << 20, 10 << 20, 10 << 20, 60 << 20]},
            ["memory of rank 3 grows", "of all ranks together grows"],
        ),
        ({"peaks": [25 << 30, 10 << 20, 10 << 20, 10 << 20]}, ["are allowed"]),
        ({"complaints": ["Rank 3: what?"]}, ["Rank 3: what"]),
        ({"groups": 0}, ["got nothing at all"]),
        ({"rank": 4}, [r"Ranks \[3\] have left no report"]),
    ],
)
def test_the_reports_are_judged(changes: dict[str, Any], told: list[str]) -> None:
    found = [*judge(PLAN, 4, reports(**changes))]
    assert len(found) == len(told), found
    for paragraph, pattern in zip(found, told, strict=True):
        assert re.search(pattern, paragraph), paragraph


@pytest.mark.slow
def test_a_minute_with_64_producers_and_8_consumers_loses_doubles_and_corrupts_nothing() -> None:
    found, said, status = soak("--seconds", "60", limit_s=290)
    assert (status, said) == (0, "")
    assert found["ranks"] == 72
    assert found["groups"] > 500
