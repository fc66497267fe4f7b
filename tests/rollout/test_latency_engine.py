"""The latency engine: lengths, time and labels, without torch."""

from __future__ import annotations

import math
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from headrace.comm.weights import TensorSpec, WeightTensor
from headrace.rollout import latency_engine
from headrace.rollout.config import LatencyConfig
from headrace.rollout.engine import Request, SamplingParams
from headrace.rollout.latency_engine import LatencyEngine, made_up_length, made_up_lengths, made_up_logprob


class Clock:
    """Time that passes only when somebody sleeps, and each time a little longer than asked for."""

    def __init__(self) -> None:
        self.now = 100.0
        self.sleeps = 0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.sleeps += 1
        self.now += seconds + 0.0003


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    fake = Clock()
    monkeypatch.setattr(latency_engine, "time", fake)
    return fake


def request(id: int, max_tokens: int = 10_000, stop: tuple[int, ...] = ()) -> Request:
    return Request(id, np.array([1, 2, 3], np.int32), SamplingParams(max_tokens, stop_token_ids=stop), (5, id, 0))


class Collected:
    def __init__(self) -> None:
        self.tokens: dict[object, list[int]] = {}
        self.labels: dict[object, list[int]] = {}
        self.finish: dict[object, tuple[str, float]] = {}

    def run(self, engine: LatencyEngine, clock: Clock, each: Callable[[], None] = lambda: None) -> Collected:
        while engine.capacity().running or engine.capacity().waiting:
            for chunk in engine.step():
                assert chunk.id not in self.finish
                self.tokens.setdefault(chunk.id, []).extend(chunk.tokens)
                self.labels.setdefault(chunk.id, []).extend([chunk.version] * len(chunk.tokens))
                assert chunk.logprobs == tuple(made_up_logprob(token, chunk.version) for token in chunk.tokens)
                if chunk.finish:
                    self.finish[chunk.id] = (chunk.finish, clock.now)
            each()
        return self


def one_tensor() -> Iterator[WeightTensor]:
    yield WeightTensor(TensorSpec("made_up", "uint8", (16,)), np.zeros(16, np.uint8))


def test_lengths_are_lognormal_and_keyed_by_the_unit() -> None:
    config = LatencyConfig(median_tokens=200, sigma=0.7)
    lengths = [made_up_length((0, ticket, sample), config) for ticket in range(500) for sample in range(8)]
    logs = [math.log(length) for length in lengths]
    assert math.exp(statistics.median(logs)) == pytest.approx(200, rel=0.05)
    assert statistics.stdev(logs) == pytest.approx(0.7, rel=0.05)
    assert lengths[123 * 8 + 4] == made_up_length((0, 123, 4), config)
    assert lengths == made_up_lengths(0, range(500), 8, config)


def test_responses_have_their_lengths_and_are_cut_at_max_tokens(clock: Clock) -> None:
    config = LatencyConfig(median_tokens=30)
    engine = LatencyEngine(config, slots=7)
    for id in range(60):
        engine.add(request(id, max_tokens=40, stop=(999,)))
    result = Collected().run(engine, clock)
    for id in range(60):
        drawn = made_up_length((5, id, 0), config)
        assert len(result.tokens[id]) == min(drawn, 40)
        assert result.finish[id][0] == ("stop" if drawn <= 40 else "length")
        assert (result.tokens[id][-1] == 999) == (drawn <= 40)
    assert {finish for finish, _ in result.finish.values()} == {"stop", "length"}


