"""What a ledger puts into a round, and the phases of a step, which results of rounds change.

    FORMING ── a batch can be formed ──▶ SHARING ── its groups are known everywhere ──▶ PULLING ── all have ──▶ TRAINING
      ▲ ▲                                  │                                              │      their data        │
      │ └─── undone: data are lost ────────┴──────────────────────────────────────────────┘                        │
      └───── end_step, by each ledger in its own time ─────────────────────────────────────────────────────────────┘

or, when nothing is left to train, from FORMING to OVER.
"""

from __future__ import annotations

from enum import Enum

import msgspec

from headrace.ranks.forming import Standing
from headrace.ranks.tickets import FormedGroup, TicketCounts


class Phase(Enum):
    """Where the step stands."""

    FORMING = "forming"
    SHARING = "sharing"
    PULLING = "pulling"
    TRAINING = "training"
    OVER = "over"


class Contribution(msgspec.Struct, frozen=True, array_like=True):
    """What a ledger puts into a round."""

    phase: Phase
    standing: Standing
    chosen: list[FormedGroup]
    """In SHARING: the groups chosen here."""
    pulled: bool
    """In PULLING: the replica of this ledger has the data of its groups."""
    undo: list[int]
    """Tickets of the batch whose data are lost, found by the replica of this ledger."""
    counts: TicketCounts
    ending: bool
    """No further step is to be formed: the run is asked to stop."""
