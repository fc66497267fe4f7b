"""Trainers that train between publications: interleaved.py TRAINERS SYNCS. Each rank says what it did, and needed.

The first TRAINERS ranks train: all-reduces on a group of their own, as many as a step happens to need, and after each
step a version by broadcast to the others, who join when they happen to be ready. So collectives of two groups are under
way on the same ranks all the time. After that the same versions go by messages.
"""

from __future__ import annotations

import os
import random
import sys
import time
import traceback
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from mpi4py import MPI

from headrace.comm.courier import Courier
from headrace.comm.devices import detect
from headrace.comm.groups import init_replica_group, make_group, share_store
from headrace.comm.mpi import MpiTransport
from headrace.comm.weights import Publisher, Subscriber, TensorSpec, WeightTensor
from headrace.comm.weights_collective import Broadcaster, CollectivePublisher, CollectiveSubscriber
from headrace.comm.weights_mpi import MpiPublisher
from headrace.comm.weights_pull import MpiSubscriber

LIMIT_S = 60.0
BUCKET = 1 << 10
WARM = 10
"""Versions after which nothing is set up any more."""
TRAIN = "train"
WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.Get_rank(), WORLD.Get_size()
TRAINERS, SYNCS = list(range(int(sys.argv[1]))), int(sys.argv[2])
GENERATORS = list(range(len(TRAINERS), SIZE))


class Recorded:
    """A process group of which every broadcast is noted."""

    def __init__(self, handle: Any, order: list[str]) -> None:
        self._handle, self._order = handle, order

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)

    def broadcast(self, tensor: torch.Tensor, root: int) -> Any:
        self._order.append(f"{root}:{tensor.numel()}")
        return self._handle.broadcast(tensor, root)


def share(version: int) -> list[WeightTensor]:
    """A tensor of several buckets, and a small one."""
    specs = [TensorSpec(f"{RANK}.large", "uint8", (3 * BUCKET + 7,)), TensorSpec(f"{RANK}.small", "float32", (3,))]
    return [WeightTensor(spec, np.full(spec.nbytes, version, np.uint8)) for spec in specs]


def train(order: list[str]) -> None:
    """One step: the same number of all-reduces on all trainers, at their own pace."""
    for _ in range(random.Random(len(order)).randrange(4)):
        time.sleep(random.uniform(0, 2e-3))
        order.append(TRAIN)
        dist.all_reduce(torch.ones(5))


def needs() -> tuple[int, int]:
    """Open files and threads."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def publish_all(name: str, store: Any, publisher: Publisher, order: list[str]) -> list[tuple[int, int]]:
    needed = []
    for version in range(SYNCS):
        train(order)
        publisher.publish(version, share(version))
        store.wait([f"{name}/{version}/{generator}" for generator in GENERATORS])  # so that none is skipped
        needed.append(needs())
    return needed


def take_all(name: str, store: Any, subscriber: Subscriber) -> list[tuple[int, int]]:
    needed, version = [], -1
    deadline = time.monotonic() + LIMIT_S
    while version < SYNCS - 1:
        time.sleep(random.uniform(0, 2e-3))
        found = subscriber.take()
        if found is None:
            assert time.monotonic() < deadline, f"rank {RANK}: nothing after version {version}"
            continue
        version, deadline = found.version, time.monotonic() + LIMIT_S
        assert len(found.tensors) == 2 * len(TRAINERS)
        assert all((tensor.data == version % 256).all() for tensor in found.tensors), f"version {version} is mixed"
        found.release()
        store.set(f"{name}/{version}/{RANK}", "taken")
        needed.append(needs())
    return needed


def abort(error: BaseException) -> None:
    """A courier's error ends all ranks."""
    traceback.print_exception(error)
    os._exit(1)


def run(name: str, store: Any, end: Any, order: list[str]) -> None:
    """All versions over one channel; then the rank's line."""
    courier = Courier(end._transport, [end], abort)
    courier.start()
    needed = publish_all(name, store, end, order) if RANK in TRAINERS else take_all(name, store, end)
    store.set(f"{name}/{RANK}", "done")
    store.wait([f"{name}/{rank}" for rank in range(SIZE)])  # trainers serve until all have the last version
    courier.stop(LIMIT_S)
    WORLD.Barrier()
    digests = [xxhash.xxh3_64_hexdigest(" ".join(each).encode()) for each in ([e for e in order if e != TRAIN], order)]
    (files, threads), (last_files, last_threads) = needed[min(WARM, len(needed) - 1)], needed[-1]
    sys.stdout.write(
        f"{name} rank {RANK}: {len(needed)} versions, broadcasts {digests[0]}, collectives {digests[1]}, "
        f"files {files} {last_files}, threads {threads} {last_threads}\n"
    )
    sys.stdout.flush()


def main() -> None:
    torch.set_num_threads(1)
    store = share_store(WORLD, ["here"] * SIZE, LIMIT_S)
    if RANK in TRAINERS:
        init_replica_group(store, "gloo", RANK, len(TRAINERS), LIMIT_S, "trainers")
    group = make_group("gloo", store, "weights", [*TRAINERS, *GENERATORS], RANK, LIMIT_S)
    order: list[str] = []
    group = replace(group, handle=Recorded(group.handle, order))
    broadcaster = Broadcaster(group, detect(), BUCKET)
    first, second = MpiTransport(WORLD.Dup()), MpiTransport(WORLD.Dup())
    if RANK in TRAINERS:
        run("collective", store, CollectivePublisher(first, broadcaster, TRAINERS, GENERATORS, True, LIMIT_S), order)
        run("mpi", store, MpiPublisher(second, GENERATORS, BUCKET, True, LIMIT_S), order)
        dist.destroy_process_group()
    else:
        run("collective", store, CollectiveSubscriber(first, broadcaster, TRAINERS, True), order)
        run("mpi", store, MpiSubscriber(second, TRAINERS, True, LIMIT_S), order)


main()
