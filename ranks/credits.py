"""The credits of one ledger: every grant spends one, so at most C groups are outstanding.

                            ┌────────────── set_aside ──▶ escrow ── settle ──┐ what the round moved included
                            │                                                ▼
    C, dealt round-robin ─▶ free ──── a grant ────▶ spent ── the group fails, is dropped, goes back ──▶ free
                            ▲                         │
                            │                         └── its step has ended ──▶ undealt
                            │                                                       │ a version is published
                            └──── dealt round-robin, within the window ◀── reserve ◀┘

While finished groups pile up, some earned credits stay in reserve: groups that are begun later are younger when they
are trained. Undealt credits and those in reserve are the same on all ledgers, and all deal them alike.
"""

from __future__ import annotations

from headrace.ranks import forming
from headrace.ranks.tickets import LedgerSpec, require


class Credits:
    """Those of the ledger number `index` of `ledgers`."""

    def __init__(self, spec: LedgerSpec, index: int, ledgers: int) -> None:
        self.free = 0
        """To be granted here."""
        self.escrow = 0
        """Free ones that this round may give away."""
        self._spec, self._index, self._ledgers, self._most = spec, index, ledgers, spec.credits
        self._undealt = 0
        """Earned by all ledgers since the last publication."""
        self._reserve = 0
        """Earned by all ledgers, waiting outside the window."""
        self._window = spec.credits
        """So many credits, free or spent, are in play over all ledgers."""
        self._deal_next = 0

    @property
    def undealt(self) -> int:
        """Those that no ledger holds, the reserve included."""
        return self._undealt + self._reserve

    def deal(self, credits: int) -> None:
        """Credits for all ledgers, one each in turn, from where the last deal stopped: every ledger counts alike."""
        shares = forming.deal(credits, [credits] * self._ledgers, self._deal_next)
        self.free += shares[self._index]
        self._deal_next = (self._deal_next + credits) % self._ledgers

    def set_aside(self) -> None:
        """Put all free credits into escrow: they can't be granted until `settle`."""
        self.free, self.escrow = 0, self.free

    def settle(self, gained: int) -> None:
        """The result of a round; negative: so many were given away."""
        self.free += self.escrow + gained
        self.escrow = 0

    def end_step(self, step: int, trained: int, published: bool) -> None:
        """Step `step` has ended, with `trained` groups over all ledgers. Each earns a credit, as far as the rest of the
        run needs one (after a short batch, the last, what was earned may be less than nothing)."""
        self._undealt += trained - self._spec.credits_at(step) + self._spec.credits_at(step + 1)
        if published:
            earned = max(0, self._undealt)
            self._undealt -= earned
            self._reserve += earned
        in_play = self._spec.credits_at(step + 1) - self.undealt
        dealt = max(0, min(self._reserve, self._window - in_play))
        self._reserve -= dealt
        self.deal(dealt)

    def adapt(self, left: int) -> None:
        """A step was formed that left so many finished groups over. More than two steps' worth are work done too early,
        which only gets old: a little less is begun. With less than one step's worth trainers may have to wait: more."""
        size = self._spec.groups_per_step
        if left < size:
            self._window = min(self._most, self._window + size)
        elif left > 2 * size:
            self._window = max(2 * size, self._window - -(-(left - 2 * size) // 10))

    def check(self, name: str) -> None:
        """Raise `LedgerRuleError` if credits were spent that aren't there."""
        require(self.free >= 0 and self.escrow >= 0, f"{name}: credits < 0")
