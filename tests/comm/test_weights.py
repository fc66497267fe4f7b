"""Packing a share into a run of bytes, and putting versions together again."""

from __future__ import annotations

import math

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from headrace.comm.errors import HeadraceError
from headrace.comm.weights import (
    ALIGNMENT,
    ITEM_BYTES,
    Slab,
    TensorSpec,
    WeightTensor,
    assemble,
    check_tensor,
    layout,
    pack,
    unpack,
)

SPECS = st.lists(
    st.builds(
        TensorSpec,
        name=st.uuids().map(str),
        dtype=st.sampled_from(sorted(ITEM_BYTES)),
        shape=st.lists(st.integers(0, 7), max_size=3).map(tuple),
    ),
    max_size=8,
)


def fill(specs: list[TensorSpec], seed: int) -> list[WeightTensor]:
    rng = np.random.default_rng(seed)
    return [WeightTensor(spec, rng.integers(0, 256, spec.nbytes, np.uint8)) for spec in specs]


@given(SPECS, SPECS)
def test_a_share_unpacks_to_the_same_bytes_in_a_slab_that_held_another(
    before: list[TensorSpec], now: list[TensorSpec]
) -> None:
    slab = Slab()
    pack(fill(before, 0), slab, verify=False)
    tensors = fill(now, 1)
    share = pack(iter(tensors), slab, verify=True)
    assert share.data.size == layout(now)[1]
    assert share.manifest.checksums == [xxhash.xxh3_64(t.data.tobytes()).intdigest() for t in tensors]
    for found, sent in zip(unpack(share.manifest.specs, share.data), tensors, strict=True):
        assert found.spec == sent.spec
        assert found.data.tobytes() == sent.data.tobytes()


@given(SPECS)
def test_tensors_begin_where_they_can_be_viewed_in_place_and_dont_overlap(specs: list[TensorSpec]) -> None:
    offsets, size = layout(specs)
    end = 0
    for spec, offset in zip(specs, offsets, strict=True):
        assert offset % ALIGNMENT == 0
        assert 0 <= offset - end < ALIGNMENT
        end = offset + math.prod(spec.shape) * ITEM_BYTES[spec.dtype]
    assert size == end


def test_a_slab_keeps_its_memory_from_version_to_version() -> None:
    slab = Slab()
    tensors = fill([TensorSpec("a", "float32", (33, 7)), TensorSpec("b", "uint8", (5,))], 0)
    first = pack(tensors, slab, verify=False).data.ctypes.data
    assert pack(tensors, slab, verify=False).data.ctypes.data == first
    assert pack(tensors[:1], slab, verify=False).data.ctypes.data == first


def test_a_tensor_whose_bytes_dont_fit_its_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="11 bytes instead of 12"):
        pack([WeightTensor(TensorSpec("a", "float32", (3,)), np.zeros(11, np.uint8))], Slab(), verify=False)


def test_a_changed_byte_is_found_and_tensor_and_sender_are_named() -> None:
    (tensor,) = fill([TensorSpec("layers.0.up", "bfloat16", (9,))], 3)
    share = pack([tensor], Slab(), verify=True)
    check_tensor(tensor, share.manifest.checksums[0], version=4, sender=2)
    tensor.data[17] ^= 1
    with pytest.raises(HeadraceError, match=r"Version 4.*'layers.0.up' from trainer rank 2"):
        check_tensor(tensor, share.manifest.checksums[0], version=4, sender=2)


def test_a_name_that_comes_from_two_trainers_is_an_error() -> None:
    shares = {0: fill([TensorSpec("a", "uint8", (1,))], 0), 3: fill([TensorSpec("a", "uint8", (1,))], 1)}
    with pytest.raises(HeadraceError, match=r"2 tensors named 'a', from trainer ranks \[0, 3\]"):
        assemble(1, shares)
