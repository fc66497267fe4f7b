"""Ticket → task: every task once per epoch, in an order that depends on the seed and the epoch."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.ranks.order import TicketOrder


@settings(deadline=None)
@given(st.integers(1, 300), st.integers(0, 2**40), st.integers(0, 5))
def test_every_epoch_uses_every_task_once(size: int, seed: int, epoch: int) -> None:
    order = TicketOrder(size, seed)
    tasks = [order.task(epoch * size + place) for place in range(size)]
    assert sorted(tasks) == list(range(size))


def test_epochs_and_seeds_differ() -> None:
    orders = {
        tuple(TicketOrder(50, seed).task(epoch * 50 + k) for k in range(50)) for seed in range(4) for epoch in range(4)
    }
    assert len(orders) == 16


def test_places_are_spread_evenly() -> None:
    """Over many seeds the first ticket meets every task about equally often (chi-square, 1 in 10^6)."""
    counts = [0] * 10
    for seed in range(5000):
        counts[TicketOrder(10, seed).task(0)] += 1
    assert sum((count - 500) ** 2 / 500 for count in counts) < 46


def test_neighbours_are_torn_apart() -> None:
    order = TicketOrder(10_000, 7)
    tasks = [order.task(k) for k in range(10_000)]
    assert sum(abs(a - b) == 1 for a, b in pairwise(tasks)) < 20


def test_without_shuffle_tasks_come_as_they_are() -> None:
    order = TicketOrder(3, 9, shuffle=False, epochs=2)
    assert [order.task(k) for k in range(6)] == [0, 1, 2, 0, 1, 2]
    assert [order.epoch(k) for k in range(6)] == [0, 0, 0, 1, 1, 1]


def test_the_data_end_after_the_epochs() -> None:
    order = TicketOrder(3, 9, epochs=2)
    assert order.tickets == 6
    assert TicketOrder(3, 9).tickets is None
    for ticket in (6, -1):
        with pytest.raises(IndexError):
            order.task(ticket)


def test_another_process_computes_the_same() -> None:
    code = "from headrace.ranks.order import TicketOrder; print([TicketOrder(1000, 3).task(k) for k in range(20)])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
    assert found.strip() == str([TicketOrder(1000, 3).task(k) for k in range(20)])


def test_a_huge_dataset_needs_no_memory() -> None:
    order = TicketOrder(10**12, 1)
    assert len({order.task(k) for k in range(100)}) == 100
