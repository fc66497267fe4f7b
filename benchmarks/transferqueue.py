"""The other side of `exchange_vs_transferqueue`: TransferQueue on a Ray of its own. Imports nothing of headrace.

    python transferqueue.py FOLDER NBYTES SAMPLES GROUPS IN_FLIGHT

For every line on standard input: a producer and a consumer, two Ray actors, pass GROUPS batches of SAMPLES samples, of
NBYTES in all each, and the seconds that it took are printed. No more than IN_FLIGHT batches are under way at once: the
consumer writes a byte into a pipe for every batch that it has in its hands.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path
from typing import Any

import ray
import torch
import transfer_queue as tq
from tensordict import TensorDict

PARTITION, FIELD, TASK = "train", "tokens", "consumer"
EMPTY_S = 200e-6
"""Pause of a consumer that found nothing."""


def part_of(nbytes: int, samples: int) -> int:
    """Elements of a part, of which a batch has 1 + 2 + … + `samples`."""
    return nbytes // 4 // (samples * (samples + 1) // 2)


def batch_of(nbytes: int, samples: int) -> TensorDict:
    """Ragged: sample n has n + 1 parts."""
    part = part_of(nbytes, samples)
    if samples == 1:
        return TensorDict({FIELD: torch.zeros(1, part, dtype=torch.int32)}, batch_size=[1])
    rows = [torch.full((part * (n + 1),), n, dtype=torch.int32) for n in range(samples)]
    return TensorDict({FIELD: torch.nested.as_nested_tensor(rows, layout=torch.jagged)}, batch_size=[samples])


@ray.remote
class Producer:
    def __init__(self, pipe: str, nbytes: int, samples: int) -> None:
        tq.init()
        self._batch, self._samples = batch_of(nbytes, samples), samples
        self._credits = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
        self._put = 0

    async def run(self, groups: int, in_flight: int) -> None:
        """Put so many batches, and wait until the consumer has them all."""
        credits = asyncio.Semaphore(in_flight)
        loop = asyncio.get_running_loop()
        loop.add_reader(self._credits, lambda: [credits.release() for _ in os.read(self._credits, 4096)])
        under_way = []
        for _ in range(groups):
            await credits.acquire()
            keys = [f"{self._put}-{n}" for n in range(self._samples)]
            self._put += 1
            put = tq.async_kv_batch_put(keys=keys, partition_id=PARTITION, fields=self._batch)
            under_way.append(asyncio.ensure_future(put))
            await asyncio.sleep(0)
        await asyncio.gather(*under_way)
        for _ in range(in_flight):  # the last credits belong to this round
            await credits.acquire()
        loop.remove_reader(self._credits)


@ray.remote
class Consumer:
    def __init__(self, pipe: str, nbytes: int, samples: int) -> None:
        tq.init()
        self._client: Any = tq.get_client()
        self._credits = os.open(pipe, os.O_RDWR)
        self._part, self._samples = part_of(nbytes, samples), samples

    async def run(self, groups: int, most: int) -> None:
        """Take up to `most` batches at once, as many as there are."""
        left = groups
        while left:
            taken = await self._take(min(left, most))
            left -= taken
            if taken:
                os.write(self._credits, bytes(taken))

    async def _take(self, most: int) -> int:
        count = most
        while count:
            meta = await self._client.async_get_meta([FIELD], count * self._samples, PARTITION, "fetch", TASK)
            if meta.size:
                data = await self._client.async_get_data(meta)
                for row in data[FIELD].unbind():
                    assert int(row[-1]) == row.numel() // self._part - 1
                await self._client.async_clear_samples(meta)
                return int(meta.size) // self._samples
            count //= 2
        await asyncio.sleep(EMPTY_S)
        return 0


def main() -> None:
    folder, (nbytes, samples, groups, in_flight) = Path(sys.argv[1]), map(int, sys.argv[2:])
    pipe = str(folder / "credits")
    os.mkfifo(pipe)
    ray.init(
        address="local",
        num_cpus=8,
        include_dashboard=False,
        log_to_driver=False,
        _temp_dir=str(folder / "ray"),
        _node_ip_address="127.0.0.1",
    )
    tq.init({"controller": {"polling_mode": True}, "backend": {"storage_backend": "SimpleStorage"}})
    producer, consumer = Producer.remote(pipe, nbytes, samples), Consumer.remote(pipe, nbytes, samples)
    for _ in sys.stdin:
        begun = time.perf_counter()
        ray.get([producer.run.remote(groups, in_flight), consumer.run.remote(groups, in_flight)])
        print(time.perf_counter() - begun, flush=True)
    ray.shutdown()


main()
