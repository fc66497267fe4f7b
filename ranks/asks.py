"""The asks that wait at a ledger, by generator.

Ask(room) ─▶ PARKED ── next: generators take turns ──▶ granted
              │  ▲ └── unpark ──▶ redirected to another ledger
         lost │  │ back
              ▼  │
             ABSENT: its asks were forgotten; those that it sends all the same wait until it is heard again
"""

from __future__ import annotations

from headrace.ranks.tickets import LedgerRuleError


class Asks:
    """See the module's docstring."""

    def __init__(self) -> None:
        self.parked: dict[int, int] = {}
        """Generator → for how many groups; in this order they take turns."""
        self.absent: dict[int, int] = {}
        """Generators that are taken for lost → for how many groups they have asked since."""

    def add(self, generator: int, room: int) -> None:
        """`room` adds to what the generator asked for before. Asks of one that is absent wait until it is `back`."""
        if room < 1:
            raise LedgerRuleError(f"rank {generator} asked for {room} groups")
        asks = self.absent if generator in self.absent else self.parked
        asks[generator] = asks.get(generator, 0) + room

    def next(self) -> int:
        """Take one ask out: whose it was. The generator goes to the end of the line with the rest of its asks."""
        generator = next(iter(self.parked))
        room = self.parked.pop(generator)
        if room > 1:
            self.parked[generator] = room - 1
        return generator

    def unpark(self, room: int | None) -> dict[int, int]:
        """Take up to `room` (None: all) out again, by generator; those that have waited longest stay."""
        taken: dict[int, int] = {}
        left = self.room if room is None else min(room, self.room)
        while left:
            generator, parked = self.parked.popitem()
            taken[generator] = min(parked, left)
            left -= taken[generator]
            if parked > taken[generator]:
                self.parked[generator] = parked - taken[generator]
        return taken

    @property
    def room(self) -> int:
        """For how many groups is asked."""
        return sum(self.parked.values())

    def lost(self, generator: int) -> int:
        """The generator is gone, or taken for it: how many asks are forgotten."""
        self.absent[generator] = 0
        return self.parked.pop(generator, 0)

    def back(self, generator: int) -> None:
        """It is heard again."""
        room = self.absent.pop(generator, 0)
        if room:
            self.add(generator, room)
