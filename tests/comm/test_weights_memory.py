"""The stated peak of the weight channel against what is really taken."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from headrace.comm.messages import WeightsPart
from headrace.comm.simulated import SimulatedNetwork
from headrace.comm.weights import TensorSpec, WeightTensor
from headrace.comm.weights_memory import weights_memory
from headrace.comm.weights_mpi import MpiPublisher
from headrace.comm.weights_node import NodeSubscriber
from headrace.comm.weights_pull import MpiSubscriber

MIB = 1 << 20
BUCKET = MIB
KEPT_BY_MALLOC = 64 * MIB

TRAINER = """
import sys
from pathlib import Path
import numpy as np
from headrace.comm.messages import WeightsPull
from headrace.comm.simulated import SimulatedNetwork
from headrace.comm.transport import Received
from headrace.comm.weights import TensorSpec, WeightTensor
from headrace.comm.weights_mpi import MpiPublisher

def touched():
    return max(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line)

share, tensors = int(sys.argv[1]), 33
data = np.ones(share // tensors // 64 * 64, np.uint8)
publisher = MpiPublisher(SimulatedNetwork(9).transport(0), range(1, 9), 1 << 20, False, 1.0)
before = touched()
for version in range(3):
    specs = [TensorSpec(str(n), "uint8", (data.size,)) for n in range(tensors)]
    publisher.publish(version, [WeightTensor(spec, data) for spec in specs])
    pull = WeightsPull(version, 0)
    with publisher._changed:
        publisher._find(version).pulled_by[1 + version] = 0
print((touched() - before) << 10)
assert "torch" not in sys.modules
"""


def specs(nbytes: int) -> list[TensorSpec]:
    return [TensorSpec(str(n), "uint8", (nbytes // 4,)) for n in range(4)]


@pytest.mark.parametrize("share", [70 * MIB, 160 * MIB])
def test_a_trainers_peak_is_that_of_all_snapshots_in_use(share: int) -> None:
    ended = subprocess.run([sys.executable, "-c", TRAINER, str(share)], capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stderr
    stated = weights_memory([share], "mpi", BUCKET).trainer_host
    assert stated["snapshots"] * 0.97 < int(ended.stdout) < sum(stated.values()) + KEPT_BY_MALLOC


def hold_all(make: Callable[[Any, int], MpiSubscriber | NodeSubscriber], shares: list[int], generators: int) -> Any:
    """Versions are published until a slow generator, the last, has made the channel take all that it ever takes."""
    trainers = range(len(shares))
    network = SimulatedNetwork(len(shares) + generators)
    transports = [network.transport(rank) for rank in range(network.size)]
    services: list[Any] = [MpiPublisher(transports[t], [len(shares)], BUCKET, False, 1.0) for t in trainers]
    services += [make(transports[rank], rank) for rank in range(len(shares), network.size)]
    for version in range(6):
        for trainer in trainers:
            data = np.zeros(shares[trainer] // 4, np.uint8)
            tensors = [TensorSpec(f"{trainer}.{n}", "uint8", (data.size,)) for n in range(4)]
            services[trainer].publish(version, [WeightTensor(spec, data) for spec in tensors])
        for _ in range(100):
            for service, transport in zip(services, transports, strict=True):
                for received in transport.poll():
                    service.receive(received, 0.0)
                service.tick(0.0)
        for service in services[len(shares) :]:
            found = service.take()
            if service is not services[-1] and found is not None:
                found.release()
    return services[len(shares)]


def test_a_generators_peak_is_that_of_its_staging_buffers() -> None:
    shares = [3 * MIB, 5 * MIB]
    subscriber = hold_all(lambda transport, rank: MpiSubscriber(transport, [0, 1], False, 1e9), shares, 1)
    taken = sum(share.slab._memory.nbytes for each in subscriber._staging for share in each.incoming.values())
    stated = weights_memory(shares, "mpi", BUCKET)
    assert taken == sum(stated.generator_host.values()) == 16 * MIB
    assert stated.node_host == {}


def test_a_nodes_peak_is_that_of_its_shared_buffers() -> None:
    shares = [3 * MIB, 5 * MIB]
    make = lambda transport, rank: NodeSubscriber(transport, [0, 1], [2, 3, 4], False, 1e9)  # noqa: E731
    first = hold_all(make, shares, 3)
    stated = weights_memory(shares, "mpi", BUCKET, node_shared=True)
    slabs = [share.slab for each in first._pull._staging for share in each.incoming.values()]
    touched = sum(os.stat(f"/proc/self/fd/{slab.segment.descriptor}").st_blocks * 512 for slab in slabs)
    assert touched == sum(stated.node_host.values()) == 24 * MIB
    assert stated.generator_host == {}
    assert stated.host_of_node(trainers=0, generators=8) == 24 * MIB
    plain = weights_memory(shares, "mpi", BUCKET)
    assert plain.host_of_node(trainers=1, generators=8) == 8 * 16 * MIB + 4 * 5 * MIB


def test_changes_on_their_way_to_a_generator_are_counted() -> None:
    shares = [40 * MIB, MIB]
    stated = weights_memory(shares, "mpi", 8 * MIB, delta=True)
    assert stated.generator_host == {"whole versions": 82 * MIB, "what has changed, on its way": 17 * MIB}
    subscriber = MpiSubscriber(SimulatedNetwork(2).transport(1), [0], False, 1.0, delta=True)
    subscriber._announced[0] = subscriber._newest = 0
    subscriber.tick(0.0)
    part = WeightsPart(0, 0, 5, None, 8 * MIB, base=3)
    assert sum(buffer.nbytes for buffer in subscriber._place(0, part, [MIB, 2 * MIB])) == 3 * MIB


@pytest.mark.parametrize(("accelerator", "hccl"), [(False, 0), (True, 0), (True, 200 * MIB)])
def test_a_broadcast_takes_a_bucket_of_the_device_and_hccls_buffers_twice(accelerator: bool, hccl: int) -> None:
    stated = weights_memory([8 * MIB, 8 * MIB], "collective", BUCKET, accelerator=accelerator, hccl_buffer_bytes=hccl)
    assert sum(stated.trainer_device.values()) == accelerator * BUCKET + 2 * hccl
    assert stated.generator_device == stated.trainer_device
    assert sum(stated.generator_host.values()) == 16 * MIB
    assert stated.trainer_host["a bucket of the others"] == BUCKET
