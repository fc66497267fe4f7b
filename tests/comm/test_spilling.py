"""A store that spills: what is counted as its memory, what leaves it, and how that comes back."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.comm.columns import Group, gather, pack_groups
from headrace.comm.exchange import ExchangeConsumer, ExchangeOwner
from headrace.comm.schema import ExchangeError, Schema, ragged, text
from headrace.comm.simulated import SimulatedNetwork
from headrace.comm.spilling import LostGroupsError, SpillingStore

SCHEMA = Schema({"tokens": ragged(np.int32), "answer": text()})
OWNER, CONSUMER = 0, 1
LIMIT_S = 20.0


def group(key: int, tokens: int = 100) -> Group[int]:
    """Of 4 bytes a token; its contents follow from its key."""
    samples = [{"tokens": np.full(tokens - tokens // 4, key, np.int32), "answer": f"answer {key}"}]
    samples.append({"tokens": np.arange(tokens // 4, dtype=np.int32), "answer": "another"})
    return gather(SCHEMA, key, samples)


class Disk:
    """Where groups are written when the test says so, and read from when it lets them."""

    def __init__(self, store: SpillingStore[int]) -> None:
        self.store = store
        self.waiting: list[Group[int]] = []
        self.files: dict[int, tuple[bytes, list[bytes]]] = {}
        self.hurries = 0
        self.readable = threading.Event()
        self.readable.set()
        store.spill_to(self.take, self.hurry, self.read)

    def take(self, group: Group[int]) -> None:
        self.waiting.append(group)

    def hurry(self) -> None:
        self.hurries += 1

    def write(self, works: bool = True) -> None:
        """All that waits is written, or fails to be."""
        groups, self.waiting = self.waiting, []
        for each in groups if works else ():
            header, buffers = pack_groups(SCHEMA, [each])
            self.files[each.key] = header, [buffer.tobytes() for buffer in buffers]
        self.store.let_go([each.key for each in groups], works)

    def read(self, key: int) -> Group[int]:
        assert self.readable.wait(LIMIT_S)
        if key not in self.files:
            raise LostGroupsError(f"group {key} has gone.", [key])
        return group(key, sum(len(buffer) for buffer in self.files[key][1]) // 4)


def recalled(store: SpillingStore[int], keys: Sequence[int]) -> dict[int, Group[int]]:
    begun = time.monotonic()
    while not store.recall(keys):
        assert time.monotonic() < begun + LIMIT_S
        time.sleep(1e-3)
    return store.select(keys)


def same(one: Group[int], other: Group[int]) -> bool:
    return pack_bytes(one) == pack_bytes(other)


def pack_bytes(one: Group[int]) -> tuple[bytes, list[bytes]]:
    header, buffers = pack_groups(SCHEMA, [one])
    return header, [buffer.tobytes() for buffer in buffers]


def test_over_half_the_memory_the_newest_that_are_written_leave_it_and_come_back_as_they_were() -> None:
    store = SpillingStore[int](SCHEMA, memory_bytes=2000)
    disk = Disk(store)
    for key in range(2):
        store.add(group(key))
    disk.write()
    assert (store.memory_use(), disk.hurries) == ((2, 800, 0), 0), "there is room"
    store.add(group(2))
    assert (store.memory_use(), disk.hurries) == ((2, 800, 1), 0), "what is written makes room"
    for key in (3, 4):
        store.add(group(key))
    assert (store.memory_use(), disk.hurries) == ((3, 1200, 2), 1), "the others aren't yet"
    disk.write()
    assert store.memory_use() == (2, 800, 3)
    assert store.list() == [0, 1, 2, 3, 4]
    assert store.statistics()[:3] == (5, 10, 800)
    with pytest.raises(ExchangeError, match="group 1 is on the disk and wasn't recalled"):
        store.select([1])
    assert all(same(store.select([key])[key], group(key)) for key in (2, 3)), "the newest have left"
    found = recalled(store, [4, 0, 2])
    assert all(same(found[key], group(key)) for key in (0, 2, 4))
    assert store.memory_use() == (2, 800, 3), "what was read back went with its reader"
    assert same(recalled(store, [4])[4], group(4)), "once more"
    store.release(range(5))
    assert store.memory_use() == (0, 0, 3)
    assert store.list() == []


def test_a_released_group_counts_until_it_is_written() -> None:
    store = SpillingStore[int](SCHEMA, memory_bytes=10_000)
    disk = Disk(store)
    store.add(group(0))
    store.release([0])
    assert store.memory_use() == (0, 400, 0)
    disk.write()
    assert store.memory_use() == (0, 0, 0)


def test_what_could_not_be_written_stays_in_memory() -> None:
    store = SpillingStore[int](SCHEMA, memory_bytes=100)
    disk = Disk(store)
    store.add(group(0))
    disk.write(works=False)
    assert store.memory_use() == (1, 400, 0)
    assert same(store.select([0])[0], group(0))


def test_a_group_larger_than_all_the_memory_passes() -> None:
    store = SpillingStore[int](SCHEMA, memory_bytes=10)
    disk = Disk(store)
    store.add(group(0, tokens=10_000))
    disk.write()
    assert store.memory_use() == (0, 0, 1)
    assert same(recalled(store, [0])[0], group(0, tokens=10_000))


@given(st.lists(st.tuples(st.sampled_from(["add", "write", "fail", "release", "read"]), st.integers(0, 9))))
def test_the_memory_counted_is_what_store_and_writer_refer_to(actions: list[tuple[str, int]]) -> None:
    store = SpillingStore[int](SCHEMA, memory_bytes=1500)
    disk = Disk(store)
    added: set[int] = set()
    for number, (action, key) in enumerate(actions):
        if action == "add":
            store.add(group(number, 50 + 20 * key))
            added.add(number)
        elif action in ("write", "fail"):
            disk.write(action == "write")
            spillable = [each for each in store._groups.values() if each.nbytes and each.key in store._written]
            assert store.memory_use().bytes <= 750 or not spillable
        elif added and action == "release":
            gone = sorted(added)[key % len(added)]
            store.release([gone])
            added.discard(gone)
        elif added:
            one = sorted(added)[key % len(added)]
            assert recalled(store, [one])[one]["answer"][0] == f"answer {one}"
        there = {each.key: each.nbytes for each in (*store._groups.values(), *disk.waiting) if each.nbytes}
        assert store.memory_use().bytes == sum(there.values())
        assert store.list() == sorted(added)
    store.release(list(added))
    disk.write()
    assert store.memory_use()[:2] == (0, 0)
    assert not any([store._writing, store._written, store._spilled, store._reading, store._groups])


class Pair:
    """A store's owner, and a consumer of it."""

    def __init__(self) -> None:
        network = SimulatedNetwork(2)
        self.store = SpillingStore[int](SCHEMA, memory_bytes=10)
        self.disk = Disk(self.store)
        self.ends = [network.transport(rank) for rank in (OWNER, CONSUMER)]
        self.owner = ExchangeOwner(self.ends[OWNER], self.store)
        self.consumer = ExchangeConsumer(self.ends[CONSUMER], SCHEMA)

    def put(self, *keys: int) -> None:
        for key in keys:
            self.store.add(group(key))

    def turn(self) -> None:
        """One turn of both couriers."""
        for end, service in zip(self.ends, (self.owner, self.consumer), strict=True):
            for received in end.poll():
                service.receive(received, 0.0)
            service.tick(0.0)

    def take(self, number: int) -> dict[int, Group[int]]:
        begun = time.monotonic()
        while (groups := self.consumer.take(number)) is None:
            assert time.monotonic() < begun + LIMIT_S
            self.turn()
            time.sleep(1e-4)
        return groups  # type: ignore[return-value]


