"""The watcher: it sees what all ledgers together would decide, and nothing else."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.ranks import forming
from headrace.ranks.forming import Standing
from headrace.ranks.tickets import LedgerSpec, Overdue
from headrace.ranks.watch import Watch

SPEC = LedgerSpec(4, 2, 1, 1, 100)
BY_DEADLINE = st.dictionaries(st.integers(3, 5), st.integers(1, 4), max_size=3)


def standing(finished: dict[int, int], unfinished: dict[int, int], **more: int) -> Standing:
    numbers = {"step": 3, "credits": 0, "wants": 0, "numbers": 9} | more
    return Standing(finished=finished, unfinished=unfinished, chosen=0, undealt=0, offer=0, next_number=7, **numbers)


STANDINGS = st.builds(standing, BY_DEADLINE, BY_DEADLINE)


@given(st.lists(st.tuples(STANDINGS, STANDINGS), min_size=1, max_size=4), st.sampled_from(["wait", "cut", "drop"]))
def test_a_step_is_formable_when_the_ledgers_would_form_it(
    pairs: list[tuple[Standing, Standing]], overdue: Overdue
) -> None:
    spec = LedgerSpec(4, 2, 1, 1, 100, overdue=overdue)
    before, after = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    if forming.decide(before, spec).taken is not None:
        return
    watch = Watch(spec, before, [0] * len(before), forming=True, ending=False)
    assert not watch.formable()
    for index, newer in enumerate(after):
        watch.update(index, newer)
    if forming.decide(after, spec).taken is not None:
        assert watch.formable()
    elif overdue == "wait" and sum(sum(s.finished.values()) for s in after) < spec.groups_per_step:
        assert not watch.formable()


def test_nothing_is_formable_while_a_ledger_is_a_step_behind() -> None:
    ready, behind = standing({3: 4}, {}, step=3), standing({}, {}, step=2)
    watch = Watch(SPEC, [ready, behind], [0, 0], forming=True, ending=False)
    assert not watch.formable()
    watch.update(1, standing({}, {}, step=3))
    assert watch.formable()


def test_overdue_groups_that_the_last_round_struck_are_no_news() -> None:
    spec = LedgerSpec(4, 2, 1, 1, 100, overdue="cut")
    struck = standing({4: 3}, {3: 1})
    watch = Watch(spec, [struck], [0], forming=True, ending=False)
    assert not watch.formable()
    watch.update(0, standing({4: 3}, {3: 2}))
    assert watch.formable(), "another one is overdue"
    watch.update(0, standing({3: 1, 4: 3}, {}))
    assert watch.formable(), "it has ended"


def test_credits_meet_asks_once_moves_are_counted() -> None:
    giver, wanting = standing({}, {}, credits=2), standing({}, {}, wants=1)
    assert Watch(SPEC, [giver, wanting], [0, 0], forming=True, ending=False).credits_meet_asks
    assert not Watch(SPEC, [giver, wanting], [-1, 1], forming=True, ending=False).credits_meet_asks


def test_a_step_lacks_groups_when_all_that_are_outstanding_are_too_few() -> None:
    assert Watch(SPEC, [standing({3: 2}, {4: 1})], [0], forming=True, ending=False).lacks_groups
    assert not Watch(SPEC, [standing({3: 2}, {4: 2})], [0], forming=True, ending=False).lacks_groups


def test_the_end_of_the_run_is_a_result() -> None:
    last = standing({}, {}, step=SPEC.steps)
    watch = Watch(SPEC, [last, standing({}, {}, step=SPEC.steps - 1)], [0, 0], forming=False, ending=False)
    assert not watch.formable()
    watch.update(1, last)
    assert watch.formable()
