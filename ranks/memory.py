"""How much a generator may take on, so that its finished groups fit in memory. No I/O, no clock, no threads.

It asks for no more groups than there is room for beside those that it keeps. But a step needs finished groups, and only
trained ones make room: so whatever the memory, a generator may have as many groups, finished in memory and at work, as
an optimizer step has. Then there is always a step that can be formed, even if it is the only generator: all that were
granted are finished some day, whatever memory they take, and these are enough. (With fewer, it might keep groups that
wait for others that nobody may begin.)
"""

from __future__ import annotations

import math

SMOOTHING = 1 / 16
"""Weight of the newest group in the mean size of a group."""


class MemoryBound:
    """`memory_bytes`: for finished groups. `step_groups`: of an optimizer step."""

    def __init__(self, memory_bytes: float, step_groups: int) -> None:
        self._bytes, self._step_groups = memory_bytes, step_groups
        self._mean = 0.0
        """Bytes of a group; 0: none was made yet."""

    def finished(self, nbytes: int) -> None:
        """A group of this size has been made."""
        self._mean += (nbytes - self._mean) * (SMOOTHING if self._mean else 1.0)

    def at_work(self, kept: int, kept_bytes: int) -> float:
        """Most groups that may be asked for, held and running while so many finished ones are in memory. As long as
        nobody knows how large a group is, any number."""
        mean = self._mean or (kept_bytes / kept if kept else 0.0)
        if not mean:
            return math.inf
        return max((self._bytes - kept_bytes) // mean, self._step_groups - kept)
