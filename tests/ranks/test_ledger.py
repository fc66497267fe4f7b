"""One ledger by itself: numbers of the spec, reports that count and that don't, saved states."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from headrace.comm.messages import SampleMeta, TicketGrant
from headrace.ranks.ledger import Ledger
from headrace.ranks.tickets import LedgerRuleError, LedgerSpec, LedgerState, SavedGroup

GENERATOR, OTHER = 5, 6


def spec(
    groups: int = 2, staleness: float = 1, every: int = 1, size: int = 1, steps: int = 100, **policies: Any
) -> LedgerSpec:
    return LedgerSpec(groups, staleness, every, size, steps, None, **policies)


def sample(ticket: int, born: int = 0, attempt: int = 0, index: int = 0) -> SampleMeta:
    return SampleMeta(ticket, index, attempt, born, 3, 4, 1.0)


def granted(ledger: Ledger, generator: int = GENERATOR, room: int = 1) -> list[TicketGrant]:
    ledger.ask(generator, room)
    return ledger.grant().get(generator, [])


def train_step(ledger: Ledger, published: bool = True) -> list[int]:
    """Form a step from this ledger's finished groups, the earliest deadlines first, and end it."""
    finished = ledger.contribute(escrow=False).finished
    left, taken = ledger.spec.groups_per_step, {}
    for deadline in sorted(finished):
        taken[deadline] = min(left, finished[deadline])
        left -= taken[deadline]
    chosen = ledger.deliver(0, taken)
    ledger.end_step(len(chosen), published)
    return [group.ticket for group in chosen]


@pytest.mark.parametrize(
    ("staleness", "every", "groups", "credits", "oldest"),
    [
        (0, 1, 4, 4, 0),
        (1, 1, 4, 8, 1),
        (0.5, 1, 4, 6, 1),
        (0.5, 1, 1, 1, 1),
        (1.5, 2, 3, 15, 4),
        (0, 3, 2, 6, 2),
        (0.1, 1, 10, 11, 1),
        (0.7, 1, 10, 17, 1),
        (4, 1, 8, 40, 4),
    ],
)
def test_credits_and_oldest_age(staleness: float, every: int, groups: int, credits: int, oldest: int) -> None:
    numbers = spec(groups, staleness, every)
    assert (numbers.credits, numbers.oldest) == (credits, oldest)


def test_all_credits_and_no_more_are_granted() -> None:
    ledger = Ledger(spec(2, 1.5), 0, 1)
    assert [grant.ticket for grant in granted(ledger, room=9)] == [0, 1, 2, 3, 4]
    assert ledger.parked == 4


def test_generators_take_turns() -> None:
    ledger = Ledger(spec(2, 1), 0, 1)
    ledger.ask(GENERATOR, 4)
    ledger.ask(OTHER, 4)
    assert {rank: len(grants) for rank, grants in ledger.grant().items()} == {GENERATOR: 2, OTHER: 2}


def test_credits_are_dealt_round_robin_over_ledgers_and_deals_go_on_where_they_stopped() -> None:
    ledgers = [Ledger(spec(4, 0.25), index, 3) for index in range(3)]
    assert [ledger.credits for ledger in ledgers] == [2, 2, 1]
    for ledger in ledgers:
        ledger.end_step(4, published=True)
    assert [ledger.credits for ledger in ledgers] == [3, 3, 3]


def test_credits_come_back_when_the_version_is_published() -> None:
    ledger = Ledger(spec(1, 0, every=2), 0, 1)
    for grant in granted(ledger, room=9):
        ledger.finished(GENERATOR, sample(grant.ticket))
    assert train_step(ledger, published=False) == [0]
    assert ledger.credits == 0
    assert train_step(ledger, published=True) == [1]
    assert ledger.credits == 2
    assert ledger.grant()[GENERATOR] == [TicketGrant(2, 0, 2), TicketGrant(3, 0, 2)]


def test_the_end_of_the_run_asks_for_no_more_than_it_trains() -> None:
    ledger = Ledger(spec(2, 4, steps=3), 0, 1)
    assert len(granted(ledger, room=99)) == 6
    assert ledger.credits == 0


def test_a_start_with_newer_weights_moves_the_deadline() -> None:
    ledger = Ledger(spec(2, 1), 0, 1)
    granted(ledger, room=2)
    ledger.started(GENERATOR, 0, 0, 3)
    assert ledger.contribute(escrow=False).unfinished == {4: 1, 1: 1}


