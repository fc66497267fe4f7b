"""The simulated network: order, delays, faults, and one run for one seed."""

from __future__ import annotations

import random
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.comm.messages import Ask, Message
from headrace.comm.simulated import SimulatedNetwork
from headrace.comm.transport import Buffer, Transport
from headrace.comm.wire import WireError

Trace = list[tuple[float, int, int, int]]
"""(time, target, source, number) of every message received."""


def random_delay(source: int, target: int, rng: random.Random) -> float:
    return rng.expovariate(1.0)


def numbers(transport: Transport) -> list[int]:
    return [item.message.room for item in transport.poll() if isinstance(item.message, Ask)]


def run(seed: int, size: int = 4, messages: int = 60) -> Trace:
    """Everyone sends to anyone at random times; the network's seed decides the delays only."""
    network = SimulatedNetwork(size, seed, random_delay)
    transports = [network.transport(rank) for rank in range(size)]
    choices, trace = random.Random(0), []

    def poll() -> None:
        for transport in transports:
            for item in transport.poll():
                assert isinstance(item.message, Ask)
                trace.append((network.now, transport.rank, item.source, item.message.room))

    for number in range(messages):
        transports[choices.randrange(size)].send(choices.randrange(size), Ask(number))
        network.advance(choices.random() / 10)
        poll()
    while (time := network.next_event_time()) is not None:
        network.advance_to(time)
        poll()
    return trace


@given(seed=st.integers(0, 2**32))
def test_messages_of_a_pair_keep_their_order_and_none_is_lost(seed: int) -> None:
    trace = run(seed)
    pairs = defaultdict(list)
    for _, target, source, number in trace:
        pairs[source, target].append(number)
    assert all(received == sorted(received) for received in pairs.values())
    assert sorted(number for received in pairs.values() for number in received) == list(range(60))


def test_the_same_seed_gives_the_same_run_and_another_seed_another() -> None:
    assert run(1) == run(1)
    assert run(1) != run(2)


def test_pairs_overtake_each_other() -> None:
    network = SimulatedNetwork(3, delay=lambda source, target, rng: 5.0 if source == 0 else 1.0)
    network.transport(0).send(2, Ask(0))
    network.transport(1).send(2, Ask(1))
    network.advance(10)
    assert numbers(network.transport(2)) == [1, 0]


def test_a_message_arrives_when_its_delay_is_over_and_not_before() -> None:
    network = SimulatedNetwork(2, delay=lambda source, target, rng: 5.0)
    sender, receiver = network.transport(0), network.transport(1)
    network.advance(1)
    sender.send(1, Ask(7))
    assert network.next_event_time() == 6.0
    network.advance_to(5.999)
    assert numbers(receiver) == []
    network.advance_to(6.0)
    assert network.next_event_time() == network.now
    assert numbers(receiver) == [7]
    assert network.next_event_time() is None


def test_without_a_delay_messages_are_there_at_once_even_to_oneself() -> None:
    network = SimulatedNetwork(2)
    for target in (0, 1):
        network.transport(0).send(target, Ask(target))
        assert numbers(network.transport(target)) == [target]
    assert network.transport(0).pending == 0


def test_buffers_arrive_as_copies_of_their_own() -> None:
    network = SimulatedNetwork(2)
    sent = [np.arange(5, dtype=np.uint8), np.empty(0, np.uint8)]
    network.transport(0).send(1, Ask(1), sent)
    sent[0][:] = 9
    (received,) = network.transport(1).poll()
    assert received.source == 0
    assert [buffer.tolist() for buffer in received.buffers] == [[0, 1, 2, 3, 4], []]
    assert received.buffers[0].flags.writeable


def test_what_is_under_way_from_or_to_a_killed_rank_vanishes() -> None:
    network = SimulatedNetwork(3, delay=lambda source, target, rng: 1.0)
    transports = [network.transport(rank) for rank in range(3)]
    transports[1].send(0, Ask(1))
    transports[0].send(1, Ask(2))
    transports[2].send(0, Ask(3))
    network.kill(1)
    transports[1].send(0, Ask(4))
    transports[0].send(1, Ask(5))
    network.advance(2)
    assert [numbers(transport) for transport in transports] == [[3], [], []]
    assert network.next_event_time() is None


def test_what_had_arrived_before_a_kill_stays_except_for_the_dead() -> None:
    network = SimulatedNetwork(2)
    transports = [network.transport(rank) for rank in range(2)]
    transports[0].send(1, Ask(1))
    transports[1].send(0, Ask(2))
    network.kill(1)
    assert [numbers(transport) for transport in transports] == [[2], []]


def test_a_silent_rank_neither_hears_nor_is_heard_and_then_catches_up_in_order() -> None:
    network = SimulatedNetwork(2)
    transports = [network.transport(rank) for rank in range(2)]
    transports[0].send(1, Ask(0))
    network.silence(1, until=10.0)
    for number in (1, 2):
        transports[0].send(1, Ask(number))
        transports[1].send(0, Ask(10 + number))
        network.advance(4)
        assert [numbers(transport) for transport in transports] == [[], []]
    assert network.next_event_time() == 10.0
    network.advance_to(10.0)
    assert [numbers(transport) for transport in transports] == [[11, 12], [0, 1, 2]]


def test_a_silence_can_be_extended() -> None:
    network = SimulatedNetwork(2)
    network.silence(1, until=1.0)
    network.transport(0).send(1, Ask(0))
    network.silence(1, until=2.0)
    network.advance_to(1.5)
    assert numbers(network.transport(1)) == []
    network.advance_to(2.0)
    assert numbers(network.transport(1)) == [0]


def test_there_is_no_rank_beyond_the_size() -> None:
    network = SimulatedNetwork(2)
    with pytest.raises(ValueError, match="no rank 2"):
        network.transport(0).send(2, Ask(1))
    with pytest.raises(ValueError, match="no rank -1"):
        network.transport(-1)


def test_buffers_arrive_where_the_receiver_wants_them() -> None:
    network = SimulatedNetwork(2)
    sender, receiver = network.transport(0), network.transport(1)
    memory = np.zeros(8, np.uint8)
    asked: list[tuple[int, Message, list[int]]] = []

    def place(source: int, message: Message, sizes: list[int]) -> list[Buffer]:
        asked.append((source, message, sizes))
        return [memory[5:8], memory[:2]]

    receiver.place(Ask, place)
    sender.send(1, Ask(1), [np.full(3, 7, np.uint8), np.full(2, 9, np.uint8)])
    (received,) = receiver.poll()
    assert asked == [(0, Ask(1), [3, 2])]
    assert memory.tolist() == [9, 9, 0, 0, 0, 7, 7, 7]
    assert [np.shares_memory(buffer, memory) for buffer in received.buffers] == [True, True]


def test_a_place_of_another_size_is_refused_with_the_ranks_name() -> None:
    network = SimulatedNetwork(2)
    receiver = network.transport(1)
    receiver.place(Ask, lambda source, message, sizes: [np.zeros(2, np.uint8)])
    network.transport(0).send(1, Ask(1), [np.zeros(3, np.uint8)])
    with pytest.raises(WireError, match=r"Rank 0 sent buffers of \[3\] bytes where there is room for \[2\]"):
        receiver.poll()
