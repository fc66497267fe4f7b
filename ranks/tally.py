"""What a generator has done since its start, for the metrics."""

from __future__ import annotations

import time

from headrace.comm.messages import GeneratorCounters
from headrace.comm.spilling import MemoryUse


class Tally:
    """Running totals."""

    def __init__(self) -> None:
        self._started_at = self._turned_at = time.monotonic()
        self._busy_s = 0.0
        self._tokens = 0
        self._finished = 0
        self._reward_sum = 0.0

    def turn(self, busy: bool) -> None:
        """A turn of the main loop begins. `busy`: in the last one there were samples to generate."""
        now = time.monotonic()
        if busy:
            self._busy_s += now - self._turned_at
        self._turned_at = now

    def sampled(self, tokens: int) -> None:
        self._tokens += tokens

    def scored(self, reward: float) -> None:
        """A sample has got its reward."""
        self._finished += 1
        self._reward_sum += reward

    def counters(self, version: int, memory: MemoryUse) -> GeneratorCounters:
        """The totals, with the version held now and the memory taken by finished groups."""
        wall_s = time.monotonic() - self._started_at
        return GeneratorCounters(
            self._tokens,
            self._finished,
            self._reward_sum,
            self._busy_s,
            wall_s,
            version,
            memory.bytes,
            memory.spilled,
        )
