"""The sample exchange between 8,192 producers and 16 consumers, in one process and on a virtual clock.

The services, the stores and the wire format are the real ones, so what is said about groups is exact. What is in them
is modelled: a few numbers, and a field that tells how many bytes they stand for.

    producer: put, at most HELD at a time ──▶ store ◀── scorer: some fields  ┐ two consumers share each producer,
                                              store ◀── trainer: everything  ┘ at most WINDOW questions each
                                              forgotten ◀── release
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from headrace.comm.columns import Group
from headrace.comm.exchange import EAGER_BYTES, ExchangeConsumer, ExchangeOwner
from headrace.comm.messages import Key, Message
from headrace.comm.sample_exchange import Schema, fixed, ragged
from headrace.comm.simulated import SimulatedNetwork, SimulatedTransport
from headrace.comm.store import SampleStore
from headrace.comm.transport import Buffer

SCHEMA = Schema(
    {"tokens": ragged(np.int32), "payload": ragged(np.uint8, optional=True), "stands_for": fixed(np.int64)},
    ("producer", "number"),
)
CONSUMERS = 16
GROUPS = 4
"""Of each producer."""
HELD = 2
"""Groups that a producer keeps at most."""
WINDOW = 64
"""Questions of one consumer that aren't answered yet, at most."""
PATIENCE_S = 0.2
TICK_S = 0.01
LONGEST_DELAY_S = 0.05
LIMIT_S = 60.0
"""By the virtual clock."""


class Network(SimulatedNetwork):
    """Knows who will hear something, and counts what is said."""

    def __init__(self, size: int) -> None:
        super().__init__(size, seed=1, delay=lambda source, target, rng: rng.uniform(0.0, LONGEST_DELAY_S))
        self.under_way: Counter[int] = Counter()
        """Messages by their target."""
        self.said: Counter[type[Message]] = Counter()
        self.frame_bytes = 0

    def transport(self, rank: int) -> Transport:
        return Transport(self, rank)

    def _send(self, source: int, target: int, frame: bytes, buffers: Sequence[Buffer]) -> None:
        self.under_way[target] += 1
        self.frame_bytes += len(frame)
        super()._send(source, target, frame, buffers)


class Transport(SimulatedTransport):
    _network: Network

    def send(self, target: int, message: Message, buffers: Sequence[Buffer] = ()) -> None:
        self._network.said[type(message)] += 1
        super().send(target, message, buffers)


def modelled_bytes(producer: int) -> int:
    """1 kB to 64 MB."""
    return 1000 * (8 * producer + 1)


def sample(producer: int, number: int, row: int) -> dict[str, Any]:
    """One of a hundred has a column that is too large for a header."""
    large = (producer + number) % 100 == 0
    return {
        "tokens": np.arange(row + 3, dtype=np.int32) + producer + number,
        "payload": np.full(EAGER_BYTES, number, np.uint8) if large else None,
        "stands_for": modelled_bytes(producer),
    }


class Producer:
    """A rank that keeps groups."""

    def __init__(self, network: Network, rank: int) -> None:
        self.rank, self.made = rank, 0
        self.store = SampleStore(SCHEMA)
        self.most_groups = 0
        self._transport = network.transport(rank)
        self._owner = ExchangeOwner(self._transport, self.store)

    def hear(self, now: float) -> int:
        arrived = self._transport.poll()
        for received in arrived:
            self._owner.receive(received, now)
        return len(arrived)

    def tick(self, now: float) -> None:
        self._owner.tick(now)

    def make(self) -> None:
        """What there is room for."""
        while self.made < GROUPS and len(self.store.list()) < HELD:
            self.store.put((self.rank, self.made), [sample(self.rank, self.made, row) for row in range(2)])
            self.made += 1
            self.most_groups = max(self.most_groups, len(self.store.list()))


class Books:
    """What has come to whom."""

    def __init__(self) -> None:
        self.came: dict[str, Counter[Key]] = {"scorer": Counter(), "trainer": Counter()}
        self.trained: Counter[int] = Counter()
        """By producer."""
        self.stood_for = 0
        """Bytes that were modelled."""


