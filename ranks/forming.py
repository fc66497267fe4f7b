"""What all ledgers compute alike from one snapshot of small counts: pure functions.

The snapshot is one `Standing` per ledger, gathered by a round (`ranks/rounds.py`). `B` groups make a step; a group has
a deadline, the last step that may train it.

- `decide`: can step v be formed, and from how many groups of which deadline of which ledger; which unfinished groups
  are overdue;
- `credit_moves`: which offered credits go to which ledger that wants some;
- `redirection`: whether parked asks should go to another ledger;
- `partition`: which replica trains which of the chosen groups.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from heapq import heapify, heapreplace
from typing import TYPE_CHECKING, NamedTuple

import msgspec

if TYPE_CHECKING:
    from headrace.ranks.tickets import LedgerSpec


class Standing(msgspec.Struct, frozen=True, array_like=True):
    """What one ledger tells the others in a round."""

    step: int
    """The step that it forms or trains."""
    finished: dict[int, int]
    """Deadline → finished groups, not chosen yet."""
    unfinished: dict[int, int]
    """Deadline → groups granted, started or not."""
    chosen: int
    """Groups in the step that is being trained."""
    credits: int
    """Free credits, offered ones included."""
    undealt: int
    """Credits earned by all ledgers since the last publication; every ledger says the same."""
    offer: int
    """Credits held back for this round, that may be given away by its result."""
    wants: int
    """Asks that it could grant had it more credits."""
    numbers: int
    """Ticket numbers left, counted up to C."""
    next_number: int
    """The lowest of them; -1 if there is none."""


Choice = list[dict[int, int]]
"""By ledger: deadline → how many groups."""


class Decision(NamedTuple):
    """What a round's snapshot allows."""

    taken: Choice | None
    """Finished groups that make the step; an empty choice when the run is over, None: wait."""
    struck: Choice | None = None
    """Unfinished groups that the overdue policy strikes; None: none."""


def decide(standings: Sequence[Standing], spec: LedgerSpec) -> Decision:
    """The batch of the step that all standings name, and what the overdue policy does if there is none.

    The policy strikes unfinished groups without which the step could go on: those due by this step and, once a whole
    batch is there, those of later deadlines that would be too many then. `wait` only has it said, once a whole batch of
    others is there. `cut` (and `drop` by sample) asks for them, and they make a later batch; `drop` and `mask` go on
    without them at once, so there must be a whole batch of others. At the end of the data, when only struck groups are
    left, nothing else is waited for.
    """
    size, step = spec.groups_per_step, standings[0].step
    finished, unfinished = _totals(standings)
    if finished.total() >= size or is_end_of_data(standings):
        taken = _earliest(finished, size)
        if in_time(finished - taken + unfinished, step, size):
            return Decision(_shares(taken, [s.finished for s in standings], step))
    taken = _earliest(finished, size)
    # Without a whole batch only those due by this step hold it up; the earliest B are always a batch that is in time.
    at_stake = unfinished if finished.total() >= size else Counter({d: n for d, n in unfinished.items() if d <= step})
    struck = _overdue(finished - taken, at_stake, step, size)
    alone = struck == unfinished and not any(s.numbers for s in standings)
    shares = _shares(struck, [s.unfinished for s in standings], step) if struck else None
    if spec.overdue == "cut" or spec.by_sample:
        return Decision(None, shares if finished.total() + struck.total() >= size or alone else None)
    if spec.overdue == "wait":
        return Decision(None, shares if finished.total() >= size else None)
    rest = finished - taken + unfinished - struck
    if spec.overdue == "mask":
        rest[step + spec.oldest] += struck.total()
    elif alone and finished.total() < size:
        return Decision(_shares(taken, [s.finished for s in standings], step) if taken else None, shares)
    if not struck or finished.total() < size or not in_time(rest, step, size):
        return Decision(None)
    return Decision(_shares(taken, [s.finished for s in standings], step), shares)


def _totals(standings: Sequence[Standing]) -> tuple[Counter[int], Counter[int]]:
    """(finished, unfinished) groups by deadline, over all ledgers."""
    finished: Counter[int] = Counter()
    unfinished: Counter[int] = Counter()
    for standing in standings:
        for deadline, count in standing.finished.items():
            finished[deadline] += count
        for deadline, count in standing.unfinished.items():
            unfinished[deadline] += count
    return finished, unfinished


