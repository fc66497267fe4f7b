"""Which ticket number a ledger grants next: one that came back, otherwise the lowest that was never granted.

fresh: index, index + L, index + 2L, … ── take ──▶ outstanding ── give_back ──▶ returned ── take, first ──▶ …
"""

from __future__ import annotations

import heapq
from collections.abc import Collection

from headrace.ranks.tickets import LedgerSpec, LedgerState, require


class Numbers:
    """Those k ≡ `index` (mod `ledgers`)."""

    def __init__(self, spec: LedgerSpec, index: int, ledgers: int) -> None:
        self.fresh = index
        """The lowest that was never granted."""
        self.returned: list[tuple[int, int]] = []
        """(number, attempt of its next grant), a heap: lowest first."""
        self._spec, self._index, self._ledgers, self._most = spec, index, ledgers, spec.credits

    def next(self, step: int) -> int | None:
        """The number that `take` would give while `step` is formed; None if none is left."""
        if self.returned:
            return self.returned[0][0]
        end = self._spec.end_of_numbers(step)
        return self.fresh if end is None or self.fresh < end else None

    def take(self) -> tuple[int, int]:
        """(number, attempt) to be granted."""
        if self.returned:
            return heapq.heappop(self.returned)
        self.fresh += self._ledgers
        return self.fresh - self._ledgers, 0

    def give_back(self, number: int, attempt: int) -> None:
        """It is to be granted again, as this attempt."""
        heapq.heappush(self.returned, (number, attempt))

    def left(self, step: int) -> int:
        """How many there are while `step` is formed, counted up to C: more can't be granted."""
        end = self._spec.end_of_numbers(step)
        if end is None:
            return self._most
        fresh = max(0, -((self.fresh - end) // self._ledgers))
        return min(self._most, len(self.returned) + fresh)

    def granted_before(self) -> int:
        """How many wait that were granted before."""
        return sum(attempt > 0 for _, attempt in self.returned)

    def restore(self, whole: LedgerState) -> None:
        """Take this ledger's part of the whole run's numbers."""
        first = whole.next_fresh
        self.fresh = first + (self._index - first) % self._ledgers
        numbers = [*whole.returned, *((number, 0) for number in whole.unissued() if self._exists(number))]
        self.returned = [pair for pair in numbers if pair[0] % self._ledgers == self._index]
        heapq.heapify(self.returned)

    def check(self, name: str, outstanding: Collection[int]) -> None:
        """Raise `LedgerRuleError` if a number waits twice, or is outstanding too."""
        waiting = {number for number, _ in self.returned}
        require(len(waiting) == len(self.returned), f"{name}: a number waits twice")
        require(waiting.isdisjoint(outstanding), f"{name}: a number waits that is outstanding")

    def _exists(self, number: int) -> bool:
        return self._spec.tickets is None or number < self._spec.tickets
