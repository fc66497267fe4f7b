"""The last rank pulls groups from every other rank while those answer; what comes must be what was put."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from mpi4py import MPI

from headrace.comm.exchange import ExchangeConsumer, ExchangeOwner
from headrace.comm.messages import Bye, Pulled, Release
from headrace.comm.mpi import MpiTransport
from headrace.comm.schema import ExchangeError
from headrace.comm.trajectories import TRAJECTORY, TrajectoryStore, needed, trajectories_of
from headrace.comm.trajectory import Trajectory, Unit

GROUPS, SAMPLES = 5, 8
LIMIT_S = 60.0


def group(owner: int, ticket: int) -> list[Trajectory]:
    rng = np.random.default_rng([owner, ticket])
    lengths = [0, 1, *rng.integers(2, 20_000, SAMPLES - 2).tolist()]
    return [
        Trajectory(
            Unit(ticket, sample, owner),
            tokens=rng.integers(0, 50_000, length, dtype=np.int32),
            loss_mask=rng.integers(0, 2, length, dtype=np.uint8),
            logprobs=-rng.random(length, dtype=np.float32),
            versions=rng.integers(-1, 9, length, dtype=np.int32),
            reward=float(sample),
            finish="stop",
        )
        for sample, length in enumerate(lengths)
    ]


def own(transport: MpiTransport, consumer: int) -> None:
    """Answer pulls until everything has been released."""
    store = TrajectoryStore()
    service = ExchangeOwner(transport, store)
    for ticket in range(GROUPS):
        store.put(ticket, transport.rank, group(transport.rank, ticket))
    deadline = time.monotonic() + LIMIT_S
    while store.list():
        assert time.monotonic() < deadline
        for received in transport.poll():
            service.receive(received, time.monotonic())
        time.sleep(20e-6)
    transport.send(consumer, Bye(0))
    transport.close()


def consume(transport: MpiTransport) -> None:
    """Pull every group twice, whole and its tokens alone, and one that doesn't exist; then release all."""
    service = ExchangeConsumer(transport, TRAJECTORY)
    owners = range(transport.rank)
    requests = {
        service.pull(owner, [(ticket, owner)], needed(fields)): (owner, ticket, fields)
        for owner in owners
        for ticket in range(GROUPS)
        for fields in (None, ["tokens"])
    }
    unknown = service.pull(0, [(GROUPS, 0)])
    poll_until(transport, service, lambda: not service.waiting())
    for number, (owner, ticket, fields) in requests.items():
        check(service, number, owner, ticket, fields)
    try:
        service.take(unknown)
    except ExchangeError as error:
        print(f"refused: {error}", flush=True)
    for owner in owners:
        transport.send(owner, Release([(ticket, owner) for ticket in range(GROUPS)]))
    poll_until(transport, service, lambda: len(farewells) == len(owners))
    transport.close()


farewells: list[int] = []


def poll_until(transport: MpiTransport, service: ExchangeConsumer, done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    service.tick(time.monotonic())
    while not done():
        assert time.monotonic() < deadline
        for received in transport.poll():
            if isinstance(received.message, Pulled):
                service.receive(received, time.monotonic())
            else:
                farewells.append(received.source)
        time.sleep(20e-6)


def check(service: ExchangeConsumer, number: int, owner: int, ticket: int, fields: list[str] | None) -> None:
    answer = service.take(number)
    assert answer is not None
    for got, put in zip(trajectories_of(answer[ticket, owner]), group(owner, ticket), strict=True):
        assert got.unit == put.unit
        assert got.reward == put.reward
        assert np.array_equal(got.tokens, put.tokens)
        for name in ("loss_mask", "logprobs", "versions"):
            expected = getattr(put, name) if fields is None else np.empty(0)
            assert np.array_equal(getattr(got, name), expected)


def main() -> None:
    transport = MpiTransport(MPI.COMM_WORLD.Dup(), chunk_bytes=65_536)
    consumer = transport.size - 1
    if transport.rank == consumer:
        consume(transport)
    else:
        own(transport, consumer)
    MPI.COMM_WORLD.Barrier()


main()
