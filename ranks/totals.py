"""What a ledger counts over the whole run, restarts included, so that every ticket has exactly one end:

issued = trained + dropped + failed + outstanding + returned
"""

from __future__ import annotations

from headrace.ranks.tickets import LedgerState, TicketCounts, add_counts


class Totals:
    """Running totals of one ledger; after a resume ledger 0 carries those of before."""

    def __init__(self) -> None:
        self.issued = 0
        self.trained = 0
        self.superseded = 0
        """Reports that counted for nothing."""
        self.dropped: dict[str, int] = {}
        """Reason → how many; like `failed`."""
        self.failed: dict[str, int] = {}

    def drop(self, reason: str) -> None:
        self.dropped = add_counts([self.dropped, {reason: 1}])

    def fail(self, reason: str) -> None:
        self.failed = add_counts([self.failed, {reason: 1}])

    def counts(self, outstanding: int, returned: int) -> TicketCounts:
        """`returned`: how many that were granted before wait to be granted again."""
        return TicketCounts(
            issued=self.issued,
            trained=self.trained,
            dropped=sum(self.dropped.values()),
            failed=sum(self.failed.values()),
            outstanding=outstanding,
            returned=returned,
            superseded=self.superseded,
            dropped_reasons=dict(self.dropped),
            failed_reasons=dict(self.failed),
        )

    def restore(self, whole: LedgerState) -> None:
        """Carry on the totals of the whole run, its tickets that have had no end left out."""
        self.trained, self.superseded = whole.trained, whole.superseded
        self.dropped, self.failed = dict(whole.dropped), dict(whole.failed)
        self.issued += whole.trained + sum(whole.dropped.values()) + sum(whole.failed.values())