class Consumer:
    """A rank that reads from its share of the producers, under two names."""

    def __init__(self, network: Network, rank: int, producers: Sequence[int], books: Books) -> None:
        self.service = ExchangeConsumer(network.transport(rank), SCHEMA)
        self._transport = self.service._transport
        self._idle = [*producers]
        random.Random(rank).shuffle(self._idle)
        self._books = books
        self._asked: dict[int, tuple[int, str]] = {}
        """Number of a question → producer and name."""
        self.most_asked = 0

    @property
    def done(self) -> bool:
        return not self._idle and not self._asked

    def turn(self, now: float) -> int:
        arrived = self._transport.poll()
        for received in arrived:
            self.service.receive(received, now)
        for number, (producer, name) in list(self._asked.items()):
            groups = self.service.take(number)
            if groups is not None:
                del self._asked[number]
                self._read(producer, name, groups)
        while self._idle and len(self._asked) < WINDOW:
            producer = self._idle.pop()
            if self._books.trained[producer] < GROUPS:
                self._ask(producer, "scorer")
        self.most_asked = max(self.most_asked, len(self._asked))
        self.service.tick(now)
        return len(arrived)

    def _ask(self, producer: int, name: str) -> None:
        if name == "scorer":
            number = self.service.consume(producer, name, HELD, ["tokens"], patience_s=PATIENCE_S)
        else:
            number = self.service.consume(producer, name, HELD, after="scorer")
        self._asked[number] = producer, name

    def _read(self, producer: int, name: str, groups: dict[Key, Group[Key]]) -> None:
        self._books.came[name].update(groups.keys())
        assert all(self._books.came[name][key] == 1 for key in groups), f"{name} got one of {[*groups]} twice"
        for (_, number), group in groups.items():
            for row, found in enumerate(group):
                sent = sample(producer, number, row)
                assert all(np.array_equal(found[field], sent[field]) for field in found), (producer, number, row)
                self._books.stood_for += found.get("stands_for", 0)
        if name == "scorer":
            self._ask(producer, "trainer")
            return
        self._books.trained[producer] += len(groups)
        if groups:
            self.service.release(producer, groups)
        self._idle.insert(0, producer)


def run(count: int) -> tuple[Network, list[Producer], list[Consumer], Books]:
    """All of it, until every group of every producer has been trained and released."""
    network, books = Network(count + CONSUMERS), Books()
    producers = [Producer(network, rank) for rank in range(count)]
    consumers = [
        Consumer(network, count + n, [r for r in range(count) if (r - n) % CONSUMERS < 2], books)
        for n in range(CONSUMERS)
    ]
    while not all(consumer.done for consumer in consumers) or +network.under_way:
        for rank in [*+network.under_way]:
            if rank < count:
                network.under_way[rank] -= producers[rank].hear(network.now)
        for producer in producers:
            producer.make()
            producer.tick(network.now)
        for rank, consumer in enumerate(consumers, count):
            network.under_way[rank] -= consumer.turn(network.now)
        network.advance(TICK_S)
        assert network.now < LIMIT_S, f"trained: {sum(books.trained.values())} of {count * GROUPS}"
    return network, producers, consumers, books


@pytest.mark.parametrize("count", [256, pytest.param(8192, marks=pytest.mark.slow)])
def test_every_group_of_every_producer_comes_once_under_each_name_and_nothing_piles_up(count: int) -> None:
    network, producers, consumers, books = run(count)
    expected = {(producer, number): 1 for producer in range(count) for number in range(GROUPS)}
    assert books.came == {"scorer": expected, "trainer": expected}
    assert books.stood_for == sum(map(modelled_bytes, range(count))) * 2 * GROUPS
    assert max(producer.most_groups for producer in producers) == HELD
    assert all(producer.store.list() == [] for producer in producers)
    assert all(consumer.most_asked <= WINDOW for consumer in consumers)
    assert all(consumer.service.waiting() == [] for consumer in consumers)
    groups = count * GROUPS
    assert network.said.total() < 8 * groups, network.said
    assert network.frame_bytes < 1000 * groups
