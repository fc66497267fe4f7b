"""The pure functions of forming, against brute force over single tickets."""

from __future__ import annotations

from collections import Counter
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from headrace.comm.messages import SampleMeta
from headrace.ranks.forming import Standing, credit_moves, deal, decide, in_time, partition, redirection
from headrace.ranks.tickets import LedgerSpec, Overdue, formed_group


def spec(groups: int, overdue: Overdue = "wait", by_sample: bool = False) -> LedgerSpec:
    """D = 2: groups granted at step 5 are due at 7."""
    return LedgerSpec(groups, 2.0, 1, 1, 100, overdue=overdue, by_sample=by_sample)


Deadlines = list[tuple[int, int]]
"""(ledger, deadline) of each ticket."""


def standing(step: int, finished: list[int], unfinished: list[int], **more: int) -> Standing:
    numbers = {"chosen": 0, "credits": 0, "undealt": 0, "offer": 0, "wants": 0, "numbers": 1, "next_number": 0} | more
    return Standing(step, dict(Counter(finished)), dict(Counter(unfinished)), **numbers)


def standings_of(step: int, ledgers: int, finished: Deadlines, unfinished: Deadlines, numbers: int) -> list[Standing]:
    return [
        standing(step, [d for i, d in finished if i == k], [d for i, d in unfinished if i == k], numbers=numbers)
        for k in range(ledgers)
    ]


def may_leave(others: list[int], step: int, size: int) -> bool:
    """Whether tickets with these deadlines fit into the steps after `step`: by trying to put each into one."""
    room: Counter[int] = Counter()
    for deadline in sorted(others):
        place = next((s for s in range(step + 1, deadline + 1) if room[s] < size), None)
        if place is None:
            return False
        room[place] += 1
    return True


tickets = st.lists(st.tuples(st.integers(0, 2), st.integers(5, 8)), max_size=6)


@given(st.lists(st.integers(5, 9), max_size=9), st.integers(1, 3))
def test_in_time_means_that_a_plan_of_later_steps_exists(others: list[int], size: int) -> None:
    assert in_time(Counter(others), 5, size) == may_leave(others, 5, size)


@given(tickets, tickets, st.integers(1, 4), st.integers(0, 1))
def test_a_batch_is_formed_exactly_when_some_batch_may_be(
    finished: Deadlines, unfinished: Deadlines, size: int, numbers: int
) -> None:
    step = 5
    choice = decide(standings_of(step, 3, finished, unfinished, numbers), spec(size)).taken
    deadlines, running = [d for _, d in finished], [d for _, d in unfinished]
    short = not unfinished and not numbers
    count = min(size, len(finished)) if short else size
    allowed = [
        batch
        for batch in combinations(range(len(deadlines)), count)
        if may_leave([d for i, d in enumerate(deadlines) if i not in batch] + running, step, size)
    ]
    assert (choice is not None) == bool(allowed)
    if choice is None:
        return
    taken = [(i, d) for i, counts in enumerate(choice) for d, n in counts.items() for _ in range(n)]
    assert not Counter(taken) - Counter(finished)
    assert sorted(d for _, d in taken) == sorted(deadlines)[:count]


def test_equal_deadlines_are_taken_in_an_order_that_rotates_with_the_step() -> None:
    for step in range(3):
        choice = decide(standings_of(step, 3, [(i, 9) for i in range(3)], [], 1), spec(1)).taken
        assert choice == [{9: 1} if i == step % 3 else {} for i in range(3)]


def test_an_unfinished_group_that_is_due_is_waited_for() -> None:
    assert decide(standings_of(5, 1, [(0, 6)], [(0, 5)], 1), spec(1)).taken is None
    assert decide(standings_of(5, 1, [(0, 6)], [(0, 6)], 1), spec(1)).taken == [{6: 1}]


