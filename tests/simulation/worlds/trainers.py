"""The ranks that train: each takes the formed step, pulls its groups, and ends the step when all have pulled theirs.

takes ──▶ pulls ──▶ all have pulled the same batch: trained ──▶ ends, each replica in its own time
  ▲         │
  └─────────┴── can't pull: the owner is lost, the batch is void
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from headrace.ranks.tickets import FormedGroup, FormedStep
from worlds.generators import Group
from worlds.setup import expect

if TYPE_CHECKING:
    from worlds.world import Event, World

Data = dict[int, Group]
"""Ticket → the data of its group."""


@dataclass
class Taken:
    """The formed step as one replica has it."""

    formed: FormedStep
    data: Data | None = None
    """Of its own groups, once it has pulled them."""


@dataclass
class Trainers:
    """All replicas of a world."""

    world: World
    taken: dict[int, Taken] = field(default_factory=dict)
    over: set[int] = field(default_factory=set)
    """Replicas that know that the run is over."""
    ended: set[int] = field(default_factory=set)
    """Replicas that have ended the step that is trained."""
    trained: bool = False
    """The step that all have taken has been trained."""

    def events(self, i: int) -> Iterator[Event]:
        """What replica `i` may do next."""
        taken = self.taken.get(i)
        if self.world.nodes[i]._formed is not None:
            yield ("takes", i)
        elif taken is not None and taken.data is None:
            missing = [group for group in self._own(i) if not self._is_held(group)]
            if not missing:
                yield ("pulls", i)
            absent = self.world.nodes[i].absent
            if any(group.owner in absent for group in self._own(i)) or any(
                g.owner in self.world.alive for g in missing
            ):
                yield ("cannot_pull", i)
        elif i not in self.ended and self.world.nodes[i].may_train:
            yield ("ends", i)

    def takes(self, i: int) -> None:
        formed = self.world.nodes[i].take_formed()
        assert formed is not None
        if formed.finished:
            self.over.add(i)
        else:
            self.taken[i] = Taken(formed)

    def pulls(self, i: int) -> None:
        alive = self.world.alive
        self.taken[i].data = {g.ticket: alive[g.owner].stored[g.ticket, g.attempt] for g in self._own(i)}
        self.world.nodes[i].pulled(self.taken[i].formed.formation)

    def cannot_pull(self, i: int) -> None:
        """Some owner is lost, or has forgotten its group since it was told so by a ledger that knew the batch void."""
        own = self._own(i)
        for group in filter(self._is_forgotten, own):
            text = f"generator {group.owner} was never lost and has forgotten ticket {group.ticket}"
            expect(group.owner in self.world.ever_lost, text)
        del self.taken[i]
        absent = self.world.nodes[i].absent
        self.world.nodes[i].unform([g.ticket for g in own if g.owner in absent or self._is_forgotten(g)])

    def ends(self, i: int) -> None:
        if not self.trained:
            self.trained = True
            expect(self._all_have_pulled(), "a replica trains before all have pulled the same batch")
            self.world.train(self.taken[0].formed, {t: d for taken in self.taken.values() for t, d in _data(taken)})
        step = self.taken[i].formed.step
        self.world.nodes[i].end_step(step, self.world.is_published(step + 1))
        self.ended.add(i)
        self.world.save(i)
        if len(self.ended) == len(self.world.nodes):
            self.taken, self.ended, self.trained = {}, set(), False

    def settled(self, i: int) -> int:
        """Groups of ledger `i` that are trained, though it doesn't know yet."""
        if not self.trained or i in self.ended:
            return 0
        return sum(group.ledger == i for group in self.taken[i].formed.groups)

    def wants_from(self, rank: int) -> bool:
        """Whether the generator has groups of the batch that somebody trains or is about to."""
        return any(group.owner == rank for taken in self.taken.values() for group in taken.formed.groups)

    def _own(self, i: int) -> list[FormedGroup]:
        return [group for group in self.taken[i].formed.groups if group.replica == i]

    def _is_held(self, group: FormedGroup) -> bool:
        owner = self.world.alive.get(group.owner)
        return owner is not None and (group.ticket, group.attempt) in owner.stored

    def _is_forgotten(self, group: FormedGroup) -> bool:
        return group.owner in self.world.alive and not self._is_held(group)

    def _all_have_pulled(self) -> bool:
        """Whether all have pulled the same batch, so that the optimizer step can be done."""
        keys = {(taken.formed.step, taken.formed.formation) for taken in self.taken.values()}
        pulled = all(taken.data is not None for taken in self.taken.values())
        return len(self.taken) == len(self.world.nodes) and len(keys) == 1 and pulled


def _data(taken: Taken) -> Iterator[tuple[int, Group]]:
    assert taken.data is not None
    yield from taken.data.items()
