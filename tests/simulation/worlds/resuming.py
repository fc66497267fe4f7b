"""How a run goes on that was killed or stopped: from a checkpoint, as another world."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from headrace.ranks.tickets import LedgerState, SavedGroup
from worlds.generators import Group, Key
from worlds.setup import Setup
from worlds.world import Start, World


def resumed(world: World, setup: Setup, choose: Callable[[int], int], every: int = 1, journal: bool = True) -> World:
    """The world that goes on from the newest checkpoint, the last step divisible by `every` that all ledgers had saved.
    With `journal` some finished groups' data have survived and are found at generators of the new world."""
    step = _checkpoint(world, every)
    parts = [msgspec.json.decode(text, type=LedgerState) for text, _ in world.saved[step].values()]
    finished = [group for part in parts for group in part.finished]
    owners = {g.ticket: setup.ledgers + choose(setup.generators) for g in finished if journal and choose(3)}
    whole = LedgerState.merge(parts, owners)
    counting = {g.ticket for g in whole.readmit(setup.spec).finished}  # generators are told to forget the others
    held = [(owners[g.ticket], *_data(g)) for g in finished if g.ticket in counting]
    ends = {ticket for _, tickets in world.saved[step].values() for ticket in tickets}
    return World(setup, Start(step, whole, world.trained[:step], ends, held))


def _checkpoint(world: World, every: int) -> int:
    whole = [step for step, parts in world.saved.items() if len(parts) == len(world.nodes)]
    return max((step for step in whole if step % every == 0), default=min(whole))


def _data(group: SavedGroup) -> tuple[Key, Group]:
    data = {s.sample: s.spans or ((s.born, s.response_tokens),) for s in group.samples}
    return (group.ticket, group.samples[0].attempt), data
