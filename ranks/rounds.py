"""An all-gather among the ledgers by point-to-point messages: every round, every ledger learns what each contributed.

    ledger i, hop h ── RoundPart(round, h, parts of i, i+1, …) ─▶ ledger i - 2^h        (indices modulo L)

After hop h a ledger holds the parts of the 2^(h+1) ledgers from its own index upwards, so ceil(log2 L) messages per
ledger make a round (Bruck et al. 1997, doi 10.1109/71.642949). A ledger may be one round ahead of another, never two:
to end a round it needs a part of everyone.
"""

from __future__ import annotations

from collections.abc import Callable

from headrace.comm.messages import RoundPart
from headrace.ranks.tickets import require


class Rounds:
    """One ledger's end of the rounds. No I/O, no clock: `send(index of ledger, message)` is given."""

    def __init__(self, index: int, ledgers: int, send: Callable[[int, RoundPart], None]) -> None:
        self.round = 0
        """The round in progress, or the next to begin."""
        self.idle = True
        """No round is in progress here."""
        self._index = index
        self._ledgers = ledgers
        self._hops = (ledgers - 1).bit_length()
        self._send = send
        self._hop = 0
        self._parts: dict[int, bytes] = {}
        self._arrived: dict[tuple[int, int], list[tuple[int, bytes]]] = {}

    def begin(self, contribution: bytes) -> list[bytes] | None:
        """Contribute to the next round; the result if it is complete at once (see `receive`)."""
        require(self.idle, f"ledger {self._index} began a round inside round {self.round}")
        self.idle, self._hop, self._parts = False, 0, {self._index: contribution}
        self._send_hop()
        return self._advance()

    def receive(self, part: RoundPart) -> list[bytes] | None:
        """Take one hop. Returns the contributions by ledger index once, when the round is complete."""
        key = (part.round, part.hop)
        current = (self.round, self._hop) if not self.idle else (self.round, 0)
        late = key < current or part.round > self.round + 1 or part.hop >= self._hops or key in self._arrived
        require(not late, f"ledger {self._index} at round and hop {current} was sent {key}")
        self._arrived[key] = part.parts
        return self._advance()

    @property
    def peer_began(self) -> bool:
        """Another ledger waits in the round that hasn't begun here."""
        return self.idle and bool(self._arrived) and (self.round, 0) in self._arrived

    @property
    def waits_for(self) -> int | None:
        """Index of the ledger whose hop is due."""
        return None if self.idle else (self._index + (1 << self._hop)) % self._ledgers

    def _advance(self) -> list[bytes] | None:
        if self.idle:
            return None
        while self._hop < self._hops:
            parts = self._arrived.pop((self.round, self._hop), None)
            if parts is None:
                return None
            self._parts.update(parts)
            self._hop += 1
            self._send_hop()
        self.idle = True
        self.round += 1
        return [self._parts[index] for index in range(self._ledgers)]

    def _send_hop(self) -> None:
        if self._hop == self._hops:
            return
        distance = 1 << self._hop
        indices = [(self._index + k) % self._ledgers for k in range(min(distance, self._ledgers - distance))]
        target = (self._index - distance) % self._ledgers
        self._send(target, RoundPart(self.round, self._hop, [(i, self._parts[i]) for i in indices]))