@pytest.mark.parametrize("token_ms", [0.5, 1.0, 20.0])
def test_a_response_takes_its_length_times_the_token_time_whatever_the_sleeps_do(clock: Clock, token_ms: float) -> None:
    engine = LatencyEngine(LatencyConfig(token_ms=token_ms, sigma=0, median_tokens=2000), slots=4)
    for id in range(8):
        engine.add(request(id))
    start = clock.now
    result = Collected().run(engine, clock)
    wake = max(latency_engine.MIN_SLEEP_S, token_ms / 1000) + 0.001
    for id in range(8):
        due = (1 + id // 4) * 2000 * token_ms / 1000
        assert due <= result.finish[id][1] - start + 1e-9 <= due + wake + 1e-9


def test_calls_are_rare_when_tokens_are_fast(clock: Clock) -> None:
    engine = LatencyEngine(LatencyConfig(token_ms=0.1, sigma=0, median_tokens=10_000), slots=300)
    for id in range(300):
        engine.add(request(id))
    start = clock.now
    Collected().run(engine, clock)
    assert clock.sleeps <= (clock.now - start) / latency_engine.MIN_SLEEP_S


def test_the_first_tokens_come_with_the_first_call(clock: Clock) -> None:
    engine = LatencyEngine(LatencyConfig(sigma=0), slots=2)
    engine.add(request(0))
    engine.add(request(1))
    assert {chunk.id for chunk in engine.step()} == {0, 1}


def test_a_version_comes_into_force_after_its_delay_and_labels_follow(clock: Clock) -> None:
    config = LatencyConfig(sigma=0, median_tokens=3000, weight_delay_s=0.5)
    engine = LatencyEngine(config, slots=3, seed=1)
    for id in range(3):
        engine.add(request(id))
    loaded: list[float] = []
    in_force: dict[int, float] = {}

    def each() -> None:
        if len(loaded) < 2 and clock.now > 100.5 + len(loaded):
            loaded.append(clock.now)
            before = clock.now
            engine.load_weights(len(loaded), one_tensor())
            assert clock.now == before
        in_force.setdefault(engine.version, clock.now)

    result = Collected().run(engine, clock, each)
    for version in (1, 2):
        assert loaded[version - 1] < in_force[version] <= loaded[version - 1] + 0.5 + 0.01
    for labels in result.labels.values():
        assert labels == sorted(labels)
        assert set(labels) == {0, 1, 2}
        # Versions and tokens keep the same time: the first token of a version is the one due when it came into force.
        for version in (1, 2):
            assert labels.index(version) * 0.001 == pytest.approx(in_force[version] - 100, abs=0.02)


def test_without_delay_a_version_is_in_force_at_once(clock: Clock) -> None:
    engine = LatencyEngine(LatencyConfig(), slots=1)
    engine.load_weights(4, one_tensor())
    assert engine.version == 4
    engine.load_weights(2, one_tensor())
    assert engine.version == 4


def test_abort_frees_the_slot_for_a_waiting_request(clock: Clock) -> None:
    engine = LatencyEngine(LatencyConfig(sigma=0, median_tokens=50), slots=1)
    for id in range(3):
        engine.add(request(id))
    engine.step()
    engine.abort(0)
    engine.abort(2)
    engine.abort("never there")
    assert (engine.capacity().running, engine.capacity().waiting) == (0, 1)
    engine.add(request(0))
    result = Collected().run(engine, clock)
    assert {id: len(tokens) for id, tokens in result.tokens.items()} == {0: 50, 1: 50}


def test_abort_returns_the_tokens_that_were_not_handed_out_yet(clock: Clock) -> None:
    config = LatencyConfig(sigma=0, median_tokens=50)
    whole = LatencyEngine(config, slots=2)
    whole.add(request(0))
    tokens = Collected().run(whole, clock).tokens[0]
    engine = LatencyEngine(config, slots=1)
    engine.add(request(0))
    engine.add(request(1))
    (first,) = engine.step()
    assert len(first.tokens) < 20
    assert engine.abort(0) is None, "nothing was made since"
    engine.abort(1)
    engine.load_weights(1, one_tensor())
    engine.add(request(0))
    chunks = [chunk for _ in range(6) for chunk in engine.step()]
    engine.load_weights(2, one_tensor())
    rest = engine.abort(0)
    assert rest is not None
    assert (rest.version, rest.finish) == (1, None)
    made = [token for chunk in [*chunks, rest] for token in chunk.tokens]
    assert made == tokens[: len(made)]
    assert 20 < len(made) < 50


def test_nothing_to_do_is_an_empty_step_at_once(clock: Clock) -> None:
    assert LatencyEngine(LatencyConfig(), slots=1).step() == []
    assert clock.sleeps == 0


def test_it_runs_without_importing_torch() -> None:
    program = """
import sys
from headrace.rollout.config import RolloutConfig
from headrace.rollout.engines import make_engine
make_engine(RolloutConfig(engine="latency"), None, "float32", "cpu", 0, False, None).step()
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_a_response_that_was_begun_goes_on_with_the_same_tokens_and_ends_where_it_would_have(clock: Clock) -> None:
    config = LatencyConfig(token_ms=10, median_tokens=20, sigma=0.5)
    whole = Collected()
    first = LatencyEngine(config, slots=4)
    for id in range(4):
        first.add(request(id))
    whole.run(first, clock)
    rest, second = Collected(), LatencyEngine(config, slots=4)
    for id in range(4):
        second.add(replace(request(id), begun=tuple(whole.tokens[id][: 2 * id])))
    began = clock.now
    rest.run(second, clock)
    for id in range(4):
        assert rest.tokens[id] == whole.tokens[id][2 * id :]
        assert rest.finish[id][0] == whole.finish[id][0]
        assert rest.finish[id][1] - began == pytest.approx(len(rest.tokens[id]) * 0.01, abs=0.02)
