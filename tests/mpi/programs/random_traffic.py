"""Every rank sends random messages to every rank, itself included; order and checksums are checked on arrival."""

from __future__ import annotations

import random
import sys
import time

import numpy as np
import xxhash
from mpi4py import MPI

from headrace.comm.messages import Bye, RoundPart
from headrace.comm.mpi import MpiTransport, check_threads, check_world
from headrace.comm.transport import Buffer, Received

MESSAGES = 40
CHUNK_BYTES = 50_021
LIMIT_S = 90.0


def digest(buffers: list[Buffer]) -> bytes:
    return b"".join(xxhash.xxh3_128_digest(buffer) for buffer in buffers)


def random_buffers(rng: random.Random) -> list[Buffer]:
    kinds = (0, 1, 7, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, rng.randrange(200_000), rng.randrange(3_000_000))
    sizes = [rng.choice(kinds) for _ in range(rng.randrange(4))]
    return [np.frombuffer(rng.randbytes(size), np.uint8) for size in sizes]


def send_all(transport: MpiTransport, rng: random.Random) -> None:
    counts = [0] * transport.size
    for _ in range(MESSAGES * transport.size):
        target = rng.randrange(transport.size)
        buffers = random_buffers(rng)
        long_header = b"x" * rng.choice((0, 0, 0, 300_000))
        part = RoundPart(round=target, hop=counts[target], parts=[(len(buffers), digest(buffers)), (0, long_header)])
        transport.send(target, part, buffers)
        counts[target] += 1
        yield_to_network(transport)
    for target, count in enumerate(counts):
        transport.send(target, Bye(stage=count))


arrived: list[Received] = []


def yield_to_network(transport: MpiTransport) -> None:
    arrived.extend(transport.poll())


def check(transport: MpiTransport) -> None:
    """Per source: numbers without a gap, the right buffers, the farewell last."""
    for source in range(transport.size):
        *parts, bye = [item for item in arrived if item.source == source]
        assert isinstance(bye.message, Bye)
        assert bye.message.stage == len(parts)
        for number, item in enumerate(parts):
            assert isinstance(item.message, RoundPart)
            assert (item.message.round, item.message.hop) == (transport.rank, number)
            assert item.message.parts[0] == (len(item.buffers), digest(item.buffers))


def main() -> None:
    world = MPI.COMM_WORLD
    check_threads()
    check_world(world, int(sys.argv[1]))
    transport = MpiTransport(world.Dup(), chunk_bytes=CHUNK_BYTES)
    send_all(transport, random.Random(transport.rank))
    deadline = time.monotonic() + LIMIT_S
    while sum(isinstance(item.message, Bye) for item in arrived) < transport.size:
        assert time.monotonic() < deadline, "messages are missing"
        yield_to_network(transport)
        time.sleep(20e-6)
    transport.close()
    assert transport.pending == 0
    check(transport)
    megabytes = sum(buffer.nbytes for item in arrived for buffer in item.buffers) / 1e6
    print(f"rank {transport.rank}: {len(arrived)} messages, {megabytes:.0f} MB", flush=True)
    world.Barrier()


main()
