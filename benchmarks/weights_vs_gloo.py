"""Both weight channels against a bare gloo broadcast of the same bytes to the same ranks.

    python -m benchmarks.weights_vs_gloo [--json] [--quick]

One trainer, 1, 3 and 7 generators, 270 MB in 200 tensors. Ours is from `publish` on the trainer to the last generator
having the whole version in hand, the trainer's copy into its snapshot included; theirs is one broadcast of one tensor.
GB/s of the 270 MB, medians of interleaved rounds.

The last case is `weights.node_shared`: ours until 8 generators of one node have the version in hand, theirs until one
of them has, which receives it for itself over `mpi`.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

from benchmarks import report
from benchmarks.ranks import Meeting, abort, parse_options, print_medians, run_ranks
from headrace.comm.courier import Courier
from headrace.comm.devices import detect
from headrace.comm.groups import make_group, share_store
from headrace.comm.mpi import MpiTransport
from headrace.comm.weights import Publisher, Subscriber, TensorSpec, WeightTensor
from headrace.comm.weights_collective import Broadcaster, CollectivePublisher, CollectiveSubscriber
from headrace.comm.weights_mpi import MpiPublisher
from headrace.comm.weights_pull import MpiSubscriber

TRAINER = 0
RECEIVERS = (1, 3, 7)
TENSORS, TENSOR_BYTES = 200, 1_350_000
BYTES = TENSORS * TENSOR_BYTES
BUCKET = 32 << 20
LIMIT_S = 120.0


class Bench:
    """One rank: what it does in turn with all others."""

    def __init__(self, transport: str) -> None:
        from mpi4py import MPI

        self.world = world = MPI.COMM_WORLD
        self.rank, self.size = world.Get_rank(), world.Get_size()
        self.store = share_store(world, ["here"] * self.size, LIMIT_S)
        members = list(range(self.size))
        self.gloo = make_group("gloo", self.store, "bare", members, self.rank, LIMIT_S)
        self.tensor = torch.ones(BYTES, dtype=torch.uint8)
        self.weights = [np.full(TENSOR_BYTES, n % 256, np.uint8) for n in range(TENSORS)]
        self.version = -1
        self.meeting = Meeting(self.store, self.rank, self.size)
        wire = MpiTransport(world.Dup())
        if transport == "mpi":
            self.service = self._over_mpi(wire)
        else:
            group = make_group("gloo", self.store, "weights", members, self.rank, LIMIT_S)
            self.service = self._collective(wire, Broadcaster(group, detect(), BUCKET))
        self.courier = Courier(wire, [self.service], abort)
        world.Barrier()
        self.courier.start()

    def _over_mpi(self, wire: MpiTransport) -> Publisher | Subscriber:
        if self.rank == TRAINER:
            return MpiPublisher(wire, range(1, self.size), BUCKET, False, LIMIT_S)
        return MpiSubscriber(wire, [TRAINER], False, LIMIT_S)

    def _collective(self, wire: MpiTransport, broadcaster: Broadcaster) -> Publisher | Subscriber:
        if self.rank == TRAINER:
            return CollectivePublisher(wire, broadcaster, [TRAINER], range(1, self.size), False, LIMIT_S)
        return CollectiveSubscriber(wire, broadcaster, [TRAINER], False)

    def ours(self) -> float:
        """GB/s."""
        self.version += 1
        work = self._publish if self.rank == TRAINER else self._take
        return BYTES / self.meeting.timed(work, TRAINER) / 1e9

    def theirs(self) -> float:
        """GB/s."""
        return BYTES / self.meeting.timed(lambda: self.gloo.broadcast(self.tensor, TRAINER), TRAINER) / 1e9

    def _publish(self) -> None:
        specs = [TensorSpec(f"layer.{n}", "uint8", (TENSOR_BYTES,)) for n in range(TENSORS)]
        self.service.publish(  # type: ignore[union-attr]
            self.version, (WeightTensor(spec, data) for spec, data in zip(specs, self.weights, strict=True))
        )

    def _take(self) -> None:
        while (found := self.service.take()) is None:  # type: ignore[union-attr]
            time.sleep(1e-3)
        assert found.version == self.version
        assert all(tensor.data[-1] == n % 256 for n, tensor in enumerate(found.tensors))
        found.release()


def rank_main(transport: str, rounds: int) -> None:
    """What each rank runs."""
    torch.set_num_threads(1)
    bench = Bench(transport)
    print_medians(bench.world, bench.courier, [bench.ours, bench.theirs], rounds)


def main() -> None:
    options = parse_options(__doc__)
    if options.rank_of:
        rank_main(options.rank_of, 1 if options.quick else 5)
        return
    quick: list[Any] = ["--quick"] if options.quick else []
    for transport in ("mpi", "collective"):
        for receivers in RECEIVERS:
            ours, theirs = run_ranks("benchmarks.weights_vs_gloo", 1 + receivers, "--rank-of", transport, *quick)
            report("weights_vs_gloo", f"{transport} receivers={receivers}", ours, theirs, "GB/s", options.json)
    ours, theirs = run_ranks("benchmarks.nodeshared", 9, *quick)
    report("weights_vs_gloo", "node_shared replicas=8", ours, theirs, "GB/s", options.json)


if __name__ == "__main__":
    main()