def test_fewer_than_a_batch_only_at_the_end_of_the_data() -> None:
    assert decide(standings_of(5, 2, [(0, 6)], [], 1), spec(2)).taken is None
    assert decide(standings_of(5, 2, [(0, 6)], [(1, 7)], 0), spec(2)).taken is None
    assert decide(standings_of(5, 2, [(0, 6)], [], 0), spec(2)).taken == [{6: 1}, {}]
    assert decide(standings_of(5, 2, [], [], 0), spec(2)).taken == [{}, {}]


def counted(choice: list[dict[int, int]] | None) -> Counter[int]:
    return sum((Counter(taken) for taken in choice or []), Counter[int]())


@given(tickets, tickets, st.integers(1, 4))
def test_drop_strikes_as_few_as_possible_and_only_when_the_others_make_a_step(
    finished: Deadlines, unfinished: Deadlines, size: int
) -> None:
    standings = standings_of(5, 3, finished, unfinished, 1)
    if decide(standings, spec(size)).taken is not None:
        return
    taken, struck = decide(standings, spec(size, "drop"))
    deadlines, running = sorted(d for _, d in finished), [d for _, d in unfinished]
    left = deadlines[size:]
    fewest = next(
        (
            count
            for count in range(1, len(running) + 1)
            if any(may_leave([*left, *kept], 5, size) for kept in combinations(running, len(running) - count))
        ),
        None,
    )
    assert (taken is not None) == (len(deadlines) >= size and fewest is not None)
    if taken is None:
        assert struck is None
        return
    assert counted(taken) == Counter(deadlines[:size])
    assert counted(struck).total() == fewest
    assert all(
        not Counter(counts) - Counter(d for i, d in unfinished if i == k) for k, counts in enumerate(struck or [])
    )
    assert may_leave([*left, *(Counter(running) - counted(struck)).elements()], 5, size)


@given(tickets, tickets, st.integers(1, 4))
def test_mask_strikes_what_drop_strikes_when_it_can_be_trained_later(
    finished: Deadlines, unfinished: Deadlines, size: int
) -> None:
    standings = standings_of(5, 3, finished, unfinished, 1)
    dropped, masked = decide(standings, spec(size, "drop")), decide(standings, spec(size, "mask"))
    if masked.taken is None:
        return
    assert masked == dropped
    later = [7] * counted(masked.struck).total()
    rest = Counter(d for _, d in [*finished, *unfinished]) - counted(masked.taken) - counted(masked.struck)
    assert may_leave([*rest.elements(), *later], 5, size)


def test_cut_asks_for_the_groups_without_which_a_step_can_not_be_whole() -> None:
    due = standings_of(5, 2, [(0, 6)], [(1, 5), (1, 6), (0, 7)], 1)
    for policy in (spec(2, "cut"), spec(2, "drop", by_sample=True)):
        taken, struck = decide(due, policy)
        assert taken is None
        assert struck == [{}, {5: 1}]
    assert decide(due, spec(3, "cut")).struck is None, "two of three groups are no step"
    assert decide(due, spec(2)).struck is None


def test_cut_asks_for_no_group_that_is_not_due_while_finished_ones_are_lacking() -> None:
    """It would be handed back, granted again with the same deadline, and asked for again, for ever."""
    assert decide(standings_of(5, 1, [], [(0, 6), (0, 6)], 1), spec(1, "cut")).struck is None
    assert decide(standings_of(5, 1, [(0, 7)], [(0, 6), (0, 6)], 1), spec(1, "cut")).struck == [{6: 1}]


def test_at_the_end_of_the_data_nothing_but_overdue_groups_is_waited_for() -> None:
    due = standings_of(5, 1, [(0, 6)], [(0, 5)], 0)
    assert decide(due, spec(4, "cut")).struck == [{5: 1}]
    assert decide(due, spec(4, "drop")) == ([{6: 1}], [{5: 1}])
    assert decide(due, spec(4, "mask")) == (None, None), "there is nothing else to train"
    assert decide(standings_of(5, 1, [], [(0, 5)], 0), spec(4, "drop")) == (None, [{5: 1}])
    assert decide(standings_of(5, 1, [(0, 6)], [(0, 5)], 1), spec(4, "drop")) == (None, None)


