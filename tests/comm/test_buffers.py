"""The pool of receive buffers: memory is used again, never while somebody still sees it, and little lies idle."""

from __future__ import annotations

import gc

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.comm.buffers import SMALLEST, BufferPool


def address(buffer: np.ndarray) -> int:
    return int(buffer.__array_interface__["data"][0])


def test_memory_is_used_again_once_every_view_is_gone() -> None:
    pool = BufferPool()
    buffer = pool.take(SMALLEST)
    first = address(buffer)
    view = buffer[100:200].view(np.int32)[3:]
    del buffer
    gc.collect()
    other = pool.take(SMALLEST)
    assert address(other) != first, "a view of a view still looks at it"
    del view
    assert address(pool.take(SMALLEST)) == first


def test_a_tensor_keeps_the_memory() -> None:
    pool = BufferPool()
    buffer = pool.take(SMALLEST)
    first, tensor = address(buffer), torch.from_numpy(buffer)
    del buffer
    assert address(pool.take(SMALLEST)) != first
    del tensor
    assert address(pool.take(SMALLEST)) == first


@given(st.lists(st.tuples(st.integers(0, 5 * SMALLEST), st.booleans()), max_size=60))
def test_buffers_in_use_never_overlap_and_no_more_is_kept_than_was_needed(events: list[tuple[int, bool]]) -> None:
    pool = BufferPool()
    held: list[tuple[int, np.ndarray]] = []
    for number, (size, drop) in enumerate(events):
        buffer = pool.take(size)
        assert buffer.nbytes == size
        assert buffer.flags.writeable
        buffer[:] = number % 256
        held.append((number, buffer))
        if drop:
            held.pop(number % len(held))
        assert all((kept == n % 256).all() for n, kept in held)
        assert pool.used_bytes + pool.idle_bytes <= pool.peak_bytes
        assert pool.used_bytes >= sum(kept.nbytes for _, kept in held if kept.nbytes >= SMALLEST)


def test_sizes_that_are_asked_for_no_more_make_room() -> None:
    pool = BufferPool()
    old = [pool.take(SMALLEST) for _ in range(4)]
    del old
    new = pool.take(3 * SMALLEST)
    assert (pool.used_bytes, pool.idle_bytes) == (3 * SMALLEST, SMALLEST)
    first = address(new)
    del new
    new = pool.take(3 * SMALLEST)
    assert address(new) == first
    assert pool.peak_bytes == 4 * SMALLEST
