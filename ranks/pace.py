"""When the next round of the ledgers begins, and what a ledger tells the watcher until then.

    what has changed ── tell ──▶ Progress ──▶ hear ──▶ the watcher's Watch ── next_round ──▶ LedgerNode.tick

Rounds bring results soon and cost messages of all ledgers. One begins

- at once, when a batch is to be shared, when it has been pulled and others wait for that, when another ledger has
  begun it;
- after `SHORTEST_PAUSE_S`, when something must be known at once, or the watcher sees that a step can be formed;
- after a share of a step, when only credits or asks would move;
- after half a step, whatever happens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from headrace.comm.messages import Progress
from headrace.ranks.contribution import Phase
from headrace.ranks.forming import Standing
from headrace.ranks.ledger import Ledger
from headrace.ranks.rounds import Rounds
from headrace.ranks.watch import Watch

SHORTEST_PAUSE_S = 0.010
"""Between the beginnings of two rounds, but for sharing what was chosen."""
LONGEST_PAUSE_S = 0.500
"""After that a round begins whatever happens; where steps are long, after half a step."""
SLOWEST_ROUND_S = 30.0
"""There is a round at least so often, however long the steps are."""
CREDIT_ROUNDS = 4
"""Rounds per step in which credits may move at least; more while they cost less than one message per trained group."""


class Pace:
    """See the module's docstring. `send(index of ledger, message)` is given."""

    def __init__(self, ledger: Ledger, rounds: Rounds, send: Callable[[int, Progress], None]) -> None:
        self.urgent = False
        """The others must know something at once."""
        self._ledger, self._rounds, self._send = ledger, rounds, send
        self._watch = Watch(ledger.spec, [ledger.standing()] * ledger.ledgers, [0] * ledger.ledgers, False, False)
        self._heard: dict[int, Progress] = {}
        """By ledger: the newest word to the watcher of the next round, from those that have ended this one before."""
        self._watcher = self._rounds.round % ledger.ledgers
        self._told = -1
        self._told_credits = self._told_lack = True
        self._began = float("-inf")
        self._step_began, self._step_s = float("inf"), 0.0
        """When the present step began; how long the last took, 0 in the first."""
        self._step_ended = True
        self._longest_pause = LONGEST_PAUSE_S
        """After the beginning of a round, until the next, whatever happens; kept, since every message asks."""

    @property
    def standings(self) -> Sequence[Standing]:
        """Of all ledgers, as far as this one knows."""
        return self._watch.standings

    # Time

    def tick(self, now: float) -> None:
        """Take the time."""
        if self._step_ended:
            self._step_ended, self._step_s, self._step_began = False, max(0.0, now - self._step_began), now
            self._set_longest_pause()

    def step_ended(self) -> None:
        """The next begins, at the next tick."""
        self._step_ended = True

    def round_begins(self, now: float) -> None:
        """What is told by now is in its contributions."""
        self._began, self.urgent, self._told = now, False, self._ledger.changes
        self._set_longest_pause()

    def next_round(self, phase: Phase, pulled: bool) -> float | None:
        """When a round begins, unless a message comes before; None: not without one."""
        if phase is Phase.OVER or not self._rounds.idle:
            return None
        if phase is Phase.PULLING:
            at_once = self.urgent or (pulled and self._rounds.peer_began)
            return self._began if at_once else self._began + LONGEST_PAUSE_S
        if phase is Phase.SHARING or self._rounds.peer_began:
            return self._began
        if self.urgent or (self._is_watcher and phase is Phase.FORMING and self._watch.formable()):
            return self._began + SHORTEST_PAUSE_S
        if (self._is_watcher and self._watch.credits_meet_asks) or self._may_redirect:
            return self._began + self._credit_pause
        return self._began + self._longest_pause

    def _set_longest_pause(self) -> None:
        self._longest_pause = max(LONGEST_PAUSE_S, min(self._likely_s / 2, SLOWEST_ROUND_S))

    @property
    def _likely_s(self) -> float:
        """How long the step takes: as the last; while there is none, as long again as by now."""
        return self._step_s or self._began - self._step_began

    @property
    def _may_redirect(self) -> bool:
        """Asks that can't be granted here could be elsewhere."""
        return self._ledger.lacks_numbers and any(standing.numbers for standing in self._watch.standings)

    @property
    def _credit_pause(self) -> float:
        """At least so long between rounds that only move credits or asks, unless the step waits for that."""
        if self._watch.lacks_groups:
            return SHORTEST_PAUSE_S
        ledgers = self._ledger.ledgers
        messages = ledgers * (ledgers - 1).bit_length()
        rounds = max(CREDIT_ROUNDS, self._ledger.spec.groups_per_step // max(1, messages))
        return max(SHORTEST_PAUSE_S, min(self._likely_s, SLOWEST_ROUND_S) / rounds)

    # Words to the watcher

    @property
    def _is_watcher(self) -> bool:
        return self._watcher == self._ledger.index

    def watch_here(self, phase: Phase) -> None:
        """The watcher's own news."""
        if self._is_watcher and self._rounds.idle and self._has_news(phase):
            self._watch.update(self._ledger.index, self._note())

    def tell(self, phase: Phase) -> None:
        """Send news to the watcher; a round that has begun, or is about to, brings them anyway."""
        on_time = self._rounds.idle and not self._rounds.peer_began and phase is not Phase.OVER
        if on_time and not self._is_watcher and self._has_news(phase):
            self._send(self._watcher, Progress(self._rounds.round, msgspec.msgpack.encode(self._note())))

    def hear(self, index: int, word: Progress) -> None:
        """A ledger may be one round ahead. What is said too late is in a contribution."""
        if word.round == self._rounds.round and self._rounds.idle:
            self._watch.update(index, msgspec.msgpack.decode(word.standing, type=Standing))
        elif word.round == self._rounds.round + 1:
            self._heard[index] = word

    def watch_from(self, standings: Sequence[Standing], moves: Sequence[int], forming: bool, ending: bool) -> None:
        """Watch for what a round has left; see `Watch`."""
        self._watcher = self._rounds.round % self._ledger.ledgers
        self._watch = Watch(self._ledger.spec, standings, moves, forming, ending)
        here = self._watch.standings[self._ledger.index]
        self._told_credits, self._told_lack = here.credits > 0, here.wants > 0
        heard, self._heard = self._heard, {}
        for index, word in heard.items():
            self.hear(index, word)

    def _has_news(self, phase: Phase) -> bool:
        """What is waited for may have come: while a step is trained that is only what lets credits move."""
        changed = self._told != self._ledger.changes and phase is Phase.FORMING
        credits = bool(self._ledger.credits)
        return changed or self._told_credits < credits or self._told_lack < self._ledger.lacks_credits

    def _note(self) -> Standing:
        """Where this ledger stands, which is then no news any more."""
        self._told = self._ledger.changes
        self._told_credits |= bool(self._ledger.credits)
        self._told_lack |= self._ledger.lacks_credits
        return self._ledger.standing()
