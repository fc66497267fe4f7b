"""Tensors of any size through buckets of any size."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import numpy as np
import pytest
from torch._C._distributed_c10d import TCPStore

from headrace.comm.devices import CPU
from headrace.comm.groups import LOOPBACK, _serve, make_group
from headrace.comm.simulated import SimulatedNetwork, SimulatedTransport
from headrace.comm.weights import Publisher, Subscriber, TensorSpec, Version, WeightTensor
from headrace.comm.weights_collective import Broadcaster, CollectivePublisher, CollectiveSubscriber
from headrace.comm.weights_mpi import MpiPublisher
from headrace.comm.weights_pull import MpiSubscriber

SIZES = (0, 1, 63, 64, 65, 1000, 4096)
"""Of tensors, in bytes."""
TOTAL = sum(-(-size // 64) * 64 for size in SIZES)
"""Of a share: each tensor begins at a multiple of 64."""
BUCKETS = (8, 63, 64, 65, 1000, TOTAL - 1, TOTAL, TOTAL + 1, 1 << 20)
LIMIT_S = 20.0


def tensors(version: int) -> list[WeightTensor]:
    rng = np.random.default_rng(version)
    return [
        WeightTensor(TensorSpec(f"{n}", "uint8", (size,)), rng.integers(0, 256, size, np.uint8))
        for n, size in enumerate(SIZES)
    ]


def turn(transports: Sequence[SimulatedTransport], services: Sequence[Publisher | Subscriber]) -> None:
    """One of each courier."""
    for transport, service in zip(transports, services, strict=True):
        for received in transport.poll():
            service.receive(received, 0.0)
        service.tick(0.0)


def check(found: Version | None, version: int) -> None:
    assert found is not None
    assert found.version == version
    for got, sent in zip(found.tensors, tensors(version), strict=True):
        assert got.spec == sent.spec
        np.testing.assert_array_equal(got.data, sent.data)
    found.release()


@pytest.mark.parametrize("bucket", BUCKETS)
def test_any_tensor_passes_through_messages_of_any_size(bucket: int) -> None:
    network = SimulatedNetwork(2)
    ends = [network.transport(rank) for rank in range(2)]
    publisher = MpiPublisher(ends[0], [1], bucket, True, LIMIT_S)
    subscriber = MpiSubscriber(ends[1], [0], True, LIMIT_S)
    for version in range(2):
        publisher.publish(version, tensors(version))
        for _ in range(TOTAL // bucket + 20):
            turn(ends, (publisher, subscriber))
        check(subscriber.take(), version)


@pytest.mark.parametrize("bucket", BUCKETS)
def test_any_tensor_passes_through_broadcasts_of_any_size(bucket: int) -> None:
    network, server = SimulatedNetwork(2), _serve(LOOPBACK, LIMIT_S)
    ends = [network.transport(rank) for rank in range(2)]

    def broadcaster(rank: int) -> Broadcaster:
        store = TCPStore(LOOPBACK, server.port, is_master=False, timeout=timedelta(seconds=LIMIT_S))
        return Broadcaster(make_group("gloo", store, "weights", [0, 1], rank, LIMIT_S), CPU, bucket)

    with ThreadPoolExecutor(2) as pool:
        sending, receiving = pool.map(broadcaster, range(2))
        publisher = CollectivePublisher(ends[0], sending, [0], [1], True, LIMIT_S)
        subscriber = CollectiveSubscriber(ends[1], receiving, [0], True)
        stop = threading.Event()

        def courier() -> None:
            while not stop.wait(1e-3):
                turn(ends, (publisher, subscriber))

        def take() -> Version | None:
            waited = threading.Event()
            while not subscriber.waiting:
                waited.wait(1e-3)
            return subscriber.take()

        thread = threading.Thread(target=courier)
        thread.start()
        try:
            for version in range(2):
                published = pool.submit(publisher.publish, version, tensors(version))
                check(pool.submit(take).result(LIMIT_S), version)
                published.result(LIMIT_S)
        finally:
            stop.set()
            thread.join()
