"""Small worlds in every order of events: no rule is ever broken, and from every state the run can end."""

from __future__ import annotations

import mutants
import pytest
from worlds.search import Search
from worlds.setup import Setup, StuckError
from worlds.smallest import ALL, QUICK, name, small


@pytest.mark.parametrize("setup", QUICK, ids=name)
def test_every_order_of_events_of_a_small_world_ends_within_the_bound(setup: Setup) -> None:
    found = Search(setup, most=20_000).run()
    assert found.ends > 0


@pytest.mark.slow
@pytest.mark.parametrize("setup", ALL, ids=name)
def test_every_order_of_events_of_a_larger_world_ends_within_the_bound(setup: Setup) -> None:
    found = Search(setup, most=200_000).run()
    assert found.ends > 0


def test_the_search_finds_a_broken_rule_and_tells_how_it_came_about(monkeypatch: pytest.MonkeyPatch) -> None:
    mutants.never_wait(monkeypatch)
    with pytest.raises(AssertionError, match=r"(?s)is due at.*Setup.*asks.*ends"):
        Search(small(room=3)).run()


def test_the_search_finds_a_deadlock(monkeypatch: pytest.MonkeyPatch) -> None:
    mutants.full_last_batch(monkeypatch)
    with pytest.raises(StuckError, match="no way to the end"):
        Search(small(groups=2, tickets=3)).run()


def test_the_search_finds_what_needs_two_ledgers(monkeypatch: pytest.MonkeyPatch) -> None:
    mutants.move_without_escrow(monkeypatch)
    with pytest.raises(AssertionError, match="2 outstanding with C = 1"):
        Search(small(staleness=0, steps=2, ledgers=2, generators=2, room=1)).run()