@given(st.integers(0, 30), st.lists(st.integers(0, 6), min_size=1, max_size=6), st.integers(0, 20))
def test_deal_gives_what_there_is_one_at_a_time(count: int, rooms: list[int], start: int) -> None:
    given_out = deal(count, rooms, start)
    assert sum(given_out) == min(count, sum(rooms))
    assert all(0 <= share <= room for share, room in zip(given_out, rooms, strict=True))
    unfilled = [share for share, room in zip(given_out, rooms, strict=True) if share < room]
    assert not unfilled or max(given_out) <= min(unfilled) + 1


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), min_size=1, max_size=5), st.integers(0, 9))
def test_credits_move_from_offers_to_wants_and_none_is_made(ledgers: list[tuple[bool, int]], turn: int) -> None:
    standings = [standing(3, [], [], offer=n * offers, wants=n * (not offers)) for offers, n in ledgers]
    gained = credit_moves(standings, turn)
    assert sum(gained) == 0
    assert sum(n for n in gained if n > 0) == min(sum(s.offer for s in standings), sum(s.wants for s in standings))
    assert all(-s.offer <= n <= s.wants for n, s in zip(gained, standings, strict=True))


def test_no_credit_moves_between_ledgers_at_different_steps() -> None:
    assert credit_moves([standing(3, [], [], offer=1), standing(4, [], [], wants=1)], 0) == [0, 0]


def test_asks_go_where_numbers_are_left_or_lag_behind() -> None:
    here = standing(0, [], [], numbers=0, next_number=-1)
    full, hungry = standing(0, [], [], next_number=41), standing(0, [], [], next_number=20, wants=1)
    assert redirection([here, full, hungry], 0, None, 8) == (2, None)
    assert redirection([here, here], 0, None, 8) == (0, 0)
    assert redirection([here, full, hungry], 0, 48, 8) == (0, 0)
    assert redirection([here, full, hungry], 0, 71, 8) == (1, 10)


@given(st.lists(st.integers(0, 50), max_size=12), st.integers(1, 5))
def test_partition_is_balanced_and_leaves_no_replica_out(tokens: list[int], replicas: int) -> None:
    placed = partition(tokens, replicas)
    loads = [sum(t for t, r in zip(tokens, placed, strict=True) if r == replica) for replica in range(replicas)]
    assert len(set(placed)) == min(replicas, len(tokens))
    assert max(loads) <= sum(tokens) / replicas + max(tokens, default=0)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=7))
def test_partition_over_two_is_within_a_sixth_of_the_best(tokens: list[int]) -> None:
    """Graham 1969: LPT on m machines is at most 4/3 - 1/(3m) of the optimum, 7/6 for two."""
    placed = partition(tokens, 2)
    longest = max(sum(t for t, r in zip(tokens, placed, strict=True) if r == k) for k in (0, 1))
    subsets = [sum(c) for n in range(len(tokens) + 1) for c in combinations(tokens, n)]
    best = min(max(part, sum(tokens) - part) for part in subsets)
    assert longest <= best * 7 / 6


def test_long_sequences_count_for_their_attention() -> None:
    """Eight sequences of 1,000 tokens cost less than one of 8,000: by tokens the two groups would be alike."""
    samples = {0: [8_000], 1: [1_000] * 8, 2: [1_000] * 4, 3: [1_000] * 4}
    groups = [
        formed_group(n, 0, 0, 0, [SampleMeta(n, i, 0, 0, 0, t, 0.0) for i, t in enumerate(each)], 4_000, 0)
        for n, each in samples.items()
    ]
    assert [group.cost for group in groups] == [8_000 + 16_000, 8 * 1_250, 4 * 1_250, 4 * 1_250]
    assert partition([group.cost for group in groups], 2) == [0, 1, 1, 1]
    assert partition([group.tokens for group in groups], 2) == [0, 1, 0, 1]
