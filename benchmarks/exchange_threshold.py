"""From which size on a column is better sent as a buffer of its own than in the header: whether `EAGER_BYTES` is right.

    python -m benchmarks.exchange_threshold [--json] [--quick]

Two ranks that do nothing but poll: pulls of one group of four columns of equal size, one after the other. For every
size a line: ours is with `EAGER_BYTES` as it is, theirs the better of all columns in the header and each in a buffer.
Pulls per second, medians of interleaved rounds. The last line is the smallest size, in bytes, from which on buffers
were better at all sizes.
"""

from __future__ import annotations

import json
import statistics
import time
from typing import Any

import numpy as np

from benchmarks import report, report_value
from benchmarks.ranks import parse_options, run_ranks
from headrace.comm import exchange
from headrace.comm.exchange import ExchangeConsumer, ExchangeOwner
from headrace.comm.mpi import MpiTransport
from headrace.comm.schema import Schema, ragged
from headrace.comm.store import SampleStore

CONSUMER, OWNER = 0, 1
SIZES = [1 << bits for bits in range(9, 20)]
COLUMNS = ("a", "b", "c", "d")
PULLS = 200
OURS, HEADER, BUFFERS = exchange.EAGER_BYTES, 1 << 40, 0


def rank_main(eager_bytes: int) -> None:
    """What each of the two ranks runs; the consumer prints pulls per second by size."""
    from mpi4py import MPI

    exchange.EAGER_BYTES = eager_bytes
    transport = MpiTransport(MPI.COMM_WORLD.Dup())
    schema = Schema({name: ragged(np.uint8) for name in COLUMNS})
    if transport.rank == CONSUMER:
        consumer = ExchangeConsumer(transport, schema)
        print(json.dumps([pulls_per_s(transport, consumer, size) for size in SIZES]))
        consumer.release(OWNER, SIZES)
        consumer.tick(0.0)
    else:
        store = SampleStore(schema)
        for size in SIZES:
            store.put(size, {name: np.ones(size, np.uint8) for name in COLUMNS})
        owner = ExchangeOwner(transport, store)
        while store.list():
            for received in transport.poll():
                owner.receive(received, 0.0)
    transport.close()


def pulls_per_s(transport: MpiTransport, consumer: ExchangeConsumer, size: int) -> float:
    """The first tenth isn't counted."""
    for number in range(PULLS + PULLS // 10):
        if number == PULLS // 10:
            begun = time.perf_counter()
        request = consumer.pull(OWNER, [size])
        consumer.tick(0.0)
        while (found := consumer.take(request)) is None:
            for received in transport.poll():
                consumer.receive(received, 0.0)
        assert len(found[size]["d"][0]) == size
    return PULLS / (time.perf_counter() - begun)


def main() -> None:
    options = parse_options(__doc__)
    if options.rank_of:
        rank_main(int(options.rank_of))
        return
    found: dict[int, list[Any]] = {OURS: [], HEADER: [], BUFFERS: []}
    for _ in range(1 if options.quick else 5):
        for eager_bytes, rounds in found.items():
            rounds.append(run_ranks("benchmarks.exchange_threshold", 2, "--rank-of", eager_bytes))
    speeds = {key: [statistics.median(column) for column in zip(*rounds, strict=True)] for key, rounds in found.items()}
    best = [max(pair) for pair in zip(speeds[HEADER], speeds[BUFFERS], strict=True)]
    for size, ours, theirs in zip(SIZES, speeds[OURS], best, strict=True):
        report("exchange_threshold", f"{size} B", ours, theirs, "pulls/s", options.json)
    slower = [size for size, a, b in zip(SIZES, speeds[HEADER], speeds[BUFFERS], strict=True) if a >= b]
    report_value("exchange_threshold", "buffers are better from", 2 * max(slower, default=0), "B", options.json)


if __name__ == "__main__":
    main()
