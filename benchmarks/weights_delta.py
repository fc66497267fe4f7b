"""What `weights.encoding: delta` saves: the bytes of a version after one AdamW step, and the time until it is in hand.

    python -m benchmarks.weights_delta [--json] [--quick]

A model in bfloat16 of 100 million weights, normally distributed with deviation 0.02, and its float32 master weights
under AdamW with random gradients, at learning rates of 1e-6 and 1e-5. Cases:

- `bytes`: those of the encoded changes, in % of all bytes; the result is compared bit for bit.
- `time`: GB/s of weights from `publish` on a trainer to the version being in hand on one generator, over real ranks on
  this machine, by changes against all bytes; medians of interleaved versions. Where it is less than 1, as it may be
  where memory is the network, `delta` sends all bytes after it has measured that.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from benchmarks import report, report_value
from benchmarks.ranks import Meeting, abort, parse_options, print_medians, run_ranks
from headrace.comm import delta
from headrace.comm.courier import Courier
from headrace.comm.groups import share_store
from headrace.comm.mpi import MpiTransport
from headrace.comm.transport import Buffer
from headrace.comm.weights import TensorSpec, WeightTensor
from headrace.comm.weights_mpi import MpiPublisher
from headrace.comm.weights_pull import MpiSubscriber

NAME = "weights_delta"
WEIGHTS, TENSORS, DEVIATION = 100_000_000, 100, 0.02
RATES = (1e-6, 1e-5)
VERSIONS = 3
"""Different ones; they are published in turn, forwards and backwards."""
BUCKET = 32 << 20
LIMIT_S = 120.0
TRAINER, GENERATOR = 0, 1
SPECS = [TensorSpec(f"layer.{n}", "bfloat16", (WEIGHTS // TENSORS,)) for n in range(TENSORS)]


def versions(rate: float, count: int) -> Iterator[Buffer]:
    """The bytes of the weights in bfloat16, one AdamW step apart; the first after a step, when moments are there."""
    generator = torch.Generator().manual_seed(0)
    master = torch.nn.Parameter(torch.randn(WEIGHTS, generator=generator) * DEVIATION)
    optimizer = torch.optim.AdamW([master], lr=rate, weight_decay=0.0)
    for _ in range(count):
        master.grad = torch.randn(WEIGHTS, generator=generator)
        optimizer.step()
        yield master.detach().bfloat16().view(torch.uint8).numpy()


def share_of_bytes(rate: float) -> float:
    """Encoded bytes over all."""
    old, new = versions(rate, 2)
    found = delta.encode(old, new)
    assert found is not None
    delta.apply(old, *found)
    assert np.array_equal(old, new)
    return sum(part.size for part in found) / new.size


class Turns(delta.Cheaper):
    """Changes or all bytes, as it is told."""

    changes = False

    def choose(self) -> bool:
        return self.changes


class Bench:
    """One of two ranks."""

    def __init__(self, rate: float) -> None:
        from mpi4py import MPI

        self.world = world = MPI.COMM_WORLD
        self.rank = world.Get_rank()
        self.meeting = Meeting(share_store(world, ["here", "here"], LIMIT_S), self.rank, 2)
        self.turns = Turns()
        self._data = list(versions(rate, VERSIONS)) if self.rank == TRAINER else []
        self._version = -1
        wire = MpiTransport(world.Dup())
        self.service: Any
        if self.rank == TRAINER:
            self.service = MpiPublisher(wire, [GENERATOR], BUCKET, False, LIMIT_S, self.turns)
        else:
            self.service = MpiSubscriber(wire, [TRAINER], False, LIMIT_S, delta=True)
        self.courier = Courier(wire, [self.service], abort)
        world.Barrier()
        self.courier.start()

    def run(self, changes: bool) -> float:
        """GB/s of one version."""
        self.turns.changes = changes
        self._version += 1
        seconds = self.meeting.timed(self._publish if self.rank == TRAINER else self._take, TRAINER)
        return 2 * WEIGHTS / seconds / 1e9

    def _publish(self) -> None:
        place = self._version % (2 * VERSIONS - 2)
        data = self._data[min(place, 2 * VERSIONS - 2 - place)]
        pieces = zip(SPECS, np.split(data, TENSORS), strict=True)
        self.service.publish(self._version, (WeightTensor(spec, piece) for spec, piece in pieces))

    def _take(self) -> None:
        while (found := self.service.take()) is None:
            time.sleep(1e-3)
        found.release()


def rank_main(rate: float, rounds: int) -> None:
    """What each rank runs."""
    torch.set_num_threads(1)
    bench = Bench(rate)
    print_medians(bench.world, bench.courier, [lambda: bench.run(True), lambda: bench.run(False)], rounds)


def main() -> None:
    options = parse_options(__doc__)
    if options.rank_of:
        rank_main(float(options.rank_of), 1 if options.quick else 5)
        return
    torch.set_num_threads(1)
    quick: list[Any] = ["--quick"] if options.quick else []
    for rate in RATES:
        report_value(NAME, f"bytes lr={rate:g}", 100 * share_of_bytes(rate), "%", options.json)
        changes, full = run_ranks("benchmarks.weights_delta", 2, "--rank-of", rate, *quick)
        report(NAME, f"time lr={rate:g}", changes, full, "GB/s", options.json)


if __name__ == "__main__":
    main()
