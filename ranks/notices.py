"""What generators are to be told of their groups, each once: those that count no more, and those that are overdue.

a group fails, is dropped, goes back ─┐
a late result counts for nothing ─────┴▶ Notices ── take_dropped ──▶ Dropped
the overdue policy strikes a group ────▶ Notices ── take_overdue ──▶ Cut, Late
"""

from __future__ import annotations

from headrace.ranks.outstanding import Key, Ticket


class Notices:
    """By generator, until they are taken."""

    def __init__(self) -> None:
        self.dropped: dict[int, list[Key]] = {}
        self.overdue: dict[int, list[Key]] = {}

    @property
    def any(self) -> bool:
        """Whether something is to be told."""
        return bool(self.dropped or self.overdue)

    def drop(self, generator: int, number: int, attempt: int) -> None:
        """The attempt counts no more: its generator may stop it and forget its data."""
        told = self.dropped.setdefault(generator, [])
        if (number, attempt) not in told:
            told.append((number, attempt))

    def drop_all(self, ticket: Ticket, but: int | None = None) -> None:
        """All attempts at a ticket but one."""
        for attempt, work in ticket.works.items():
            if attempt != but:
                self.drop(work.generator, ticket.number, attempt)

    def is_overdue(self, ticket: Ticket) -> None:
        """The step is held up by the ticket, or goes on without it."""
        if ticket.open and not ticket.overdue:
            ticket.overdue = True
            self.overdue.setdefault(ticket.generator, []).append((ticket.number, ticket.attempt))

    def take_dropped(self) -> dict[int, list[Key]]:
        """Groups that count no more though the generator may have or make them."""
        dropped, self.dropped = self.dropped, {}
        return dropped

    def take_overdue(self) -> dict[int, list[Key]]:
        """Its groups that are overdue."""
        overdue, self.overdue = self.overdue, {}
        return overdue