def test_held_for_k_updates_a_sample_has_age_k() -> None:
    ledger = Ledger(spec(1, 4), 0, 1)
    for grant in granted(ledger, room=5):
        ledger.finished(GENERATOR, sample(grant.ticket))
    for age in range(5):
        ledger.contribute(escrow=False)
        (group,) = ledger.deliver(0, {4: 1})
        assert ledger.step - group.born == age
        ledger.end_step(1, published=True)


def test_a_group_is_finished_by_its_last_sample() -> None:
    ledger = Ledger(spec(size=2), 0, 1)
    granted(ledger)
    ledger.finished(GENERATOR, sample(0, index=1))
    assert ledger.contribute(escrow=False).finished == {}
    ledger.finished(GENERATOR, sample(0, index=0))
    assert ledger.contribute(escrow=False).finished == {1: 1}


@pytest.mark.parametrize(
    "senseless",
    [sample(0, index=0), sample(0, index=2), sample(0, index=-1), sample(77), sample(0, attempt=1, index=1)],
    ids=["repeated", "index too high", "index negative", "unknown ticket", "attempt never granted"],
)
def test_senseless_reports_are_counted_and_change_nothing(senseless: SampleMeta) -> None:
    ledger = Ledger(spec(size=2), 0, 1)
    granted(ledger)
    ledger.finished(GENERATOR, sample(0))
    before = ledger.counts()
    ledger.finished(GENERATOR, senseless)
    assert ledger.counts() == msgspec.structs.replace(before, superseded=1)
    ledger.check()


def test_reports_on_a_trained_ticket_are_superseded() -> None:
    ledger = Ledger(spec(1, 0), 0, 1)
    granted(ledger)
    ledger.finished(GENERATOR, sample(0))
    assert train_step(ledger) == [0]
    ledger.finished(GENERATOR, sample(0))
    ledger.started(GENERATOR, 0, 0, 0)
    ledger.failed(0, 0, "late")
    counts = ledger.counts()
    assert (counts.trained, counts.failed, counts.superseded) == (1, 0, 3)


def test_a_failed_group_frees_its_credit_and_another_takes_its_place() -> None:
    ledger = Ledger(spec(1, 0), 0, 1)
    granted(ledger, room=2)
    ledger.failed(0, 0, "reward_raised")
    assert ledger.grant() == {GENERATOR: [TicketGrant(1, 0, 0)]}
    counts = ledger.counts()
    assert (counts.issued, counts.failed, counts.outstanding) == (2, 1, 1)
    assert counts.failed_reasons == {"reward_raised": 1}


def test_weights_older_than_the_grant_are_a_defect() -> None:
    ledger = Ledger(spec(1, 1), 0, 1)
    granted(ledger)
    ledger.finished(GENERATOR, sample(0))
    train_step(ledger)
    assert granted(ledger) == [TicketGrant(1, 0, 1)]
    with pytest.raises(LedgerRuleError, match="rank 5 started ticket 1, granted to rank 5 with 1, with 0"):
        ledger.started(GENERATOR, 1, 0, 0)
    with pytest.raises(LedgerRuleError, match="born"):
        ledger.finished(GENERATOR, sample(1, born=0))


def test_a_lost_ticket_goes_first_as_a_new_attempt() -> None:
    ledger = Ledger(spec(1, 1), 0, 1)
    granted(ledger, room=2)
    ledger.lost(GENERATOR)
    assert ledger.counts().returned == 2
    assert granted(ledger, OTHER, 2) == [TicketGrant(0, 1, 0), TicketGrant(1, 1, 0)]
    assert ledger.counts().issued == 2


def late_ledger(size: int) -> Ledger:
    """Ticket 0 was lost by GENERATOR at version 0, and at version 1 granted to OTHER."""
    ledger = Ledger(spec(1, 1, size=size), 0, 1)
    granted(ledger, room=2)
    ledger.failed(1, 0, "make room")
    granted(ledger, OTHER)
    for index in range(size):
        ledger.finished(OTHER, sample(2, index=index))
    ledger.started(GENERATOR, 0, 0, 0)
    ledger.lost(GENERATOR)
    train_step(ledger)
    assert granted(ledger, OTHER) == [TicketGrant(0, 1, 1)]
    return ledger


