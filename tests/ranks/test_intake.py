"""How many groups a generator asks for, holds and works on."""

from __future__ import annotations

import heapq
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.comm.messages import TicketGrant
from headrace.ranks.intake import ROUND, Intake
from headrace.ranks.memory import MemoryBound


def grants(numbers, version=0):
    return [TicketGrant(number, 0, version) for number in numbers]


def test_asks_until_every_slot_has_work_and_asks_again_when_slots_get_free():
    intake = Intake(slots=8, group_size=3)
    assert intake.ask() == 3, "the third group waits in part"
    assert intake.ask() == 0
    intake.granted(grants([0, 1]))
    assert [grant.ticket for grant in intake.start(0)] == [0, 1]
    assert (intake.asked, intake.running, intake.generating) == (1, 2, 6)
    assert intake.ask() == 0
    intake.sampled(2)
    assert intake.ask() == 1


def test_holds_what_needs_newer_weights_and_keeps_their_order():
    intake = Intake(slots=8, group_size=2)
    intake.ask()
    intake.granted([TicketGrant(0, 0, 2), TicketGrant(1, 0, 0), TicketGrant(2, 0, 1)])
    assert [grant.ticket for grant in intake.start(0)] == [1]
    assert [grant.ticket for grant in intake.start(2)] == [0, 2]
    assert not intake.start(3)


def test_forgotten_asks_are_asked_again_and_withdrawn_groups_make_room():
    intake = Intake(slots=8, group_size=2)
    assert intake.ask() == 4
    intake.forgotten(3)
    assert intake.ask() == 3
    intake.granted(grants([0, 1, 2, 3], version=5))
    assert intake.withdraw([(1, 0), (2, 1), (9, 0)]) == [(1, 0)]
    assert intake.ask() == 1


def test_more_grants_than_asks_is_a_broken_protocol():
    intake = Intake(slots=2, group_size=2)
    intake.ask()
    with pytest.raises(AssertionError, match="2 grants for 1 asks"):
        intake.granted(grants([0, 1]))


class World:
    """A generator at work, by a virtual clock: every sample lasts as long as `length` says, grants come at once."""

    def __init__(self, slots, group_size, length, late):
        self.intake, self.group_size, self.length, self.late = Intake(slots, group_size), group_size, length, late
        self.slots, self.now, self.tickets, self.queue = slots, 0.0, 0, []
        self.ends, self.left, self.idle = [], {}, 0.0

    def fill(self):
        room = self.intake.ask()
        self.intake.granted(grants(range(self.tickets, self.tickets + room)))
        self.tickets += room
        for grant in self.intake.start(0):
            self.left[grant.ticket] = self.group_size
            self.queue += [(grant.ticket, self.length(grant.ticket)) for _ in range(self.group_size)]
        while self.queue and len(self.ends) < self.slots:
            ticket, length = self.queue.pop(0)
            heapq.heappush(self.ends, (self.now + length, ticket))

    def run(self, groups):
        """Until so many more groups have ended; returns the most that were held on the way."""
        most = 0
        while groups:
            self.fill()
            most = max(most, self.intake.groups)
            end, ticket = heapq.heappop(self.ends)
            self.idle += (self.slots - len(self.ends) - 1) * (end - self.now)
            self.now = end
            self.intake.sampled()
            self.left[ticket] -= 1
            if not self.left[ticket]:
                self.intake.ended(self.late(ticket))
                groups -= 1
        return most


@pytest.mark.parametrize(("slots", "group_size"), [(8, 8), (64, 8), (5, 2), (32, 16), (1, 4)])
def test_a_generator_whose_groups_all_come_late_soon_holds_one(slots, group_size):
    world = World(slots, group_size, length=lambda ticket: 100.0, late=lambda ticket: True)
    before = world.run(1)
    world.run(3 * before + 4 * ROUND)
    assert world.intake.window == 1
    assert world.run(5) == 1


@pytest.mark.parametrize("stragglers", [0.0, 0.05, 0.15])
@pytest.mark.parametrize(("slots", "group_size"), [(64, 8), (32, 16), (16, 1)])
def test_a_healthy_generator_never_idles_though_its_longest_groups_come_late(slots, group_size, stragglers):
    draw = random.Random(1)
    lengths = {}

    def length(ticket):
        return lengths.setdefault(ticket, draw.lognormvariate(3, 1) * (10 if draw.random() < stragglers else 1))

    late = {}
    world = World(slots, group_size, length, lambda ticket: late.setdefault(ticket, lengths[ticket] > 150))
    world.run(500)
    assert sum(late.values()) > 500 * stragglers / 4
    assert world.idle == 0.0
    assert world.intake.window == slots


