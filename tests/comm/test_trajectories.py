"""Trajectories in the sample exchange: what is pulled is what was put, and nothing wrong gets past."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.comm.columns import pack_groups
from headrace.comm.errors import HeadraceError
from headrace.comm.exchange import ExchangeConsumer, ExchangeOwner
from headrace.comm.messages import Pulled, Release
from headrace.comm.schema import ExchangeError
from headrace.comm.simulated import SimulatedNetwork
from headrace.comm.trajectories import (
    COLUMN_DTYPES,
    TRAJECTORY,
    TrajectoryStore,
    make_group,
    needed,
    trajectories_by_key,
    unpack_trajectories,
)
from headrace.comm.trajectory import Trajectory, Unit

LENGTHS = st.lists(st.integers(0, 40) | st.just(1) | st.just(0), max_size=6)
OWNER, CONSUMER = 0, 1


def trajectory(ticket: int, sample: int, length: int, attempt: int = 0) -> Trajectory:
    rng = np.random.default_rng([ticket, sample, attempt])
    return Trajectory(
        Unit(ticket, sample, attempt),
        tokens=rng.integers(0, 50_000, length, dtype=np.int32),
        loss_mask=rng.integers(0, 2, length, dtype=np.uint8),
        logprobs=-rng.random(length, dtype=np.float32),
        versions=rng.integers(-1, 9, length, dtype=np.int32),
        reward=float(rng.random()),
        finish="stop" if sample % 2 else "length",
        prompt_text=f"prompt {ticket}",
        response_text=f"response {sample}: ä €",
    )


def group(ticket: int, lengths: Sequence[int], attempt: int = 0) -> list[Trajectory]:
    return [trajectory(ticket, sample, length, attempt) for sample, length in enumerate(lengths)]


def plain(trajectories: Sequence[Trajectory]) -> list[dict[str, Any]]:
    """For comparison: everything that a trajectory is, dtypes included."""
    return [
        {
            name: (value.dtype.str, value.tolist()) if isinstance(value, np.ndarray) else value
            for name, value in msgspec.structs.asdict(item).items()
        }
        for item in trajectories
    ]


class Pair:
    """An owner and a consumer over a simulated network."""

    def __init__(self) -> None:
        self.network = SimulatedNetwork(3)
        self.store = TrajectoryStore()
        self.owner_end, self.consumer_end = self.network.transport(OWNER), self.network.transport(CONSUMER)
        self.owner = ExchangeOwner(self.owner_end, self.store)
        self.consumer = ExchangeConsumer(self.consumer_end, TRAJECTORY)

    def exchange(self, now: float = 0.0) -> None:
        """Let the couriers of both run until nothing is under way."""
        self.consumer.tick(now)
        turns = itertools.count()
        while self.network.next_event_time() is not None:
            assert next(turns) < 100, "a message waits for a rank that nobody polls"
            for end, service in ((self.owner_end, self.owner), (self.consumer_end, self.consumer)):
                for received in end.poll():
                    service.receive(received, now)

    def pull(self, keys: Sequence[tuple[int, int]], fields: Sequence[str] | None = None) -> Any:
        number = self.consumer.pull(OWNER, keys, needed(fields))
        assert self.consumer.take(number) is None
        self.exchange()
        groups = self.consumer.take(number)
        assert groups is not None
        return trajectories_by_key(groups)


@given(groups=st.lists(LENGTHS, max_size=4))
def test_pulled_groups_are_the_groups_that_were_put(groups: list[list[int]]) -> None:
    pair = Pair()
    wanted = {(ticket, 2): group(ticket, lengths, attempt=2) for ticket, lengths in enumerate(groups)}
    for (ticket, attempt), trajectories in wanted.items():
        pair.store.put(ticket, attempt, trajectories)
    pulled = pair.pull([*wanted])
    assert {key: plain(value) for key, value in pulled.items()} == {key: plain(value) for key, value in wanted.items()}
    assert {key: plain(value) for key, value in pair.store.get(wanted).items()} == {
        key: plain(value) for key, value in wanted.items()
    }


def test_a_group_may_lack_samples_and_the_others_keep_their_places() -> None:
    pair = Pair()
    rest = [trajectory(5, sample, 4) for sample in (0, 3)]
    pair.store.put(5, 0, rest)
    (pulled,) = pair.pull([(5, 0)]).values()
    assert plain(pulled) == plain(rest)
    assert [item.unit.sample for item in pulled] == [0, 3]


def test_only_the_fields_asked_for_travel() -> None:
    pair = Pair()
    pair.store.put(5, 0, group(5, [3, 0, 1]))
    header, buffers = pair.store.pack([(5, 0)], ["tokens"])
    assert [buffer.nbytes for buffer in buffers] == [16]
    assert b"prompt" not in header
    (pulled,) = pair.pull([(5, 0)], ["tokens", "response_text"]).values()
    for got, put in zip(pulled, group(5, [3, 0, 1]), strict=True):
        assert got.tokens.tolist() == put.tokens.tolist()
        assert (got.unit, got.reward, got.finish, got.response_text) == (
            put.unit,
            put.reward,
            put.finish,
            put.response_text,
        )
        assert (len(got.logprobs), len(got.versions), len(got.loss_mask), got.prompt_text) == (0, 0, 0, "")
        assert got.logprobs.dtype == np.float32


def test_neither_side_copies_columns() -> None:
    store = TrajectoryStore()
    store.put(1, 0, group(1, [4, 5]))
    header, buffers = store.pack([(1, 0)])
    held = store.get([(1, 0)])[1, 0]
    unpacked = unpack_trajectories(header, buffers)[1, 0]
    for name, buffer in zip(COLUMN_DTYPES, buffers, strict=True):
        assert all(np.shares_memory(getattr(item, name), buffer) for item in (*held, *unpacked))
        assert not any(getattr(item, name).flags.writeable for item in held)


def test_an_unknown_group_is_an_error_at_the_consumer_and_the_owner_goes_on() -> None:
    pair = Pair()
    pair.store.put(1, 0, group(1, [2]))
    with pytest.raises(
        HeadraceError, match=r"rank 0 failed: Not in the store .*: ticket 1 attempt 1, ticket 9 attempt 0"
    ):
        pair.pull([(1, 1), (1, 0), (9, 0)])
    assert plain(pair.pull([(1, 0)])[1, 0]) == plain(group(1, [2]))


def test_an_unknown_field_is_an_error_that_lists_the_fields() -> None:
    pair = Pair()
    pair.store.put(1, 0, group(1, [2]))
    with pytest.raises(HeadraceError, match="no field pixels; the fields are tokens, loss_mask"):
        pair.pull([(1, 0)], ["tokens", "pixels"])


def test_an_answer_is_taken_once() -> None:
    pair = Pair()
    pair.store.put(1, 0, group(1, [2]))
    number = pair.consumer.pull(OWNER, [(1, 0)])
    pair.exchange()
    assert pair.consumer.take(number) is not None
    with pytest.raises(KeyError):
        pair.consumer.take(number)


def test_waiting_names_owner_groups_and_time_until_the_answer_comes() -> None:
    pair = Pair()
    pair.store.put(1, 0, group(1, [2]))
    number = pair.consumer.pull(OWNER, [(1, 0)])
    assert pair.consumer.waiting() == []
    pair.consumer.tick(42.0)
    assert pair.consumer.waiting() == [(OWNER, [(1, 0)], 42.0)]
    pair.consumer.tick(43.0)
    pair.exchange(44.0)
    assert pair.consumer.waiting() == []
    assert pair.consumer.take(number) is not None


@pytest.mark.parametrize("sent", [False, True])
def test_a_cancelled_request_leaves_nothing_behind(sent: bool) -> None:
    pair = Pair()
    pair.store.put(1, 0, group(1, [2]))
    number = pair.consumer.pull(OWNER, [(1, 0)])
    if sent:
        pair.consumer.tick(0.0)
    pair.consumer.cancel(number)
    pair.exchange()
    assert pair.consumer.waiting() == []
    with pytest.raises(KeyError):
        pair.consumer.take(number)


def test_a_release_frees_the_bytes_and_may_come_twice() -> None:
    pair = Pair()
    pair.store.put(1, 0, group(1, [2, 1]))
    pair.store.put(2, 0, group(2, [10]))
    assert pair.store.list() == [(1, 0), (2, 0)]
    row, sample = sum(dtype.itemsize for dtype in COLUMN_DTYPES.values()), 16
    whole = 13 * row + 3 * sample
    assert pair.store.statistics()[:4] == (2, 3, whole, whole)
    for _ in range(2):
        pair.consumer_end.send(OWNER, Release([(1, 0), (7, 7)]))
        pair.exchange()
        assert pair.store.statistics()[:4] == (1, 1, 10 * row + sample, whole)
    assert pair.store.list() == [(2, 0)]


def test_a_group_is_put_once() -> None:
    store = TrajectoryStore()
    store.put(1, 0, group(1, [2]))
    with pytest.raises(HeadraceError, match="ticket 1 attempt 0 is in the store already"):
        store.put(1, 0, group(1, [3]))
    assert store.statistics().samples == 1


def test_a_sample_that_does_not_fit_is_refused_at_the_door() -> None:
    store = TrajectoryStore()
    wide = msgspec.structs.replace(trajectory(1, 0, 3), logprobs=np.zeros(3, np.float64))
    with pytest.raises(HeadraceError, match=r"Field logprobs of .* is float64 \[3\]; the schema says float32"):
        store.put(1, 0, [wide])
    short = msgspec.structs.replace(trajectory(1, 0, 3), versions=np.zeros(2, np.int32))
    with pytest.raises(HeadraceError, match=r"Field versions of .* has 2 rows for 3 tokens"):
        store.put(1, 0, [short])
    with pytest.raises(HeadraceError, match="can't be stored in the group of ticket 1 attempt 0"):
        store.put(1, 0, [trajectory(2, 0, 3)])
    assert store.list() == []


def packed() -> tuple[bytes, list[Any]]:
    return pack_groups(TRAJECTORY, [make_group(1, 0, group(1, [3, 1])), make_group(2, 0, group(2, [0]))])


def test_a_missing_or_extra_buffer_is_refused() -> None:
    header, buffers = packed()
    for wrong in (buffers[:-1], [*buffers, buffers[0]]):
        with pytest.raises(HeadraceError, match=f"names 8 columns, but {len(wrong)} buffers"):
            unpack_trajectories(header, wrong)


def test_a_buffer_of_the_wrong_size_is_refused() -> None:
    header, buffers = packed()
    buffers[2] = buffers[2][:-1]
    with pytest.raises(HeadraceError, match="Field logprobs of ticket 1 attempt 0 came with 15 bytes instead of 16"):
        unpack_trajectories(header, buffers)


def edited(edit: Any) -> bytes:
    """The header of `packed`, changed as a list of [key, samples, [[name, dtype, lengths, data], …], texts]."""
    groups = msgspec.msgpack.decode(packed()[0])
    edit(groups)
    return msgspec.msgpack.encode(groups)


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        (lambda groups: groups[0][2][0].__setitem__(1, "<f4"), r"Field tokens \(<f4\) of ticket 1"),
        (lambda groups: groups[0][2][0].__setitem__(0, "pixels"), "Field pixels"),
        (lambda groups: groups[0][2][0].__setitem__(2, [4]), "has 1 lengths for 2 samples"),
        (lambda groups: groups[0][2][0].__setitem__(2, [-2, 6]), "can't be read"),
        (lambda groups: groups[0][2][0].__setitem__(2, [-1, 4]), "Field tokens of .* is missing in a sample"),
        (lambda groups: groups[0][2][0].__setitem__(2, [1, 3]), "has 3 rows for 1 tokens"),
        (lambda groups: groups[0][2].__setitem__(3, groups[0][2][0]), "came twice"),
        (lambda groups: groups[1].__setitem__(0, [1, 0]), "names a group twice"),
        (lambda groups: groups[0].__setitem__(0, 1.5), "can't be read"),
    ],
)
def test_a_header_that_does_not_fit_is_refused(edit: Any, text: str) -> None:
    with pytest.raises(HeadraceError, match=text):
        unpack_trajectories(edited(edit), packed()[1])


@given(data=st.data())
def test_a_damaged_header_gives_samples_or_an_exchange_error_and_nothing_else(data: st.DataObject) -> None:
    original, buffers = packed()
    header = bytearray(original)
    header[data.draw(st.integers(0, len(header) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ExchangeError):
        groups = unpack_trajectories(bytes(header), buffers)
        assert sorted(len(samples) for samples in groups.values()) == [1, 2]


def test_an_answer_with_other_groups_than_asked_for_is_an_error() -> None:
    pair = Pair()
    number = pair.consumer.pull(OWNER, [(1, 0)])
    pair.consumer.tick(0.0)
    header, buffers = packed()
    pair.owner_end.poll()
    pair.owner_end.send(CONSUMER, Pulled(number, header), buffers)
    pair.exchange()
    with pytest.raises(
        HeadraceError, match=r"rank 0 failed: .*ticket 1 attempt 0, ticket 2 attempt 0, asked for: ticket 1 attempt 0"
    ):
        pair.consumer.take(number)


def test_an_answer_from_another_rank_is_an_error_even_with_the_right_groups() -> None:
    pair = Pair()
    pair.store.put(1, 0, group(1, [3]))
    pair.network.kill(2)
    number = pair.consumer.pull(2, [(1, 0)])
    header, buffers = pair.store.pack([(1, 0)])
    pair.owner_end.send(CONSUMER, Pulled(number, header), buffers)
    pair.exchange()
    with pytest.raises(HeadraceError, match="rank 0 answered for rank 2"):
        pair.consumer.take(number)


def test_the_main_thread_puts_and_takes_while_couriers_serve() -> None:
    pair, done, failures = Pair(), threading.Event(), []

    def courier() -> None:
        try:
            while not done.is_set():
                pair.exchange()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=courier)
    thread.start()
    try:
        for ticket in range(100):
            pair.store.put(ticket, 0, group(ticket, [3, 1]))
            number = pair.consumer.pull(OWNER, [(ticket, 0)])
            while (pulled := pair.consumer.take(number)) is None:
                assert not failures
            assert plain(trajectories_by_key(pulled)[ticket, 0]) == plain(group(ticket, [3, 1]))
            pair.store.release([(ticket, 0)])
    finally:
        done.set()
        thread.join(10)
    assert not thread.is_alive()
    assert not failures
    assert pair.store.statistics().bytes == 0