def test_a_late_result_that_is_young_enough_finishes_the_group() -> None:
    ledger = late_ledger(size=1)
    ledger.finished(GENERATOR, sample(0, born=1, attempt=0))
    ledger.contribute(escrow=False)
    (group,) = ledger.deliver(0, {2: 1})
    assert (group.ticket, group.attempt, group.owner) == (0, 0, GENERATOR)
    ledger.finished(OTHER, sample(0, born=1, attempt=1))
    assert ledger.counts().superseded == 1


def test_a_late_result_that_is_too_old_is_superseded() -> None:
    ledger = late_ledger(size=1)
    ledger.finished(GENERATOR, sample(0, born=0, attempt=0))
    assert ledger.counts().superseded == 1
    assert ledger.contribute(escrow=False).finished == {}


def test_a_late_group_is_too_old_if_one_of_its_samples_has_become_so() -> None:
    ledger = late_ledger(size=2)
    ledger.finished(GENERATOR, sample(0, born=1, attempt=0, index=0))
    ledger.started(OTHER, 0, 1, 2)
    ledger.finished(GENERATOR, sample(0, born=2, attempt=0, index=1))
    assert ledger.counts().superseded == 2
    assert ledger.contribute(escrow=False).unfinished == {3: 1}


def test_a_late_result_of_a_ticket_that_waits_is_superseded() -> None:
    ledger = Ledger(spec(1, 1), 0, 1)
    granted(ledger)
    ledger.lost(GENERATOR)
    ledger.finished(GENERATOR, sample(0))
    assert (ledger.counts().superseded, ledger.counts().returned) == (1, 1)


def test_what_was_contributed_as_finished_is_not_withdrawn_before_the_result() -> None:
    ledger = Ledger(spec(1, 1), 0, 1)
    granted(ledger)
    ledger.finished(GENERATOR, sample(0))
    ledger.contribute(escrow=False)
    ledger.lost(GENERATOR)
    assert ledger.counts().outstanding == 1
    assert [group.ticket for group in ledger.deliver(0, {1: 1})] == [0]
    assert ledger.lost_chosen == {0}
    ledger.undo({0})
    assert (ledger.counts().outstanding, ledger.counts().returned) == (0, 1)


def test_escrowed_credits_are_not_granted_before_the_result() -> None:
    ledger = Ledger(spec(2, 0), 0, 1)
    assert ledger.contribute(escrow=True).offer == 2
    assert granted(ledger) == []
    ledger.deliver(-1, None)
    assert len(ledger.grant()[GENERATOR]) == 1
    assert ledger.credits == 0


def saved(ledgers: list[Ledger]) -> list[LedgerState]:
    """Through plain JSON, as a checkpoint keeps them."""
    text = json.dumps([msgspec.to_builtins(ledger.state()) for ledger in ledgers])
    return msgspec.convert(json.loads(text), list[LedgerState])


def test_a_resume_grants_again_what_was_running_and_goes_on_after_it() -> None:
    ledger = Ledger(spec(1, 2), 0, 1)
    granted(ledger, room=3)
    ledger.finished(GENERATOR, sample(0))
    ledger.finished(GENERATOR, sample(1))
    train_step(ledger)
    whole = LedgerState.merge(saved([ledger]))
    again = Ledger(spec(1, 2), 0, 1, whole)
    assert (again.step, again.published) == (1, 1)
    assert granted(again, room=9) == [TicketGrant(1, 1, 1), TicketGrant(2, 1, 1), TicketGrant(3, 0, 1)]
    counts = again.counts()
    assert (counts.issued, counts.trained, counts.outstanding, counts.returned) == (4, 1, 3, 0)


def test_a_finished_group_whose_data_survived_is_readmitted_with_its_age() -> None:
    ledger = Ledger(spec(1, 2), 0, 1)
    granted(ledger, room=2)
    ledger.finished(GENERATOR, sample(0))
    ledger.finished(GENERATOR, sample(1))
    train_step(ledger)
    again = Ledger(spec(1, 2), 0, 1, LedgerState.merge(saved([ledger]), {1: OTHER}))
    assert again.contribute(escrow=False).finished == {2: 1}
    assert again.deliver(0, {2: 1})[0].owner == OTHER
    assert again.credits == 2


