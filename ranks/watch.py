"""Between two rounds of the ledgers: would another round have a result?

    ledger i ── Progress(round, standing) ─▶ the watcher of that round ──▶ begins the round as soon as it is worth it

Every ledger computes the watcher alike; it changes with the round. Ledgers tell it what others may wait for: a finished
group, a ticket that was given back, an end of step, credits or asks that have become free. So a round begins exactly
when a step can be formed, whatever the number of ledgers, and nobody needs to guess. A word that comes too late does no
harm: it is in the contribution of its sender.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from headrace.ranks import forming
from headrace.ranks.forming import Decision, Standing
from headrace.ranks.tickets import LedgerSpec


class Watch:
    """The newest standing of every ledger, since the last round."""

    def __init__(
        self, spec: LedgerSpec, standings: Sequence[Standing], moves: Sequence[int], forming: bool, ending: bool
    ) -> None:
        """`standings` and `moves` (of credits) are those of the last round. `forming`: it left all ledgers waiting for
        a batch. `ending`: no further step is to be formed."""
        self._spec, self._ending, self._forming = spec, ending, forming
        self.standings = [_after(standing, moved) for standing, moved in zip(standings, moves, strict=True)]
        self._counted = False
        self._steps: Counter[int] = Counter()
        self._finished: Counter[int] = Counter()
        self._unfinished: Counter[int] = Counter()
        self._all_finished = self._all_unfinished = 0
        self._credits = self._wants = self._numbers = 0
        self._known = Decision(None)
        """What the last round decided."""
        self._formable: bool | None = None
        """As far as it was asked since the last update."""

    def update(self, index: int, standing: Standing) -> None:
        """Where ledger `index` stands now."""
        self._add_up()
        self._count(self.standings[index], -1)
        self.standings[index] = standing
        self._count(standing, 1)
        self._formable = None

    def formable(self) -> bool:
        """A round would now form the step, or strike overdue groups that the last one didn't."""
        if self._formable is None:
            self._add_up()
            self._formable = self._has_result()
        return self._formable

    def _has_result(self) -> bool:
        taken, struck = self._decide()
        if taken is not None:
            return True
        return struck is not None and bool(Counter(struck[0]) - Counter((self._known.struck or [{}])[0]))

    @property
    def credits_meet_asks(self) -> bool:
        """A round would now move credits."""
        self._add_up()
        return self._wants > 0 and self._credits > 0 and self._same_step

    @property
    def lacks_groups(self) -> bool:
        """What is outstanding doesn't make a step: only new grants do."""
        self._add_up()
        return self._all_finished + self._all_unfinished < self._spec.groups_per_step

    @property
    def _same_step(self) -> bool:
        return len(self._steps) == 1

    def _decide(self) -> Decision:
        if not self._same_step:
            return Decision(None)
        step = self.standings[0].step
        if step >= self._spec.steps or self._ending:
            return Decision([{}])
        if self._spec.overdue == "wait" and self._more and self._surely_waits(step):
            return Decision(None)
        return forming.decide([self._sum()], self._spec)

    def _surely_waits(self, step: int) -> bool:
        """Seen at a glance: groups are too few, or some that the last round found overdue are still unfinished."""
        known = self._known.struck is not None and self._unfinished[step] > 0
        return known or self._all_finished < self._spec.groups_per_step

    @property
    def _more(self) -> bool:
        """There is something to wait for."""
        return self._numbers > 0 or self._all_unfinished > 0

    def _sum(self) -> Standing:
        """All ledgers as one: it allows what they allow together."""
        return Standing(
            step=self.standings[0].step,
            finished=dict(+self._finished),
            unfinished=dict(+self._unfinished),
            chosen=0,
            credits=self._credits,
            undealt=0,
            offer=0,
            wants=self._wants,
            numbers=self._numbers,
            next_number=-1,
        )

    def _add_up(self) -> None:
        """Only a watcher needs the sums, so they are made when they are asked for."""
        if not self._counted:
            self._counted = True
            for standing in self.standings:
                self._count(standing, 1)
            self._known = self._decide() if self._forming else self._known

    def _count(self, standing: Standing, sign: int) -> None:
        self._steps[standing.step] += sign
        if not self._steps[standing.step]:
            del self._steps[standing.step]
        for deadline, count in standing.finished.items():
            self._finished[deadline] += sign * count
            self._all_finished += sign * count
        for deadline, count in standing.unfinished.items():
            self._unfinished[deadline] += sign * count
            self._all_unfinished += sign * count
        self._credits += sign * standing.credits
        self._wants += sign * standing.wants
        self._numbers += sign * standing.numbers


def _after(standing: Standing, moved: int) -> Standing:
    """The standing once the credits that the round moved are granted."""
    if not moved:
        return standing
    return msgspec.structs.replace(
        standing, credits=standing.credits + min(moved, 0), wants=standing.wants - max(moved, 0)
    )