def test_while_a_slow_disk_is_read_the_owner_answers_others() -> None:
    pair = Pair()
    pair.put(0, 1)
    pair.disk.write()
    pair.put(2)
    pair.disk.readable.clear()
    slow = pair.consumer.pull(OWNER, [0, 1, 2])
    for _ in range(5):
        pair.turn()
    assert same(pair.take(pair.consumer.pull(OWNER, [2]))[2], group(2))
    assert pair.consumer.take(slow) is None
    pair.disk.readable.set()
    got = pair.take(slow)
    assert all(same(got[key], group(key)) for key in (0, 1, 2))


def test_a_consumer_is_told_which_groups_are_lost_and_the_owner_goes_on() -> None:
    pair = Pair()
    pair.put(0, 1)
    pair.disk.write()
    del pair.disk.files[1]
    with pytest.raises(LostGroupsError, match=r"Rank 0 has lost groups: group 1 has gone\.") as caught:
        pair.take(pair.consumer.pull(OWNER, [0, 1]))
    assert caught.value.keys == [1]
    assert same(pair.take(pair.consumer.pull(OWNER, [0]))[0], group(0))
    with pytest.raises(ExchangeError, match="can't be consumed by name"):
        pair.take(pair.consumer.consume(OWNER, "scorer", 1))


def test_a_fault_of_the_reader_is_not_taken_for_a_lost_group() -> None:
    pair = Pair()
    pair.put(0)
    pair.disk.write()
    pair.disk.files[0] = b"", None  # type: ignore[assignment]
    number = pair.consumer.pull(OWNER, [0])
    with pytest.raises(TypeError):
        pair.take(number)
