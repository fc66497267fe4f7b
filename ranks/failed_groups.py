"""What a trainer makes of groups that failed: each error goes into its log, and rewards that never come end the run.

generator ── Failed ──▶ LedgerNode ── take_failures ──▶ FailedGroups: log, count those in a row
                                                        too many in a row, or all of the data ──▶ DataError
"""

from __future__ import annotations

import sys
from typing import ClassVar

from headrace.comm.errors import DataError
from headrace.comm.messages import Message
from headrace.comm.transport import Received
from headrace.ranks.contribution import Phase
from headrace.ranks.node import LedgerNode
from headrace.ranks.tickets import LedgerSpec

LEAST = 8
"""So many groups in a row may fail however small a step is."""


def failure_limit(spec: LedgerSpec, ledgers: int) -> int:
    """How many groups of one ledger may fail in a row: its share of a step. An in-order run can't replace them, so it
    ends there anyway; any other goes on at least until `LEAST`."""
    share = -(-spec.groups_per_step // ledgers)
    return share if spec.in_order else max(LEAST, share)


class FailedGroups:
    """A service of every trainer's courier; it comes before the node, to know why a step has no groups."""

    handles: ClassVar[tuple[type[Message], ...]] = ()

    def __init__(self, node: LedgerNode, limit: int) -> None:
        self._node = node
        self._limit = limit
        self._count = 0
        self._in_a_row = 0
        self._scored = 0
        """Samples with a reward, by the word of all generators, when the last group failed."""
        self._last = ""

    def receive(self, received: Received, now: float) -> None:
        """No message is for this service."""

    def tick(self, now: float) -> None:
        """Take in failures.

        Raises:
            DataError: too many in a row, or nothing but failures until the data ended.
        """
        for failed in self._node.take_failures():
            scored = sum(counters.finished_samples for counters in self._node.counters.values())
            self._in_a_row = self._in_a_row + 1 if scored == self._scored else 1
            self._scored = scored
            self._count += 1
            self._last = f"ticket {failed.ticket} failed ({failed.reason}): {failed.text.partition(chr(10))[0]}"
            print(f"ticket {failed.ticket} failed ({failed.reason}): {failed.text}", file=sys.stderr, flush=True)
        if self._in_a_row >= self._limit or (self._count and self._nothing_else()):
            raise DataError(
                f"No reward could be computed for {self._in_a_row} groups in a row; the last, {self._last}. Mend "
                "data.reward and start again, or go on by --resume from the last checkpoint. The whole errors are in "
                "the log of this rank."
            )

    def describe(self) -> str:
        """For the message of a wait; empty if no group has failed."""
        return f"; {self._count} groups have failed here, at last {self._last}" if self._count else ""

    def _nothing_else(self) -> bool:
        """Whether the data have ended and every group has failed."""
        totals = self._node.totals
        return self._node.phase is Phase.OVER and totals.failed == totals.issued
