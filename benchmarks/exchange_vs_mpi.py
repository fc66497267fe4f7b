"""Pulling groups of samples from their owner, against plain MPI messages of the same bytes between the same two ranks.

    python -m benchmarks.exchange_vs_mpi [--json] [--quick]

Ours is from `pull` to trajectories in hand: ragged columns of 16 samples a group, received by a courier. Theirs is one
contiguous buffer a group, sent without being asked for, received in place into memory that was received into before;
the couriers' threads make those calls too, so that no other thread is in MPI. Before either, the two ranks greet each
other. Cases: groups of 64 MiB, four in flight, and one group of 1 GiB. GB/s, medians of interleaved rounds.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, ClassVar

import numpy as np

from benchmarks import interleaved_medians, report
from benchmarks.ranks import abort, parse_options, run_ranks
from headrace.comm.courier import Courier
from headrace.comm.exchange import ExchangeConsumer, ExchangeOwner
from headrace.comm.messages import Message, Release
from headrace.comm.mpi import MpiTransport
from headrace.comm.trajectories import COLUMN_DTYPES, TRAJECTORY, TrajectoryStore, trajectories_by_key
from headrace.comm.trajectory import Trajectory, Unit
from headrace.comm.transport import Received

CONSUMER, OWNER = 0, 1
START_TAG = 1
SAMPLES = 16
BYTES_PER_TOKEN = sum(dtype.itemsize for dtype in COLUMN_DTYPES.values())
CASES = {"64MiB": (64 << 20, 4, 16), "1GiB": (1 << 30, 1, 2)}
"""Name → (bytes of a group, groups in flight, groups a round)."""
LIMIT_S = 120.0


def trajectory(ticket: int, sample: int, tokens: int) -> Trajectory:
    columns = {name: np.full(tokens, sample, dtype) for name, dtype in COLUMN_DTYPES.items()}
    return Trajectory(Unit(ticket, sample, 0), **columns, reward=0.0, finish="stop")


def fill(store: TrajectoryStore, nbytes: int, groups: int) -> None:
    """Ragged: sample n has n + 1 parts of the tokens."""
    part = nbytes // BYTES_PER_TOKEN // (SAMPLES * (SAMPLES + 1) // 2)
    for ticket in range(groups):
        store.put(ticket, 0, [trajectory(ticket, n, part * (n + 1)) for n in range(SAMPLES)])


def pull_all(consumer: ExchangeConsumer, courier: Courier, groups: int, in_flight: int) -> float:
    """GB/s; each group is looked at and dropped when it has come."""
    greeting = consumer.browse(OWNER)  # as `PlainTurn.run`: the clock starts when the owner is awake
    while consumer.take(greeting) is None:
        courier.news.wait(1e-3)
        courier.news.clear()
    begun = time.perf_counter()
    tickets = iter(range(groups))
    under_way: list[int] = []
    pulled = 0

    def ask(count: int) -> Iterator[int]:
        for ticket in islice(tickets, count):
            yield consumer.pull(OWNER, [(ticket, 0)])

    under_way += ask(in_flight)
    while under_way:
        got = consumer.take(under_way[0])
        if got is None:
            courier.news.wait(LIMIT_S)
            courier.news.clear()
            continue
        under_way.pop(0)
        under_way += ask(1)
        for samples in trajectories_by_key(got).values():
            assert all(item.versions[-1] == item.unit.sample for item in samples)
            pulled += sum(len(item.tokens) for item in samples) * BYTES_PER_TOKEN
    return pulled / (time.perf_counter() - begun) / 1e9


class PlainTurn:
    """Plain messages between the two ranks, made by their couriers: the owner's begins when the consumer's says so."""

    handles: ClassVar[tuple[type[Message], ...]] = ()

    def __init__(self, nbytes: int, in_flight: int, groups: int) -> None:
        from mpi4py import MPI

        self._comm = MPI.COMM_WORLD.Dup()
        self._rank = self._comm.Get_rank()
        self._buffers = [np.ones(nbytes, np.uint8) for _ in range(in_flight)]
        self._groups = groups

    def receive(self, received: Received, now: float) -> None:
        """No message is for it."""

    def tick(self, now: float) -> None:
        if self._rank == OWNER and self._comm.Iprobe(CONSUMER, START_TAG):
            self._comm.Recv(bytearray(1), CONSUMER, START_TAG)
            self._exchange()

    def run(self) -> float:
        """GB/s; on the consumer."""
        self._comm.Send(bytes(1), OWNER, START_TAG)
        self._comm.Recv(bytearray(1), OWNER, START_TAG)
        begun = time.perf_counter()
        self._move(self._comm.Irecv)
        return self._groups * self._buffers[0].nbytes / (time.perf_counter() - begun) / 1e9

    def _exchange(self) -> None:
        self._comm.Send(bytes(1), CONSUMER, START_TAG)
        self._move(self._comm.Isend)

    def _move(self, begin: Callable[..., Any]) -> None:
        """`in_flight` transfers at a time, each from or into a buffer of its own."""
        requests = [begin(buffer, 1 - self._rank) for buffer in self._buffers]
        for turn in range(self._groups - len(requests)):
            place = turn % len(requests)
            requests[place].Wait()
            requests[place] = begin(self._buffers[place], 1 - self._rank)
        for request in requests:
            request.Wait()


def rank_main(case: str, rounds: int) -> None:
    """What each of the two ranks runs."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    nbytes, in_flight, groups = CASES[case]
    transport, store = MpiTransport(world.Dup()), TrajectoryStore()
    consumer, plain = ExchangeConsumer(transport, TRAJECTORY), PlainTurn(nbytes, in_flight, groups)
    if world.Get_rank() == OWNER:
        fill(store, nbytes, groups)
    courier = Courier(transport, [ExchangeOwner(transport, store), consumer, plain], abort)
    world.Barrier()
    courier.start()
    if world.Get_rank() == CONSUMER:
        runs = [lambda: pull_all(consumer, courier, groups, in_flight), lambda: courier.call(plain.run, LIMIT_S)]
        interleaved_medians(runs, 1)  # warm up
        print(json.dumps(interleaved_medians(runs, rounds)))
        courier.submit(lambda: transport.send(OWNER, Release([(ticket, 0) for ticket in range(groups)])))
    else:
        while store.list():
            time.sleep(0.05)
    courier.stop(LIMIT_S)


def main() -> None:
    options = parse_options(__doc__)
    rounds = 1 if options.quick else 5
    if options.rank_of:
        rank_main(options.rank_of, rounds)
        return
    for case in CASES:
        quick = ["--quick"] if options.quick else []
        ours, theirs = run_ranks("benchmarks.exchange_vs_mpi", 2, "--rank-of", case, *quick)
        report("exchange_vs_mpi", case, ours, theirs, "GB/s", options.json)


if __name__ == "__main__":
    main()
