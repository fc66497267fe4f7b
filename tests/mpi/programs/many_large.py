"""Ranks 1 and 2 send many large messages to rank 0, which begins to poll when all were sent: it gets from both in turn,
in the order of each."""

from __future__ import annotations

import time

import numpy as np
from mpi4py import MPI

from headrace.comm.messages import Ask
from headrace.comm.mpi import BYTES_PER_POLL, MpiTransport

LARGE = BYTES_PER_POLL + (1 << 20)
MESSAGES = 4
LIMIT_S = 60.0

transport = MpiTransport(MPI.COMM_WORLD.Dup())


def content(rank: int, number: int) -> int:
    return rank * MESSAGES + number


def send_all() -> None:
    for number in range(MESSAGES):
        transport.send(0, Ask(number), [np.full(LARGE // 4, content(transport.rank, number), np.uint8)] * 4)
    transport.send(0, Ask(MESSAGES))


def receive_all() -> None:
    time.sleep(0.5)
    deadline = time.monotonic() + LIMIT_S
    numbers: dict[int, list[int]] = {1: [], 2: []}
    order: list[int] = []
    while len(order) < 2 * (MESSAGES + 1):
        assert time.monotonic() < deadline, "messages are missing"
        for received in transport.poll():
            assert isinstance(received.message, Ask)
            number = received.message.room
            assert [each.nbytes for each in received.buffers] == [LARGE // 4] * 4 * (number < MESSAGES)
            assert all((each == content(received.source, number)).all() for each in received.buffers)
            numbers[received.source].append(number)
            order.append(received.source)
    assert all(each == [*range(MESSAGES + 1)] for each in numbers.values())
    assert len(set(order[:MESSAGES])) == 2, f"one waited for the other: {order}"
    print("all arrived, in turn", flush=True)


receive_all() if transport.rank == 0 else send_all()
transport.close()
