"""What has changed of weights: encoded and applied, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from headrace.comm import delta
from headrace.comm.errors import HeadraceError

Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


def encoded(old: Bytes, new: Bytes) -> tuple[Bytes, Bytes]:
    found = delta.encode(old, new)
    assert found is not None
    return found


@given(
    new=hnp.arrays(np.uint8, st.integers(0, 3000).map(lambda n: 2 * n)),
    seed=st.integers(0, 1 << 30),
    share=st.sampled_from([0.0, 0.001, 0.02, 0.2, 0.5, 1.0]),
)
def test_the_old_bytes_become_the_new_ones(new: Bytes, seed: int, share: float) -> None:
    rng = np.random.default_rng(seed)
    old = np.where(rng.random(new.size) < share, rng.integers(0, 256, new.size, np.uint8), new)
    changed = int((old.view(np.uint16) != new.view(np.uint16)).sum())
    found = delta.encode(old, new)
    if found is None:
        assert 3 * changed + new.size // 2 // 255 > new.size
        return
    gaps, values = found
    assert gaps.size + values.size <= new.size
    assert values.size == 2 * changed
    assert changed <= gaps.size <= changed + new.size // 2 // 255
    delta.apply(old, gaps, values)
    np.testing.assert_array_equal(old, new)


@pytest.mark.parametrize("gap", [0, 1, 253, 254, 255, 256, 509, 510, 511, 100_000])
def test_gaps_of_every_length(gap: int) -> None:
    old = np.zeros(2 * gap + 6, np.uint8)
    new = old.copy()
    new.view(np.uint16)[[0, gap + 1]] = 7
    delta.apply(old, *encoded(old, new))
    np.testing.assert_array_equal(old, new)


def test_equal_bytes_need_none() -> None:
    data = np.arange(100, dtype=np.uint8)
    gaps, values = encoded(data, data.copy())
    assert (gaps.size, values.size) == (0, 0)


def test_an_odd_number_of_bytes_has_no_delta() -> None:
    assert delta.encode(np.zeros(3, np.uint8), np.zeros(3, np.uint8)) is None
    with pytest.raises(ValueError, match="3 bytes can't become 4"):
        delta.encode(np.zeros(3, np.uint8), np.zeros(4, np.uint8))


@pytest.mark.parametrize(
    ("gaps", "values", "size"), [([0, 0], 2, 8), ([4], 2, 8), ([0], 3, 8), ([0], 2, 7), ([255, 0], 2, 8)]
)
def test_what_does_not_fit_is_refused_and_changes_nothing(gaps: list[int], values: int, size: int) -> None:
    data = np.zeros(size, np.uint8)
    with pytest.raises(HeadraceError, match="don't fit"):
        delta.apply(data, np.array(gaps, np.uint8), np.ones(values, np.uint8))
    assert not data.any()
