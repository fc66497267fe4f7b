"""Every rank but the last keeps groups and pulls those of all; the last has another schema."""

from __future__ import annotations

from typing import Any

import numpy as np
from mpi4py import MPI

from headrace.comm.mpi import MpiTransport
from headrace.comm.sample_exchange import Exchange, ExchangeError, Schema, fixed, ragged, text

FIELDS = {
    "tokens": ragged(np.int32),
    "hidden": ragged("bfloat16", (16,)),
    "pixels": ragged(np.uint8, (8, 8, 3), optional=True),
    "reward": fixed(np.float64),
    "name": text(),
}
GROUPS, SAMPLES = 5, 4


def samples(owner: int, key: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng([owner, key])

    def sample(length: int) -> dict[str, Any]:
        return {
            "tokens": rng.integers(0, 9, length, dtype=np.int32),
            "hidden": rng.integers(0, 2**16, (length, 16), dtype=np.uint16),
            "pixels": rng.integers(0, 256, (length, 8, 8, 3), dtype=np.uint8) if length % 2 else None,
            "reward": rng.random(),
            "name": f"{owner} {key} ä €",
        }

    return [sample(length) for length in (0, *rng.integers(1, 5000, SAMPLES - 1).tolist())]


def bits(sample: dict[str, Any]) -> dict[str, Any]:
    return {name: value.tobytes() if isinstance(value, np.ndarray) else value for name, value in sample.items()}


def check(exchange: Exchange, owner: int) -> None:
    groups = exchange.consume(owner, f"rank {exchange.rank}", GROUPS, wait_s=30)
    while len(groups) < GROUPS:
        groups |= exchange.consume(owner, f"rank {exchange.rank}", GROUPS, wait_s=30)
    for key, group in groups.items():
        assert isinstance(key, tuple)
        expected = [bits(sample) for sample in samples(*key)]
        assert [bits(sample) for sample in group] == expected
        some = exchange.get(owner, [key], ["hidden", "name"], rows=[3, 1])[key]
        assert [bits(sample) for sample in some] == [
            {name: expected[row][name] for name in ("hidden", "name")} for row in (3, 1)
        ]


def refused(exchange: Exchange) -> None:
    try:
        exchange.list(0)
    except ExchangeError as error:
        print(str(error).partition("this rank's: ")[2].partition(". All")[0], flush=True)


def main() -> None:
    world = MPI.COMM_WORLD
    last = world.Get_size() - 1
    wrong = FIELDS | {"tokens": ragged(np.int64)}
    transport = MpiTransport(world.Dup(), chunk_bytes=65_536)
    with Exchange.over(transport, Schema(wrong if transport.rank == last else FIELDS, ("owner", "number"))) as exchange:
        if exchange.rank == last:
            refused(exchange)
        else:
            for key in range(GROUPS):
                exchange.put((exchange.rank, key), samples(exchange.rank, key))
            for owner in range(last):
                check(exchange, owner)
            print("all groups were right", flush=True)


main()
