"""The exchange by itself: ranks as threads over the simulated network."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from headrace.comm.errors import HeadraceError, WaitLimitError
from headrace.comm.messages import Pulled
from headrace.comm.sample_exchange import Exchange, ExchangeError, Schema, fixed, ragged, text
from headrace.comm.simulated import SimulatedNetwork
from headrace.comm.wire import WireError

SCHEMA = Schema({"tokens": ragged(np.int32), "number": fixed(np.int64)})
OWNER = 0
LIMIT_S = 20.0


def together(
    count: int, body: Callable[[Exchange], None], schema: Schema = SCHEMA, memory_bytes: float | None = None
) -> None:
    """So many ranks, each in a thread of its own."""
    network = SimulatedNetwork(count)

    def rank(number: int) -> None:
        with Exchange.over(network.transport(number), schema, LIMIT_S, memory_bytes) as exchange:
            body(exchange)

    with ThreadPoolExecutor(count) as pool:
        for future in [pool.submit(rank, number) for number in range(count)]:
            future.result(3 * LIMIT_S)


def sample(number: int) -> dict[str, object]:
    return {"tokens": np.full(number % 7, number, np.int32), "number": number}


def test_several_owners_and_consumers_share_the_groups_and_release_them() -> None:
    """Ranks 0 and 1 put, 2 to 4 consume under one name."""
    groups, consumed, lock = 40, [], threading.Lock()

    def body(exchange: Exchange) -> None:
        if exchange.rank < 2:
            for key in range(groups):
                exchange.put(key, sample(key))
            return
        for owner in (0, 1):
            while got := exchange.consume(owner, "trainer", count=3, wait_s=1.0):
                for key, group in got.items():
                    assert group["tokens"][0].tolist() == [key] * (key % 7)
                    assert group["number"] == [key]
                with lock:
                    consumed.extend((owner, key) for key in got)
                exchange.release(owner, got)

    together(5, body)
    assert sorted(consumed) == [(owner, key) for owner in (0, 1) for key in range(groups)]


def test_a_rank_reads_lists_and_releases_its_own_groups_like_those_of_others() -> None:
    def body(exchange: Exchange) -> None:
        exchange.put("mine", [sample(1), sample(2)])
        exchange.put("other", sample(3), partition="validation")
        assert exchange.list(exchange.rank) == ["mine", "other"]
        got = exchange.get(exchange.rank, ["mine"], ["tokens"], rows=[1])
        assert [item["tokens"].tolist() for item in got["mine"]] == [[2, 2]]
        exchange.release(exchange.rank, ["mine"])
        assert exchange.list(exchange.rank, "validation") == exchange.list(exchange.rank) == ["other"]
        assert exchange.statistics()[:2] == (1, 1)

    together(1, body)


def test_an_owner_that_has_closed_goes_on_answering_until_all_have() -> None:
    def body(exchange: Exchange) -> None:
        if exchange.rank == OWNER:
            exchange.put(1, sample(1))
        else:
            time.sleep(0.3)
            while not exchange.list(OWNER):
                time.sleep(0.01)
            assert exchange.get(OWNER, [1])[1]["number"] == [1]

    together(3, body)


def test_a_dead_owner_is_named_with_what_it_was_asked_at_the_limit() -> None:
    network = SimulatedNetwork(2)
    exchange = Exchange.over(network.transport(1), SCHEMA, limit_s=0.2)
    network.kill(OWNER)
    for ask, what in (
        (lambda: exchange.get(OWNER, [3, "x"]), r"asked for group 3, group 'x'\."),
        (lambda: exchange.consume(OWNER, "scorer", 4), r"asked by scorer for 4 groups\."),
        (lambda: exchange.list(OWNER), r"asked for its groups\."),
    ):
        with pytest.raises(WaitLimitError, match=r"Rank 1 waited 0\.2 s for rank 0, which was " + what):
            ask()


@pytest.mark.parametrize("dead", [0, 1])
def test_closing_is_limited_and_names_whom_it_waits_for(dead: int) -> None:
    network = SimulatedNetwork(2)
    exchange = Exchange.over(network.transport(1 - dead), SCHEMA)
    network.kill(dead)
    told = "ranks [1] to close" if dead else "rank 0 to say that all ranks have closed"
    with pytest.raises(WaitLimitError) as raised:
        exchange.close(limit_s=0.2)
    assert told in str(raised.value)


def test_closing_waits_as_long_as_messages_come() -> None:
    def body(exchange: Exchange) -> None:
        if exchange.rank == OWNER:
            exchange.put(1, sample(1))
            exchange.close(limit_s=1.0)
        else:
            begun = time.monotonic()
            while time.monotonic() - begun < 2.0:
                exchange.list(OWNER)
                time.sleep(0.05)

    together(2, body)


def test_an_error_inside_does_not_wait_for_the_others() -> None:
    begun = time.monotonic()
    with pytest.raises(ZeroDivisionError), Exchange.over(SimulatedNetwork(2).transport(0), SCHEMA):
        raise ZeroDivisionError
    assert time.monotonic() - begun < LIMIT_S


def test_a_wrong_schema_is_an_error_at_the_consumer_and_the_owner_closes_well() -> None:
    network = SimulatedNetwork(2)

    def owner() -> None:
        with Exchange.over(network.transport(OWNER), SCHEMA, LIMIT_S) as exchange:
            exchange.put(1, sample(1))

    other = Schema({"tokens": ragged(np.int32), "number": fixed(np.int32)})
    with ThreadPoolExecutor(1) as pool:
        served = pool.submit(owner)
        with Exchange.over(network.transport(1), other, LIMIT_S) as exchange:
            with pytest.raises(ExchangeError, match=r"number is int64 \[\] there and int32 \[\] here"):
                exchange.get(OWNER, [1])
            with pytest.raises(ExchangeError, match="number of sample 0 of group 2 is of type float; the schema says"):
                exchange.put(2, {"tokens": np.empty(0, np.int32), "number": 0.5})
        served.result(LIMIT_S)


def test_what_ends_the_courier_is_raised_by_whatever_is_called_next() -> None:
    network = SimulatedNetwork(2)
    exchange = Exchange.over(network.transport(1), SCHEMA, LIMIT_S)
    network._send(OWNER, 1, b"\xff", [])
    with pytest.raises(WireError, match="Rank 0 sent protocol 255"):
        exchange.get(OWNER, [1])
    with pytest.raises(HeadraceError, match="Rank 0 sent protocol 255"):
        exchange.put(1, sample(1))


def test_an_answer_that_comes_after_the_limit_is_dropped() -> None:
    network = SimulatedNetwork(2)
    exchange = Exchange.over(network.transport(1), SCHEMA, limit_s=0.1)
    with pytest.raises(WaitLimitError):
        exchange.get(OWNER, [1])
    end = network.transport(OWNER)
    (question,) = end.poll()
    end.send(1, Pulled(question.message.request, b"\x90"))
    with pytest.raises(WaitLimitError):
        exchange.list(OWNER)


def test_put_waits_for_room_and_what_is_kept_stays_within_it() -> None:
    """A reader that releases makes room; ten times as much as there is room for goes through."""
    groups, nbytes, kept = 40, 1000 + 8, []

    def body(exchange: Exchange) -> None:
        if exchange.rank == OWNER:
            for key in range(groups):
                exchange.put(key, {"tokens": np.full(250, key, np.int32), "number": key})
                kept.append(exchange.statistics().bytes)
            return
        seen = 0
        while seen < groups:
            got = exchange.consume(OWNER, "trainer", count=3, wait_s=LIMIT_S)
            assert all((group["tokens"][0] == key).all() for key, group in got.items())
            exchange.release(OWNER, got)
            seen += len(got)

    together(2, body, memory_bytes=4 * nbytes)
    assert len(kept) == groups
    assert max(kept) == 4 * nbytes


def test_a_group_larger_than_all_the_room_passes_when_nothing_else_is_kept() -> None:
    def body(exchange: Exchange) -> None:
        large = {"tokens": np.arange(1000, dtype=np.int32), "number": 0}
        exchange.put("small", sample(1))
        threading.Timer(0.2, exchange.release, (exchange.rank, ["small"])).start()
        exchange.put("large", large)
        assert exchange.list(exchange.rank) == ["large"]

    together(1, body, memory_bytes=100)


def test_without_room_within_the_limit_put_says_what_is_kept_and_who_has_not_read_it() -> None:
    with Exchange.over(SimulatedNetwork(1).transport(0), SCHEMA, 0.2, memory_bytes=50) as exchange:
        exchange.put(1, sample(1))
        exchange.put(2, sample(6))
        exchange.consume(0, "scorer")
        text = (
            "Rank 0 waited 0.2 s for room for group 3 (20 bytes) beside the 2 groups (44 bytes) that it keeps, of "
            "memory_bytes = 50; unread: 1 by scorer. Groups stay until they are released"
        )
        with pytest.raises(WaitLimitError, match=re.escape(text)):
            exchange.put(3, sample(3))
        with pytest.raises(ExchangeError, match="group 2 is in the store already"):
            exchange.put(2, sample(3))
        exchange.release(0, [1, 2])
        exchange.put(3, sample(3))


def test_room_for_nothing_is_refused() -> None:
    with pytest.raises(ExchangeError, match="memory_bytes is 0: nothing could be kept"):
        Exchange.over(SimulatedNetwork(1).transport(0), SCHEMA, memory_bytes=0)


MISTAKES: dict[str, Callable[[Exchange], object]] = {
    "a truth value as key": lambda e: e.get(OWNER, [True]),  # type: ignore[list-item]
    "a fraction as key": lambda e: e.get(OWNER, [1.5]),  # type: ignore[list-item]
    "bytes as key": lambda e: e.get(OWNER, [b"a"]),  # type: ignore[list-item]
    "a list as key": lambda e: e.get(OWNER, [[1, 2]]),  # type: ignore[list-item]
    "a key beyond 64 bits": lambda e: e.get(OWNER, [2**70]),
    "half a surrogate pair as key": lambda e: e.get(OWNER, ["\udc80"]),
    "one key and no list": lambda e: e.get(OWNER, 1),  # type: ignore[arg-type]
    "a string and no list": lambda e: e.get(OWNER, "ab"),
    "a fraction as row": lambda e: e.get(OWNER, [1], rows=[0.5]),  # type: ignore[list-item]
    "a slice as rows": lambda e: e.get(OWNER, [1], rows=slice(0, 1)),  # type: ignore[arg-type]
    "a number as field": lambda e: e.get(OWNER, [1], fields=[3]),  # type: ignore[list-item]
    "a fraction of groups": lambda e: e.consume(OWNER, "c", count=1.5),  # type: ignore[arg-type]
    "no time to wait": lambda e: e.consume(OWNER, "c", wait_s=None),  # type: ignore[arg-type]
    "a number as partition": lambda e: e.list(OWNER, 3),  # type: ignore[arg-type]
    "a key to release": lambda e: e.release(OWNER, [True]),  # type: ignore[list-item]
    "a rank beyond the last": lambda e: e.get(5, [1]),
    "a rank before the first": lambda e: e.get(-1, [1]),
    "a name as rank": lambda e: e.get("0", [1]),  # type: ignore[arg-type]
    "no sample": lambda e: e.put("x", None),  # type: ignore[arg-type]
    "numbers as samples": lambda e: e.put("x", [1, 2]),  # type: ignore[list-item]
    "a string as sample": lambda e: e.put("x", "abc"),  # type: ignore[arg-type]
    "half a surrogate pair to put": lambda e: e.put("\ud800", sample(1)),
    "half a surrogate pair in a text": lambda e: e.put("x", sample(1) | {"told": "\udc80"}),
}


def test_a_mistake_is_refused_where_it_is_made_and_both_ranks_go_on() -> None:
    there = threading.Event()

    def body(exchange: Exchange) -> None:
        if exchange.rank == OWNER:
            exchange.put(1, sample(1))
            there.set()
            return
        assert there.wait(LIMIT_S)
        for name, mistake in MISTAKES.items():
            refused = None
            try:
                mistake(exchange)
            except ExchangeError as error:
                refused = error
            assert refused is not None, f"{name} was let through"
        assert exchange.get(OWNER, [1])[1]["number"] == [1]

    together(2, body, Schema({**SCHEMA.fields, "told": text(optional=True)}))


def test_integers_of_numpy_are_as_good_as_others() -> None:
    there = threading.Event()

    def body(exchange: Exchange) -> None:
        if exchange.rank == OWNER:
            exchange.put(np.int64(7), [sample(1), sample(2)])  # type: ignore[arg-type]
            there.set()
            return
        assert there.wait(LIMIT_S)
        got = exchange.get(OWNER, np.array([7]), rows=np.array([1]))  # type: ignore[arg-type]
        assert got[7]["number"] == [2]

    together(2, body)
