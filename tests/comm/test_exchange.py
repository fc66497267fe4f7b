"""The sample exchange with any schema: what is pulled is what was put, bit for bit, and each consumer sees it once."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.comm import exchange
from headrace.comm.columns import Group, gather, pack_groups, unpack_groups
from headrace.comm.exchange import EAGER_BYTES, ExchangeConsumer, ExchangeOwner, Groups
from headrace.comm.messages import Key, Pulled
from headrace.comm.schema import ExchangeError, Field, Schema, fixed, ragged, text
from headrace.comm.simulated import SimulatedNetwork
from headrace.comm.store import SampleStore

OWNER = 0
DTYPES = ["bool", "uint8", "<i4", ">i4", "int64", "float16", "complex64", "<M8[ns]", "S3", "U2", "bfloat16"]
SHAPES = st.lists(st.integers(0, 3), max_size=2)
ARRAYS = st.builds(fixed, st.sampled_from(DTYPES), SHAPES, st.booleans()) | st.builds(
    ragged, st.sampled_from([*DTYPES, "float8_e5m2"]), SHAPES, st.booleans()
)
SCHEMAS = st.dictionaries(st.text(max_size=4), ARRAYS | st.builds(text, st.booleans()), min_size=1, max_size=5).map(
    Schema
)
KEYS = st.integers(-(2**63), 2**63 - 1) | st.text(max_size=5) | st.lists(st.integers(0, 9), max_size=3).map(tuple)
Sample = dict[str, Any]


def random_delay(source: int, target: int, rng: random.Random) -> float:
    return rng.expovariate(1.0)


def value(field: Field, rng: np.random.Generator) -> Any:
    if field.optional and rng.random() < 0.4:
        return None
    if field.kind == "text":
        return "".join(map(chr, rng.integers(0, 0xD800, rng.integers(0, 4))))
    shape = field.shape if field.kind == "fixed" else (int(rng.choice([0, 1, 2, 50])), *field.shape)
    dtype, count = field.carrier, int(np.prod(shape, dtype=int))
    if dtype.kind == "b":
        return rng.integers(0, 2, shape).astype(bool)
    if dtype.kind in "SU":  # of any bytes, they needn't be strings
        unit = np.dtype(np.uint8 if dtype.kind == "S" else np.uint32)
        return rng.integers(65, 91, count * dtype.itemsize // unit.itemsize, unit).view(dtype).reshape(shape)
    return np.frombuffer(rng.bytes(count * dtype.itemsize), dtype).reshape(shape)


@st.composite
def samples(draw: st.DrawFn, schema: Schema) -> list[Sample]:
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    count = draw(st.integers(0, 4))
    return [{name: value(field, rng) for name, field in schema.fields.items()} for _ in range(count)]


def plain(each: Mapping[str, Any]) -> dict[str, Any]:
    """For comparison: dtype, shape and bits of arrays; numbers, texts and None as they are."""

    def bits(item: Any) -> Any:
        if not hasattr(item, "dtype"):
            return item
        array = np.asarray(item)
        if not array.ndim:  # numpy's own numbers have the byte order of the machine
            array = array.astype(array.dtype.newbyteorder("="))
        return array.dtype.str, array.shape, array.tobytes()

    return {name: bits(item) for name, item in each.items()}


class World:
    """An owner, and consumers that may be anywhere, over a network with delays."""

    def __init__(self, schema: Schema, ranks: int = 2, seed: int = 0, theirs: Schema | None = None) -> None:
        self.network = SimulatedNetwork(ranks, seed, random_delay)
        self.store = SampleStore(schema)
        self.ends = [self.network.transport(rank) for rank in range(ranks)]
        self.owner = ExchangeOwner(self.ends[OWNER], self.store)
        self.consumers = {rank: ExchangeConsumer(self.ends[rank], theirs or schema) for rank in range(1, ranks)}

    def turn(self) -> None:
        """One turn of every courier."""
        services: dict[int, ExchangeOwner | ExchangeConsumer] = {OWNER: self.owner, **self.consumers}
        for rank, service in services.items():
            for received in self.ends[rank].poll():
                service.receive(received, self.network.now)
            service.tick(self.network.now)

    def answer(self, ask: Callable[[ExchangeConsumer], int], rank: int = 1) -> Groups:
        """What comes to a question of one consumer."""
        number = ask(self.consumers[rank])
        for _ in range(1000):
            self.turn()
            groups = self.consumers[rank].take(number)
            if groups is not None:
                return groups
            self.network.advance(0.1)
        raise AssertionError("no answer")


@settings(deadline=None)
@given(st.data())
def test_what_is_pulled_is_what_was_put(data: st.DataObject) -> None:
    schema = data.draw(SCHEMAS)
    world = World(schema, seed=data.draw(st.integers(0, 99)))
    wanted = data.draw(st.dictionaries(KEYS, samples(schema), max_size=3))
    for key, each in wanted.items():
        world.store.put(key, each)
    fields = data.draw(st.none() | st.lists(st.sampled_from([*schema.fields]), unique=True))
    most = min(map(len, wanted.values()), default=0)
    rows = data.draw(st.none() | st.lists(st.integers(0, most - 1), max_size=5)) if most else None
    with mock.patch.object(exchange, "EAGER_BYTES", data.draw(st.sampled_from([0, 100, EAGER_BYTES]))):
        pulled = world.answer(lambda consumer: consumer.pull(OWNER, wanted, fields, rows))
    assert [*pulled] == [*wanted]
    for key, each in wanted.items():
        chosen = each if rows is None else [each[row] for row in rows]
        names = schema.fields if fields is None else fields
        expected = [plain({name: item[name] for name in names}) for item in chosen]
        assert [plain(item) for item in pulled[key]] == expected
        assert len(pulled[key]) == len(chosen)
        here = world.store.get([key], fields, rows)[key]
        assert [plain(item) for item in here] == expected


@settings(deadline=None)
@given(st.data())
def test_every_consumer_sees_every_group_exactly_once(data: st.DataObject) -> None:
    """Two names; the first is used by two ranks. Puts, releases and delays in any order."""
    schema = Schema({"number": fixed(np.int64)})
    world = World(schema, ranks=4, seed=data.draw(st.integers(0, 99)))
    names = {1: "scorer", 2: "scorer", 3: "trainer"}
    seen: dict[str, list[Key]] = {"scorer": [], "trainer": []}
    asked: list[tuple[int, int]] = []
    put = 0

    def collect() -> None:
        for rank, number in list(asked):
            groups = world.consumers[rank].take(number)
            if groups is not None:
                asked.remove((rank, number))
                seen[names[rank]] += groups
                assert [group["number"] for group in groups.values()] == [[key] for key in groups]

    def ask(rank: int, count: int, patience_s: float) -> None:
        asked.append((rank, world.consumers[rank].consume(OWNER, names[rank], count, patience_s=patience_s)))

    for _ in range(data.draw(st.integers(1, 30))):
        match data.draw(st.sampled_from(["put", "ask", "wait"])):
            case "put":
                world.store.put(put, {"number": put})
                world.store.put(f"validation {put}", {"number": -1}, "validation")
                put += 1
            case "ask":
                ask(data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4)), data.draw(st.sampled_from([0.0, 1.5])))
            case "wait":
                world.network.advance(data.draw(st.floats(0, 3)))
        world.turn()
        collect()
    for turn in range(200):
        if turn < 100:
            ask(1 + turn % 3, 4, 0.0)
        world.network.advance(1.0)
        world.turn()
        collect()
    assert not asked
    for name, keys in seen.items():
        assert sorted(keys) == [*range(put)], name
    assert world.store.list("train") == [*range(put)], "consumed isn't released"


def test_one_name_reads_in_the_order_of_putting_and_waits_for_another_name() -> None:
    store = SampleStore(Schema({"number": fixed(np.int64)}))
    for number in range(4):
        store.put(number, {"number": number}, "train" if number < 3 else "validation")
    assert [*store.consume("trainer", 9, after="scorer")] == []
    assert [*store.consume("scorer", 2)] == [0, 1]
    assert [*store.consume("trainer", 9, after="scorer")] == [0, 1]
    store.release([0, 2])
    assert [*store.consume("trainer", 9, after="scorer")] == []
    assert [*store.consume("scorer", 9)] == []
    assert [*store.consume("scorer", 9, partition="validation")] == [3]
    assert store.statistics().partitions == {"train": 1, "validation": 1}
    assert store.statistics().unread == {"trainer": 0, "scorer": 0}


def test_a_key_that_was_released_may_be_put_again_and_is_new_to_everybody() -> None:
    store = SampleStore(Schema({"number": fixed(np.int64)}))
    for number in range(2):
        store.put("again", {"number": number})
        assert [group["number"] for group in store.consume("trainer", 1).values()] == [[number]]
        store.release(["again"])


def test_an_owner_keeps_a_question_until_there_is_a_group_or_patience_ends() -> None:
    world = World(Schema({"number": fixed(np.int64)}))
    assert world.answer(lambda consumer: consumer.consume(OWNER, "trainer", 1)) == {}
    number = world.consumers[1].consume(OWNER, "trainer", 1, patience_s=50.0)
    for _ in range(20):
        world.turn()
        world.network.advance(1.0)
    assert world.consumers[1].take(number) is None
    world.store.put(1, {"number": 1})
    assert [*world.answer(lambda _: number)] == [1]


def test_the_keys_of_an_owner_are_listed_by_partition() -> None:
    world = World(SCHEMA)
    for key, partition in (("a", "train"), ("b", "validation"), ((1, 2), "train")):
        world.store.put(key, [], partition)
    assert [*world.answer(lambda consumer: consumer.browse(OWNER))] == ["a", "b", (1, 2)]
    assert [*world.answer(lambda consumer: consumer.browse(OWNER, "train"))] == ["a", (1, 2)]
    assert [*world.answer(lambda consumer: consumer.browse(OWNER, "nothing"))] == []
    world.consumers[1].release(OWNER, ["a", (1, 2)])
    assert [*world.answer(lambda consumer: consumer.browse(OWNER))] == ["b"]


SCHEMA = Schema(
    {
        "tokens": ragged(np.int32),
        "hidden": ragged("bfloat16", (4,)),
        "pixels": ragged(np.uint8, (8, 8, 3), optional=True),
        "reward": fixed(np.float32),
    }
)


def pictures(count: int) -> Sample:
    """A sample that is worth buffers of its own."""
    rng = np.random.default_rng(count)
    return {
        "tokens": rng.integers(0, 9, 4 * EAGER_BYTES, dtype=np.int32),
        "hidden": rng.integers(0, 2**16, (EAGER_BYTES, 4), dtype=np.uint16),
        "pixels": rng.integers(0, 256, (count, 8, 8, 3), dtype=np.uint8) if count else None,
        "reward": float(count),
    }


def test_pixels_travel_only_to_those_who_ask_for_them() -> None:
    store = SampleStore(SCHEMA)
    store.put(1, [pictures(100), pictures(0), pictures(0)])
    _, buffers = store.pack([1], ["tokens", "reward"], eager_bytes=EAGER_BYTES)
    assert [buffer.nbytes for buffer in buffers] == [3 * 4 * EAGER_BYTES * 4]
    _, buffers = store.pack([1], ["pixels"], rows=[1, 2], eager_bytes=0)
    assert [buffer.nbytes for buffer in buffers] == [0]


def test_neither_side_copies_large_columns() -> None:
    store = SampleStore(SCHEMA)
    given_ = [pictures(3), pictures(1)]
    store.put(1, given_)
    header, buffers = store.pack([1], rows=[0, 1], eager_bytes=1)
    arrived = unpack_groups(SCHEMA, header, buffers)[1]
    for name, buffer in zip(("tokens", "hidden", "pixels"), buffers, strict=True):
        for here, there, original in zip(store.get([1])[1][name], arrived[name], given_, strict=True):
            assert np.shares_memory(here, buffer)
            assert np.shares_memory(there, buffer)
            assert not np.shares_memory(here, original[name]), "what was put may be changed"
            assert not here.flags.writeable


def test_memory_is_used_again_after_a_release_but_not_while_somebody_reads_it() -> None:
    store = SampleStore(SCHEMA)

    def put(key: int) -> Any:
        store.put(key, pictures(key))
        return store.get([key])[key]["tokens"][0]

    first = put(1)
    address, kept = first.ctypes.data, first.copy()
    store.release([1])
    assert put(2).ctypes.data != address
    assert np.array_equal(first, kept)
    del first
    store.release([2])
    assert address in {put(key).ctypes.data for key in (3, 4)}


def test_small_columns_travel_in_the_header() -> None:
    store = SampleStore(SCHEMA)
    store.put(1, {"tokens": np.arange(9, dtype=np.int32), "hidden": np.zeros((1, 4), np.uint16), "reward": 1.0})
    header, buffers = store.pack([1], eager_bytes=EAGER_BYTES)
    assert buffers == []
    assert unpack_groups(SCHEMA, header, [])[1]["tokens"][0].tolist() == [*range(9)]


@pytest.mark.parametrize(
    ("ask", "told"),
    [
        (lambda it: it.pull(OWNER, [1, 9]), "rank 0 failed: Not in the store .*: group 9"),
        (lambda it: it.pull(OWNER, [1], ["sound"]), "no field sound; the fields are tokens, hidden, pixels, reward"),
        (lambda it: it.pull(OWNER, [1], None, [2]), "group 1 has 2 samples; there is no sample 2"),
        (lambda it: it.pull(OWNER, [1], None, [-1]), "group 1 has 2 samples; there is no sample -1"),
        (lambda it: it.consume(OWNER, "me", 1, ["sound"]), "no field sound"),
        (lambda it: it.consume(OWNER, "me", 0), "Consumer me asked for 0 groups"),
    ],
)
def test_a_mistake_is_told_to_the_consumer_and_the_owner_goes_on(ask: Any, told: str) -> None:
    world = World(SCHEMA)
    world.store.put(1, [pictures(1), pictures(2)])
    with pytest.raises(ExchangeError, match=told):
        world.answer(ask)
    assert [*world.answer(lambda consumer: consumer.consume(OWNER, "me", 1))] == [1], "nothing was used up"


def test_a_consumer_with_another_schema_is_told_the_difference() -> None:
    world = World(SCHEMA, theirs=Schema({**SCHEMA.fields, "tokens": ragged(np.int64)}))
    world.store.put(1, [])
    questions: list[Callable[[ExchangeConsumer], int]] = [
        lambda consumer: consumer.pull(OWNER, [1]),
        lambda consumer: consumer.consume(OWNER, "trainer", 1),
        lambda consumer: consumer.browse(OWNER),
    ]
    for question in questions:
        with pytest.raises(ExchangeError, match=r"rank 0 failed: .*tokens is int32 \[\*\] there and int64 \[\*\] here"):
            world.answer(question)
    assert [*world.store.consume("trainer", 1)] == [1]


def test_an_answer_without_a_field_that_was_asked_for_is_an_error() -> None:
    world = World(SCHEMA)
    number = world.consumers[1].pull(OWNER, [1], ["tokens", "reward"])
    header, buffers = pack_groups(SCHEMA, [Group(1, 0, {}, {})])
    world.ends[OWNER].send(1, Pulled(number, header), buffers)
    world.consumers[1].tick(0.0)
    world.ends[OWNER].poll()
    with pytest.raises(ExchangeError, match="group 1 came with the fields none, asked for: reward, tokens"):
        world.answer(lambda _: number)


@settings(deadline=None)
@given(st.data())
def test_a_damaged_header_is_an_exchange_error_or_groups_of_the_schema(data: st.DataObject) -> None:
    schema = data.draw(SCHEMAS)
    header, buffers = pack_groups(schema, [gather(schema, key, data.draw(samples(schema))) for key in (1, "b")])
    damaged = bytearray(header)
    damaged[data.draw(st.integers(0, len(header) - 1))] = data.draw(st.integers(0, 255))
    try:
        groups: Sequence[Group[Any]] = [*unpack_groups(schema, bytes(damaged), buffers).values()]
    except ExchangeError:
        return
    for group in groups:
        assert group.fields <= schema.fields.keys()
        for name in group.fields:
            assert len(group[name]) == group.samples