def _overdue(finished: Counter[int], unfinished: Counter[int], step: int, size: int) -> Counter[int]:
    """The fewest unfinished groups, earliest deadlines first, without which all others can be trained after `step`."""
    struck: Counter[int] = Counter()
    due = 0
    for deadline in sorted(finished | unfinished):
        due += finished[deadline] + unfinished[deadline]
        excess = due - (deadline - step) * size
        for earlier in sorted(d for d in unfinished if d <= deadline):
            count = min(excess, unfinished[earlier] - struck[earlier])
            if count > 0:
                struck[earlier] += count
                excess -= count
                due -= count
    return struck


def _shares(counts: Counter[int], rooms: Sequence[Mapping[int, int]], step: int) -> Choice:
    """Divide counts by deadline over the ledgers, one at a time in an order that rotates with the step."""
    choice: Choice = [{} for _ in rooms]
    for deadline, count in counts.items():
        shares = deal(count, [room.get(deadline, 0) for room in rooms], step)
        for share, ledger in zip(shares, choice, strict=True):
            if share:
                ledger[deadline] = share
    return choice


def is_end_of_data(standings: Sequence[Standing]) -> bool:
    """Nothing is unfinished and no number is left anywhere."""
    return not any(s.unfinished or s.numbers for s in standings)


def in_time(others: Counter[int], step: int, size: int) -> bool:
    """Whether tickets with these deadlines, none of them in the batch of `step`, can all be trained by the later steps:
    for every d ≥ step at most (d - step)·size are due by d."""
    due = 0
    for deadline in sorted(others):
        due += others[deadline]
        if due > (deadline - step) * size:
            return False
    return True


def _earliest(finished: Counter[int], size: int) -> Counter[int]:
    taken: Counter[int] = Counter()
    for deadline in sorted(finished):
        taken[deadline] = min(finished[deadline], size - taken.total())
    return +taken


def deal(count: int, rooms: Sequence[int], start: int) -> list[int]:
    """Deal `count` things one at a time, round-robin from `start`, giving no one more than their room."""
    given = [0] * len(rooms)
    count = min(count, sum(rooms))
    place = start
    while count:
        place %= len(rooms)
        if given[place] < rooms[place]:
            given[place] += 1
            count -= 1
        place += 1
    return given


def credit_moves(standings: Sequence[Standing], turn: int) -> list[int]:
    """By ledger: credits that it gains (or, negative, gives away) by this round. Credits move only between ledgers at
    the same step, or one could be granted with an older `min_version` than its giver would have used."""
    if not same_step(standings):
        return [0] * len(standings)
    offers, wants = [s.offer for s in standings], [s.wants for s in standings]
    moved = min(sum(offers), sum(wants))
    taken, given = deal(moved, offers, turn), deal(moved, wants, turn)
    return [gain - loss for gain, loss in zip(given, taken, strict=True)]


def same_step(standings: Sequence[Standing]) -> bool:
    return len({s.step for s in standings}) == 1


def redirection(
    standings: Sequence[Standing], here: int, next_number: int | None, margin: int
) -> tuple[int, int | None]:
    """(ledger, room): to which ledger asks parked at ledger `here` should go, and how many; None means all of them.

    `next_number` is the lowest number left here by now; None if there is none, and then all asks go. Some go when
    another ledger that could grant more asks is over `margin` numbers behind, so that its tickets don't wait for last.
    """
    others = [(s.next_number, index) for index, s in enumerate(standings) if index != here and s.numbers]
    if next_number is None:
        return (min(others)[1], None) if others else (here, 0)
    behind = [(n, i) for n, i in others if not standings[i].wants and next_number - n > margin]
    if not behind:
        return here, 0
    lowest, index = min(behind)
    return index, (next_number - lowest) // len(standings)


def partition(costs: Sequence[int], replicas: int) -> list[int]:
    """The replica of each group, so that sums of costs are balanced: the dearest group first, each to the replica with
    the least so far (Graham's LPT rule, at most 4/3 of the best possible maximum). No replica goes without when there
    are as many groups as replicas."""
    loads = [(0, 0, replica) for replica in range(replicas)]
    heapify(loads)
    placed = [0] * len(costs)
    for group in sorted(range(len(costs)), key=costs.__getitem__, reverse=True):  # equal ones keep their order
        load, count, replica = loads[0]
        placed[group] = replica
        heapreplace(loads, (load + costs[group], count + 1, replica))
    return placed
