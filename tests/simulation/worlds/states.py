"""A world as bytes: whole, to go on from, and as a key, by which equal states are known."""

from __future__ import annotations

import io
import pickle
from collections import deque
from hashlib import blake2b
from types import FunctionType
from typing import Any

import msgspec

from headrace.comm.messages import Message, RoundPart
from headrace.ranks.contribution import Contribution, Phase
from headrace.ranks.ledger import Ledger
from headrace.ranks.node import LedgerNode
from headrace.ranks.rounds import Rounds
from headrace.ranks.tickets import LedgerSpec
from worlds.generators import Generator, Key
from worlds.setup import Setup
from worlds.world import Outbox, World

# Copies


class Shared:
    """What all copies of a world have in common: what never changes, and the outbox, which is empty between events.

    In a pickle it is this class called with its place."""

    objects: list[Any] = []
    places: dict[int, int] = {}

    def __new__(cls, place: int) -> Any:
        return cls.objects[place]

    @classmethod
    def place(cls, shared: object) -> int:
        if id(shared) not in cls.places:
            cls.places[id(shared)] = len(cls.objects)
            cls.objects.append(shared)
        return cls.places[id(shared)]


class Pickler(pickle.Pickler):
    def reducer_override(self, obj: object) -> Any:
        if isinstance(obj, FunctionType | Outbox | LedgerSpec | Setup):
            return Shared, (Shared.place(obj),)
        return NotImplemented


def freeze(world: World) -> bytes:
    buffer = io.BytesIO()
    Pickler(buffer, protocol=5).dump(world)
    return buffer.getvalue()


def thaw(frozen: bytes) -> World:
    world = pickle.loads(frozen)
    assert isinstance(world, World)
    return world


# Keys

SAME_FOR_ALL = {"spec", "index", "ledgers", "_ranks", "_index_of", "_generators", "_send"}
SAME_CREDITS = {"_spec", "_index", "_ledgers", "_most"}
ONLY_REPORTED = {
    "counters",
    "_counts",
    "_failures",
    "_totals",
    "_saved",
}
FOLLOWS = {"_outstanding"}  # from `_tickets`
PACE = {"_pace", "changes"}
"""When the next round begins; here it may begin at any time."""
LEFT_OUT = SAME_FOR_ALL | SAME_CREDITS | ONLY_REPORTED | FOLLOWS | PACE


def key_of(world: World) -> bytes:
    """Equal for states that can't be told apart by anything that happens later.

    What is left out: `LEFT_OUT`; what is left over from earlier steps and rounds; round numbers, but for their
    remainder by the number of ledgers, by which credits are dealt; the memory of `rules`, which follows from the
    ledgers (what has had its end is what is neither outstanding nor waits to be granted). Dicts keep their order: at
    worst, one state is visited as two."""
    rounds = min(node._rounds.round for node in world.nodes)
    trainers = world.trainers
    parts = (
        [_node(node, rounds) for node in world.nodes],
        [_channel(world, pair, queue) for pair, queue in sorted(world.channels.items()) if queue],
        [_generator(generator) for generator in world.alive.values()],
        [(i, taken.formed, taken.data) for i, taken in sorted(trainers.taken.items())],
        (trainers.over, trainers.ended, trainers.trained),
        (world.step, world.version, rounds % len(world.nodes), list(world.budget.values()), world.stopped),
        (world.silent, world.losses, world.skipped),
    )
    return blake2b(ENCODER.encode(parts), digest_size=16).digest()


def _node(node: LedgerNode, rounds: int) -> dict[str, Any]:
    kept = {name: value for name, value in node.__dict__.items() if name not in LEFT_OUT}
    kept["ledger"] = ledger = _ledger(node.ledger)
    kept["_rounds"] = _rounds(node._rounds, rounds)
    if node._rounds.idle:
        del kept["_contributed"], ledger["_told_open"]
    if node.phase is not Phase.SHARING:
        del kept["_chosen"]
    if node.phase in (Phase.FORMING, Phase.OVER):
        del kept["_batch_size"], kept["_pulled"]
    return kept


def _ledger(ledger: Ledger) -> dict[str, Any]:
    kept = {name: value for name, value in ledger.__dict__.items() if name not in LEFT_OUT}
    asks, numbers, credits = ledger.asks, ledger._numbers, ledger._credits
    kept["asks"] = list(asks.parked.items()), list(asks.absent.items())  # in this order they take turns
    kept["_numbers"] = numbers.fresh, sorted(numbers.returned)
    kept["_credits"] = {name: value for name, value in credits.__dict__.items() if name not in LEFT_OUT}
    kept["notices"] = ledger.notices.dropped, ledger.notices.overdue
    return kept


def _rounds(rounds: Rounds, first: int) -> tuple[Any, ...]:
    arrived = [(number - first, hop, _parts(parts)) for (number, hop), parts in sorted(rounds._arrived.items())]
    under_way = None if rounds.idle else (rounds._hop, _parts(sorted(rounds._parts.items())))
    return rounds.round - first, under_way, arrived


def _parts(parts: list[tuple[int, bytes]]) -> list[Any]:
    """Contributions without their counts."""
    found = [(index, msgspec.msgpack.decode(part, type=Contribution)) for index, part in parts]
    return [(index, c.phase, c.standing, c.chosen, c.pulled, c.undo, c.ending) for index, c in found]


def _channel(world: World, pair: tuple[int, int], queue: deque[Message]) -> tuple[Any, ...]:
    return pair, [_message(world, pair[1], message) for message in queue]


def _message(world: World, target: int, message: Message) -> Any:
    if isinstance(message, RoundPart):
        return message.round - world.nodes[target]._rounds.round, message.hop, _parts(message.parts)
    return message


def _generator(g: Generator) -> tuple[Any, ...]:
    held = sorted((grant.ticket, grant.attempt, grant.min_version) for grant in g.held)
    return g.rank, g.home, g.version, g.asked, held, _in_order(g.running), _in_order(g.stored)


def _in_order(by_key: dict[Key, Any]) -> list[Any]:
    return [by_key[key] for key in sorted(by_key)]


ENCODER = msgspec.msgpack.Encoder()
