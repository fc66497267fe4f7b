"""The ranks of `weights_vs_gloo`'s case `node_shared`: 8 generators of one node beside one that receives for itself.

Ours is from `publish` on the trainer until all 8 have the whole version in hand, in the one buffer of the node; theirs
until the first of them has it by transport `mpi`, while the others rest.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np
import torch

from benchmarks.ranks import Meeting, abort, print_medians
from benchmarks.weights_vs_gloo import BUCKET, BYTES, LIMIT_S, TENSOR_BYTES, TENSORS, TRAINER
from headrace.comm.courier import Courier
from headrace.comm.groups import share_store
from headrace.comm.mpi import MpiTransport
from headrace.comm.weights import Publisher, Subscriber, TensorSpec, WeightTensor
from headrace.comm.weights_mpi import MpiPublisher
from headrace.comm.weights_node import NodeSubscriber
from headrace.comm.weights_pull import MpiSubscriber

FIRST = 1
"""The generator that pulls."""


class Channel:
    """One rank's end of a weight channel, with a courier of its own."""

    def __init__(self, service: Publisher | Subscriber, wire: MpiTransport) -> None:
        self.service = service
        self.courier = Courier(wire, [service], abort)
        self.version = -1
        self._weights = [np.full(TENSOR_BYTES, n % 256, np.uint8) for n in range(TENSORS)]

    def publish(self) -> None:
        self.version += 1
        specs = [TensorSpec(f"layer.{n}", "uint8", (TENSOR_BYTES,)) for n in range(TENSORS)]
        self.service.publish(  # type: ignore[union-attr]
            self.version, (WeightTensor(spec, data) for spec, data in zip(specs, self._weights, strict=True))
        )

    def take(self) -> None:
        self.version += 1
        while (found := self.service.take()) is None:  # type: ignore[union-attr]
            self.courier.news.wait(0.02)
            self.courier.news.clear()
        assert found.version == self.version
        assert all(tensor.data[-1] == n % 256 for n, tensor in enumerate(found.tensors))
        found.release()


class Bench:
    """One rank: what it does in turn with all others."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self.world = world = MPI.COMM_WORLD
        self.rank, size = world.Get_rank(), world.Get_size()
        self.meeting = Meeting(share_store(world, ["here"] * size, LIMIT_S), self.rank, size)
        alone, shared = MpiTransport(world.Dup()), MpiTransport(world.Dup())
        if self.rank == TRAINER:
            services = [MpiPublisher(wire, [FIRST], BUCKET, False, LIMIT_S) for wire in (alone, shared)]
            self.alone, self.shared = (Channel(*pair) for pair in zip(services, (alone, shared), strict=True))
        else:
            self.alone = Channel(MpiSubscriber(alone, [TRAINER], False, LIMIT_S), alone)
            self.shared = Channel(NodeSubscriber(shared, [TRAINER], range(1, size), False, LIMIT_S), shared)
        world.Barrier()
        self.shared.courier.start()
        if self.rank in (TRAINER, FIRST):
            self.alone.courier.start()

    def ours(self) -> float:
        """GB/s."""
        return self._rate(self.shared, to=range(FIRST, self.world.Get_size()))

    def theirs(self) -> float:
        """GB/s."""
        return self._rate(self.alone, to=[FIRST])

    def _rate(self, channel: Channel, to: Sequence[int]) -> float:
        def work() -> None:
            if self.rank == TRAINER:
                channel.publish()
            elif self.rank in to:
                channel.take()

        return BYTES / self.meeting.timed(work, TRAINER) / 1e9

    def run(self, rounds: int) -> None:
        print_medians(self.world, self.shared.courier, [self.ours, self.theirs], rounds)
        if self.rank in (TRAINER, FIRST):
            self.alone.courier.stop(LIMIT_S)
        self.world.Barrier()


if __name__ == "__main__":
    torch.set_num_threads(1)
    Bench().run(1 if "--quick" in sys.argv else 5)
