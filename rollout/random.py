"""Random numbers by name instead of by order: the number for (seed, ticket, sample, position) is always the same.

So a sample doesn't depend on what else is in the batch, on which rank makes it, or on how often it was interrupted.
The generator is splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014), whose n-th
output is a function of the seed and n alone.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MASK = (1 << 64) - 1


def splitmix64(streams: Words | np.uint64, counters: Words) -> Words:
    """[n] outputs number `counters` (0, 1, …) of the generators seeded with `streams`."""
    state = streams + (counters + np.uint64(1)) * _GOLDEN
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Words = state ^ (state >> np.uint64(31))
    return mixed


def stream_of(key: tuple[int, int, int]) -> np.uint64:
    """The stream of random numbers that belongs to (seed, ticket, sample)."""
    state = np.zeros(1, np.uint64)
    for part in key:
        state = splitmix64(state, np.array([part & _MASK], np.uint64))
    stream: np.uint64 = state[0]
    return stream


def uniforms(streams: Words, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """[n] numbers in [0, 1), multiples of 2**-24, one per stream and position (≥ 0)."""
    bits = splitmix64(streams, positions.astype(np.uint64)) >> np.uint64(40)
    drawn: npt.NDArray[np.float32] = bits.astype(np.float32) * np.float32(2.0**-24)
    return drawn