def test_a_resume_with_another_number_of_ledgers_issues_every_number_once() -> None:
    numbers = LedgerSpec(2, 1, 1, 1, 100, 12)
    ledgers = [Ledger(numbers, index, 3) for index in range(3)]
    granted(ledgers[0], room=2)
    for ledger in ledgers:
        ledger.end_step(0, published=True)
    whole = LedgerState.merge(saved(ledgers)[::-1])
    found = []
    for index in range(2):
        again = Ledger(numbers, index, 2, whole)
        again._credits.free = 99
        found += [(grant.ticket, grant.attempt) for grant in granted(again, room=99)]
    assert sorted(found) == [(k, 1 if k in (0, 3) else 0) for k in range(12)]


def group(ticket: int, reserved: int, born: int | None = None) -> SavedGroup:
    return SavedGroup(ticket, 0, GENERATOR, reserved, [sample(ticket, reserved if born is None else born)])


def state(finished: list[SavedGroup], step: int) -> LedgerState:
    return LedgerState(step, 1, [(0, 100)], finished, [], 100, 90, {}, {}, 0)


def test_readmission_keeps_what_can_be_trained_in_time() -> None:
    whole = state([group(7, 4), group(5, 3), group(6, 3), group(8, 4), group(9, 2)], step=4)
    kept = whole.readmit(spec(1, 1))
    assert [g.ticket for g in kept.finished] == [5, 7]
    assert kept.returned == [(6, 1), (8, 1), (9, 1)]


def test_readmission_discards_tokens_of_versions_that_are_rolled_back() -> None:
    kept = state([group(7, 4, born=4), group(8, 4, born=5)], step=4).readmit(spec(4, 2))
    assert [g.ticket for g in kept.finished] == [7]


def test_a_masked_group_is_readmitted_late_only_by_a_run_that_masks() -> None:
    whole = state([group(7, 4, born=2)], step=4)
    assert [g.ticket for g in whole.readmit(spec(1, 1, overdue="mask")).finished] == [7]
    assert [g.ticket for g in whole.readmit(spec(1, 1)).finished] == [], "its token would be two versions old"


def struck(ledger: Ledger, deadline: int, count: int) -> None:
    """A round whose result is that unfinished groups are overdue."""
    ledger.contribute(escrow=False)
    ledger.deliver(0, None, {deadline: count})


def test_cut_tells_the_generator_once_and_takes_what_comes() -> None:
    ledger = Ledger(spec(1, 1, size=2, overdue="cut"), 0, 1)
    granted(ledger)
    struck(ledger, deadline=1, count=1)
    struck(ledger, deadline=1, count=1)
    assert ledger.notices.take_overdue() == {GENERATOR: [(0, 0)]}
    assert ledger.notices.take_overdue() == {}
    ledger.finished(GENERATOR, sample(0))
    ledger.left_out(GENERATOR, 0, 1, 0)
    assert ledger.contribute(escrow=False).finished == {1: 1}
    formed = ledger.deliver(0, {1: 1})[0]
    assert (formed.samples, formed.response_tokens) == (1, 4)


def test_a_group_of_which_nothing_is_left_is_dropped_as_overdue() -> None:
    ledger = Ledger(spec(1, 1, size=2, overdue="drop", by_sample=True), 0, 1)
    granted(ledger)
    struck(ledger, deadline=1, count=1)
    assert ledger.notices.take_overdue() == {GENERATOR: [(0, 0)]}
    for index in range(2):
        ledger.left_out(GENERATOR, 0, index, 0)
    assert ledger.counts().dropped_reasons == {"overdue": 1}
    assert ledger.credits == ledger.spec.credits
    ledger.check()


def test_drop_settles_the_overdue_and_tells_their_generators() -> None:
    ledger = Ledger(spec(1, 2, overdue="drop"), 0, 1)
    granted(ledger, room=2)
    struck(ledger, deadline=2, count=1)
    assert ledger.notices.take_dropped() == {GENERATOR: [(0, 0)]}
    assert ledger.counts().dropped_reasons == {"overdue": 1}
    assert ledger.credits == 2
    ledger.finished(GENERATOR, sample(0))
    assert ledger.counts().superseded == 1


def test_a_strike_takes_those_that_are_still_unfinished_first_but_always_as_many() -> None:
    ledger = Ledger(spec(1, 2, overdue="drop"), 0, 1)
    granted(ledger, room=3)
    ledger.contribute(escrow=False)
    ledger.finished(GENERATOR, sample(0))
    ledger.failed(1, 0, "raised")
    ledger.deliver(0, None, {2: 2})
    assert ledger.notices.take_dropped() == {GENERATOR: [(2, 0)]}, "the failed one counts, the finished one is spared"
    assert ledger.contribute(escrow=False).finished == {2: 1}
    ledger.deliver(0, None, None)