def test_a_generator_that_has_recovered_takes_its_full_load_again():
    slow = True
    world = World(16, 4, length=lambda ticket: 1.0, late=lambda ticket: slow)
    world.run(40)
    assert world.intake.window == 1
    slow = False
    world.run(sum(range(1, 16)) + 10 * ROUND)
    assert world.intake.window == 16
    idle = world.idle
    world.run(100)
    assert world.idle == idle


def test_the_window_is_halved_once_per_round_and_grows_by_one():
    intake = Intake(slots=32, group_size=4)
    intake.granted(grants(range(intake.ask())))
    intake.start(0)
    seen = []
    for late in [True] * 7 + [False] + [False] * 4 + [True] * 3 + [False] * 2:
        intake.granted(grants(range(intake.ask())))
        intake.start(0)
        intake.sampled(4)
        intake.ended(late)
        seen.append(intake.window)
    assert seen[:7] == [32] * 7, "eight were held at the beginning, so eight are judged"
    assert seen[7:] == [4] * 4 + [5] * 5 + [6]


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 40), st.integers(1, 9), st.randoms(use_true_random=False))
def test_the_numbers_stay_true_whatever_happens(slots, group_size, draw):
    """The ledgers' side of the books is kept by the test: asks parked there, grants and losses in any order."""
    intake = Intake(slots, group_size)
    parked, running, number, version = 0, [], 0, 0
    for _ in range(200):
        match draw.choice(("ask", "grant", "forget", "start", "withdraw", "sample", "end", "version")):
            case "ask":
                before = intake.asked + intake.groups
                room = intake.ask()
                parked += room
                if room:
                    assert intake.generating + (intake.asked + len(intake.held) - 1) * group_size < slots
                    assert intake.window == slots or before + room <= intake.window
            case "grant":
                count = draw.randint(0, parked)
                intake.granted([TicketGrant(number + i, 0, draw.randint(version, version + 1)) for i in range(count)])
                number, parked = number + count, parked - count
            case "forget":
                count = draw.randint(0, parked)
                intake.forgotten(count)
                parked -= count
            case "start":
                held = len(intake.held)
                started = intake.start(version)
                assert all(grant.min_version <= version for grant in started)
                assert all(grant.min_version > version for grant in intake.held)
                assert len(started) + len(intake.held) == held
                running += [group_size] * len(started)
            case "withdraw" if intake.held:
                grant = draw.choice(list(intake.held))
                assert intake.withdraw([(grant.ticket, 0)]) == [(grant.ticket, 0)]
            case "sample" if any(running):
                index = draw.choice([i for i, left in enumerate(running) if left])
                samples = draw.randint(1, running[index])
                running[index] -= samples
                intake.sampled(samples)
            case "end" if 0 in running:
                running.remove(0)
                intake.ended(draw.random() < 0.5)
            case "version":
                version += 1
        assert intake.asked == parked
        assert intake.running == len(running)
        assert intake.generating == sum(running)
        assert 1 <= intake.window <= slots


def test_asks_for_no_more_than_may_be_at_work():
    intake = Intake(slots=8, group_size=1)
    assert intake.ask(3) == 3
    assert intake.ask(2) == 0, "what was asked for stays asked"
    intake.granted(grants([0, 1, 2]))
    intake.start(0)
    intake.ended(late=False)
    intake.sampled()
    assert intake.ask(3) == 1
    assert intake.ask() == 5


def test_memory_allows_what_fits_and_always_as_many_groups_as_a_step_has():
    memory = MemoryBound(100, step_groups=4)
    assert memory.at_work(0, 0) == math.inf, "no group is known yet"
    assert memory.at_work(5, 50) == 5, "those of an earlier launch are"
    memory.finished(10)
    assert [memory.at_work(kept, 10 * kept) for kept in (0, 5, 9)] == [10, 5, 1]
    assert memory.at_work(2, 95) == 2, "those of a step"
    assert memory.at_work(4, 400) == 0
    for _ in range(100):
        memory.finished(20)
    assert memory.at_work(0, 0) == 5
