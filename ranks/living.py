"""Which ranks are there. Where MPI tells of deaths (`launch.repair`), the run goes on without a generator that died.

    MpiTransport.on_lost ──▶ Living.lose ──▶ whoever waits for that generator, or sends to it: ledger, exchange, weight
                                             channel, heartbeats, evaluation, the end of the run
                                    └──────▶ PeerLostError: a trainer, the last generator, or too early

Every rank learns of a death by itself, from MPI, in its courier. Ranks don't come back.
"""

from __future__ import annotations

from collections.abc import Callable

from headrace.comm.errors import PeerLostError
from headrace.ranks.topology import RoleMap


class Living:
    """The ranks that are there, as this one knows. The courier calls `lose`; any thread may read."""

    def __init__(self, roles: RoleMap) -> None:
        self.generators = roles.generators
        """World ranks of the living ones."""
        self.lost: frozenset[int] = frozenset()
        """World ranks of the dead."""
        self.on_loss: list[Callable[[int], None]] = []
        """Called with every generator that is lost, in this order."""
        self.under_way = False
        """Whether the loss of a generator can be made up for: what comes before the first step needs all ranks."""
        self._roles = roles

    def lose(self, rank: int) -> None:
        """A rank has died.

        Raises:
            PeerLostError: the job can't go on without it.
        """
        dead = f"{self._roles.name(rank)} has died; the end of its log in the run folder may say why"
        if self._roles.role(rank) == "trainer":
            raise PeerLostError(f"{dead}. A run can only go on without generators.")
        left = tuple(generator for generator in self.generators if generator != rank)
        if not left:
            raise PeerLostError(f"{dead}. It was the last generator.")
        if not self.under_way:
            raise PeerLostError(f"{dead}. A run goes on without a generator only after it has begun.")
        self.generators, self.lost = left, self.lost | {rank}
        for tell in self.on_loss:
            tell(rank)
