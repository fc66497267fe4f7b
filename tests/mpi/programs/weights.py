"""The weight channels between real ranks: weights.py TRAINERS HOSTS. Generators print checksums of what they got.

The first TRAINERS ranks train, the others generate. HOSTS is `one` or `many`: what the ranks say of their hosts.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch
import xxhash
from mpi4py import MPI

from headrace.comm.delta import Cheaper
from headrace.comm.devices import detect
from headrace.comm.groups import init_replica_group, make_group, share_store
from headrace.comm.messages import Bye
from headrace.comm.mpi import MpiTransport
from headrace.comm.weights import Publisher, Subscriber, TensorSpec, WeightTensor
from headrace.comm.weights_collective import Broadcaster, CollectivePublisher, CollectiveSubscriber
from headrace.comm.weights_mpi import MpiPublisher
from headrace.comm.weights_node import NodeSubscriber
from headrace.comm.weights_pull import MpiSubscriber

LIMIT_S = 60.0
BUCKET = 1 << 16
VERSIONS = 3
WORLD = MPI.COMM_WORLD
RANK = WORLD.Get_rank()
TRAINERS = list(range(int(sys.argv[1])))
GENERATORS = list(range(len(TRAINERS), WORLD.Get_size()))


def say(line: str) -> None:
    """In one write, so that lines of several ranks don't mix."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def share(trainer: int, version: int) -> Iterator[WeightTensor]:
    """Much of a version is as in every other."""
    rng, own = np.random.default_rng(trainer), np.random.default_rng([trainer, version])
    for name, dtype, shape in (("big", "float32", (301, 157)), ("odd", "bfloat16", (7, 3)), ("none", "uint8", (0,))):
        spec = TensorSpec(f"{trainer}.{name}", dtype, shape)
        data = rng.integers(0, 256, spec.nbytes, np.uint8)
        data[own.random(spec.nbytes) < 0.05] ^= version + 1
        yield WeightTensor(spec, data)


def digest(tensors: list[WeightTensor]) -> str:
    summed = xxhash.xxh3_64()
    for tensor in tensors:
        summed.update(repr(tensor.spec).encode())
        summed.update(tensor.data.tobytes())
    return str(summed.hexdigest())


def courier(transport: MpiTransport, service: Publisher | Subscriber, done: threading.Event) -> None:
    """Serves until every generator has said Bye (on trainers), or until told to stop (on generators)."""
    left = len(GENERATORS) if RANK in TRAINERS else 1
    while left:
        items = transport.poll()
        for item in items:
            if isinstance(item.message, Bye):
                left -= 1
            else:
                service.receive(item, time.monotonic())
        service.tick(time.monotonic())
        if RANK in GENERATORS and done.is_set():
            left = 0
            for trainer in TRAINERS:
                transport.send(trainer, Bye(0))
        if not items:
            time.sleep(1e-3)
    transport.close()


def publish_all(name: str, publisher: Publisher) -> None:
    for version in range(VERSIONS):
        publisher.publish(version, share(RANK, version))
        say(f"{name} published {version} by {RANK}")


def take_all(name: str, subscriber: Subscriber) -> None:
    """Prints every version taken, until the last; and how many files were open after the first and the last."""
    files = []
    version = -1
    deadline = time.monotonic() + LIMIT_S
    while version < VERSIONS - 1:
        assert time.monotonic() < deadline, f"rank {RANK}: nothing after version {version}"
        found = subscriber.take()
        if found is None:
            time.sleep(1e-3)
            continue
        assert found.version > version
        version = found.version
        expected = digest([tensor for trainer in TRAINERS for tensor in share(trainer, version)])
        say(f"{name} taken {version} by {RANK} digest {digest(found.tensors)} of {expected}")
        if name.startswith("node"):
            time.sleep(0.05 * (RANK % 3))  # others are done with it, newer ones come
            say(f"{name} taken {version} by {RANK} digest {digest(found.tensors)} of {expected}")
        found.release()
        files.append(open_files())
    assert files[0] == files[-1], f"open files: {files}"


def open_files() -> int:
    """Without those of shared buffers, of which the second comes with the second version."""
    count = 0
    for file in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            count += "memfd:headrace" not in os.readlink(f"/proc/self/fd/{file}")
    return count


def phase(name: str, make: Callable[[MpiTransport], Publisher | Subscriber]) -> None:
    transport = MpiTransport(WORLD.Dup())
    service = make(transport)
    done = threading.Event()
    thread = threading.Thread(target=courier, args=(transport, service, done), daemon=True)
    thread.start()
    if RANK in TRAINERS:
        publish_all(name, service)  # type: ignore[arg-type]
    else:
        take_all(name, service)  # type: ignore[arg-type]
    done.set()
    thread.join()
    WORLD.Barrier()


def main() -> None:
    torch.set_num_threads(1)
    hosts = ["here"] * WORLD.Get_size() if sys.argv[2] == "one" else [f"host{r}" for r in range(WORLD.Get_size())]
    device = detect()
    store = share_store(WORLD, hosts, LIMIT_S)
    say(f"store {store.host}")
    if RANK in TRAINERS:
        init_replica_group(store, "gloo", RANK, len(TRAINERS), LIMIT_S, "trainers")
    group = make_group("gloo", store, "weights", [*TRAINERS, *GENERATORS], RANK, LIMIT_S)
    broadcaster = Broadcaster(group, device, BUCKET)
    if RANK in TRAINERS:
        phase("mpi", lambda transport: MpiPublisher(transport, GENERATORS, BUCKET, True, LIMIT_S))
        phase("delta", lambda transport: MpiPublisher(transport, GENERATORS, BUCKET, True, LIMIT_S, Cheaper()))
        phase("node", lambda transport: MpiPublisher(transport, GENERATORS[:1], BUCKET, True, LIMIT_S))
        phase("nodedelta", lambda transport: MpiPublisher(transport, GENERATORS[:1], BUCKET, True, LIMIT_S, Cheaper()))
        phase(
            "collective",
            lambda transport: CollectivePublisher(transport, broadcaster, TRAINERS, GENERATORS, True, LIMIT_S),
        )
        torch.distributed.destroy_process_group()
    else:
        phase("mpi", lambda transport: MpiSubscriber(transport, TRAINERS, True, LIMIT_S))
        phase("delta", lambda transport: MpiSubscriber(transport, TRAINERS, True, LIMIT_S, delta=True))
        phase("node", lambda transport: NodeSubscriber(transport, TRAINERS, GENERATORS, True, LIMIT_S))
        phase("nodedelta", lambda transport: NodeSubscriber(transport, TRAINERS, GENERATORS, True, LIMIT_S, delta=True))
        phase("collective", lambda transport: CollectiveSubscriber(transport, broadcaster, TRAINERS, True))


main()
