"""A model of an inference engine: real protocol, sampled lengths, time that passes, made-up tokens; no torch.

All running requests advance by one token per tick of `token_ms`, as in a real decode step. A call of `step` sleeps
until ticks are due and then does all of them, so that neither late wake-ups nor the work in between slow the clock
down, and a rank costs next to no CPU. Chunks are handed out when a request starts, when the version changes and at the
end.
"""

from __future__ import annotations

import math
import random
import time
from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from statistics import NormalDist
from typing import Literal

import numpy as np

from headrace.comm.weights import WeightTensor
from headrace.rollout.config import LatencyConfig
from headrace.rollout.engine import Capacity, Chunk, Request
from headrace.rollout.random import Words, splitmix64, stream_of

MIN_SLEEP_S = 0.005
"""Shortest time between two calls that do something: many idle ranks share a core."""

VOCABULARY = 256
"""Made-up tokens are below this. One may equal a stop token by chance; what ends a request is its length."""


def made_up_length(key: tuple[int, int, int], config: LatencyConfig) -> int:
    """Response length in tokens (≥ 1) for (seed, ticket, sample), lognormal, before `max_tokens` cuts it."""
    return _lengths(np.array([stream_of(key)]), config)[0]


def made_up_lengths(seed: int, tickets: Sequence[int], group_size: int, config: LatencyConfig) -> list[int]:
    """`made_up_length` of all samples of these tickets, ticket by ticket."""
    streams = np.zeros(len(tickets) * group_size, np.uint64)
    samples = np.tile(np.arange(group_size), len(tickets))
    for part in (np.full(len(streams), seed), np.repeat(np.asarray(tickets), group_size), samples):
        streams = splitmix64(streams, part.astype(np.uint64))
    return _lengths(streams, config)


def _lengths(streams: Words, config: LatencyConfig) -> list[int]:
    bits = (splitmix64(streams, np.zeros(len(streams), np.uint64)) >> np.uint64(11)).tolist()
    normals = (NormalDist().inv_cdf((drawn + 0.5) / 2**53) for drawn in bits)
    return [max(1, round(config.median_tokens * math.exp(config.sigma * normal))) for normal in normals]


def made_up_logprob(token: int, version: int) -> float:
    """The log-prob under which a version "samples" a token: a label can be checked against it."""
    return -0.25 * (1 + (token + version) % 16)


@dataclass(slots=True)
class _Running:
    request: Request
    order: int
    start: int
    """Tick at which it got its slot; so many ticks earlier as it had tokens already."""
    end: int
    """Tick of its last token."""
    finish: Literal["stop", "length"]
    handed_out: int
    """Tokens that were returned in chunks, or that it had already."""


class LatencyEngine:
    """See the module's docstring and the `Engine` protocol."""

    def __init__(self, config: LatencyConfig, slots: int, seed: int = 0) -> None:
        self._config = config
        self._slots = slots
        self._tick_s = config.token_ms / 1000
        self._delays = random.Random(seed)
        self._waiting: deque[Request] = deque()
        self._running: dict[Hashable, _Running] = {}
        self._ends: list[tuple[int, int, Hashable]] = []
        """Heap of (end, order, id); entries of aborted requests stay until they are due."""
        self._started: list[_Running] = []
        self._admitted = 0
        self._tick = 0
        self._tick_time = self._woke = time.monotonic()
        self._in_force = self._label = 0
        self._pending: list[tuple[float, int]] = []

    @property
    def version(self) -> int:
        """The version in force: the newest that was loaded and whose delay is over."""
        now = time.monotonic()
        self._in_force = max([self._in_force, *(version for when, version in self._pending if when <= now)])
        self._pending = [(when, version) for when, version in self._pending if version > self._in_force]
        return self._in_force

    def add(self, request: Request) -> None:
        if not self._running and not self._waiting:
            self._tick_time = time.monotonic()
        self._waiting.append(request)

    def abort(self, id: Hashable) -> Chunk | None:
        run = self._running.pop(id, None)
        if run is None:
            self._waiting = deque(request for request in self._waiting if request.id != id)
            return None
        return self._chunk(run, None) if self._tick > run.start + run.handed_out else None

    def capacity(self) -> Capacity:
        return Capacity(self._slots, len(self._running), len(self._waiting))

    def load_weights(self, version: int, tensors: Iterable[WeightTensor], lasting: bool = False) -> None:
        """Take in the tensors; the version comes into force after a random delay, without keeping `step` waiting."""
        for _ in tensors:
            pass
        self._pending.append((time.monotonic() + self._delays.uniform(0, self._config.weight_delay_s), version))

    def step(self) -> list[Chunk]:
        """Sleep until ticks are due and do them. A request may have two chunks, when the version has changed."""
        if not self._running and not self._waiting:
            return []
        chunks = self._switch(self.version)
        self._advance(self._wait_for_ticks(), chunks)
        return chunks

    def _switch(self, version: int) -> list[Chunk]:
        """Hand out what the old version made, when there is a new one."""
        held = list(self._running.values()) if version != self._label else []
        chunks = [self._chunk(run, None) for run in held if self._tick > run.start + run.handed_out]
        self._label = version
        return chunks

    def _wait_for_ticks(self) -> int:
        """Sleep until a tick is due, and no shorter than `MIN_SLEEP_S` since the last wake-up; how many are due."""
        wake = max(self._tick_time + self._tick_s, self._woke + MIN_SLEEP_S)
        time.sleep(max(0.0, wake - time.monotonic()))
        self._woke = time.monotonic()
        ticks = max(1, int((self._woke - self._tick_time) / self._tick_s))
        self._tick_time += ticks * self._tick_s
        return ticks

    def _advance(self, ticks: int, chunks: list[Chunk]) -> None:
        """Let the ticks pass: requests end at theirs, and waiting ones take their slots at the same tick."""
        last = self._tick + ticks
        self._admit()
        while self._ends and self._ends[0][0] <= last:
            self._tick, order, id = heappop(self._ends)
            run = self._running.get(id)
            if run is not None and run.order == order:
                del self._running[id]
                chunks.append(self._chunk(run, run.finish))
                self._admit()
        self._tick = last
        chunks += [self._chunk(run, None) for run in self._started if run.handed_out == 0 and run.start < last]
        self._started = []

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._slots:
            request = self._waiting.popleft()
            drawn, longest = made_up_length(request.key, self._config), request.params.max_tokens
            start = self._tick - len(request.begun)
            end = start + min(drawn, longest)
            finish: Literal["stop", "length"] = "stop" if drawn <= longest else "length"
            run = _Running(request, self._admitted, start, end, finish, handed_out=len(request.begun))
            self._admitted += 1
            self._running[request.id] = run
            self._started.append(run)
            heappush(self._ends, (end, run.order, request.id))

    def _chunk(self, run: _Running, finish: Literal["stop", "length", None]) -> Chunk:
        """The tokens up to the present tick that weren't handed out yet."""
        made = self._tick - run.start
        positions = np.arange(run.handed_out, made, dtype=np.uint64)
        tokens = (splitmix64(stream_of(run.request.key), positions) % np.uint64(VOCABULARY)).tolist()
        if finish == "stop" and run.request.params.stop_token_ids:
            tokens[-1] = run.request.params.stop_token_ids[0]
        run.handed_out = made
        logprobs = tuple(made_up_logprob(token, self._label) for token in tokens)
        return Chunk(run.request.id, tuple(tokens), logprobs, self._label, finish)