def test_mask_moves_the_deadline_and_counts_only_tokens_that_are_young_enough() -> None:
    ledger = Ledger(spec(1, 1, overdue="mask"), 0, 1)
    granted(ledger)
    ledger.started(GENERATOR, 0, 0, 0)
    for step in (1, 2):
        ledger.end_step(0, published=True)
        struck(ledger, deadline=step, count=1)
        ledger.check()
    spans = ((0, 5), (1, 3), (2, 1))
    ledger.finished(GENERATOR, SampleMeta(0, 0, 0, 0, 3, 9, 1.0, spans))
    assert ledger.contribute(escrow=False).finished == {3: 1}
    formed = ledger.deliver(0, {3: 1})[0]
    assert (formed.loss_tokens, formed.sequences, formed.born, formed.response_tokens) == (4, 1, 1, 9)


@pytest.mark.parametrize(("rewards", "kept"), [([1.0, 1.0], False), ([1.0, 0.0], True)])
def test_groups_without_variance_are_filtered_and_their_credit_is_free(rewards: list[float], kept: bool) -> None:
    ledger = Ledger(spec(1, 1, size=2, filtered_per_step=1), 0, 1)
    granted(ledger)
    for index, reward in enumerate(rewards):
        ledger.finished(GENERATOR, SampleMeta(0, index, 0, 0, 3, 4, reward))
    assert ledger.counts().dropped_reasons == ({} if kept else {"no_variance": 1})
    assert ledger.credits == ledger.spec.credits - kept
    assert ledger.notices.take_dropped() == ({} if kept else {GENERATOR: [(0, 0)]})


def test_filtering_stops_at_its_cap_until_the_next_step() -> None:
    ledgers = [Ledger(spec(8, 1, filtered_per_step=3), index, 2) for index in range(2)]
    for step in range(2):
        for ledger in ledgers:
            for grant in granted(ledger, room=3):
                ledger.finished(GENERATOR, sample(grant.ticket, born=step))
            assert ledger.counts().outstanding == 3 * (step + 1) - ledger.counts().dropped
        assert sum(ledger.counts().dropped for ledger in ledgers) == 3 * (step + 1)
        for ledger in ledgers:
            ledger.end_step(0, published=True)


def test_a_returned_ticket_is_granted_again_and_its_credit_is_free() -> None:
    ledger = Ledger(spec(), 0, 1)
    granted(ledger)
    ledger.returned(GENERATOR, 0, 0)
    assert (ledger.counts().returned, ledger.credits) == (1, ledger.spec.credits)
    assert granted(ledger, OTHER) == [TicketGrant(0, 1, 0)]
    ledger.returned(GENERATOR, 0, 0)
    assert ledger.counts().superseded == 1


def test_a_generator_taken_for_lost_gets_nothing_until_it_is_back() -> None:
    ledger = Ledger(spec(), 0, 1)
    ledger.ask(GENERATOR, 9)
    ledger.grant()
    assert ledger.lost(GENERATOR) == 5, "asks that were forgotten"
    assert ledger.lost(GENERATOR) == 0
    ledger.ask(GENERATOR, 3)
    assert ledger.grant() == {}
    ledger.asks.back(GENERATOR)
    assert [(g.ticket, g.attempt) for g in ledger.grant()[GENERATOR]] == [(0, 1), (1, 1), (2, 1)]


def test_the_owner_of_what_does_not_count_is_told_to_forget_it_and_of_what_counts_never() -> None:
    ledger = Ledger(spec(), 0, 1)
    granted(ledger)
    ledger.lost(GENERATOR)
    granted(ledger, OTHER)
    ledger.finished(GENERATOR, sample(0))
    assert ledger.notices.take_dropped() == {OTHER: [(0, 1)]}, "the late result of the first attempt counts"
    ledger.finished(GENERATOR, sample(0))
    assert ledger.notices.take_dropped() == {}
    ledger.finished(OTHER, sample(0, attempt=1))
    assert ledger.notices.take_dropped() == {OTHER: [(0, 1)]}


def test_states_that_do_not_belong_together_are_refused() -> None:
    with pytest.raises(LedgerRuleError, match="don't mix"):
        LedgerState.merge([state([], 3), state([], 4)])
    with pytest.raises(LedgerRuleError, match="saved ledgers"):
        LedgerState.merge(saved([Ledger(spec(), 1, 2)]))
