"""The wire format: every message comes back as it was, and nothing unreadable gets past."""

from __future__ import annotations

import contextlib
import types
import typing
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.comm import messages, wire
from headrace.comm.errors import HeadraceError
from headrace.comm.messages import Ask, Message

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
PLAIN: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(-(2**63), 2**63 - 1),
    float: st.floats(allow_nan=False),
    str: st.text(max_size=20),
    bytes: st.binary(max_size=20),
    bool: st.booleans(),
    types.NoneType: st.none(),
    Any: JSON,
}


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Random values of a type as messages use them."""
    if hint in PLAIN:
        return PLAIN[hint]
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return st.builds(hint, **{field.name: values(field.type) for field in msgspec.structs.fields(hint)})
    *arguments, last = typing.get_args(hint)
    if last is Ellipsis:
        return st.lists(values(*arguments), max_size=4).map(tuple)
    inner = [values(argument) for argument in (*arguments, last)]
    match typing.get_origin(hint):
        case builtin if builtin in (list, Sequence):
            return st.lists(*inner, max_size=4)
        case builtin if builtin is tuple:
            return st.tuples(*inner)
        case builtin if builtin is dict:
            return st.dictionaries(*inner, max_size=4)
        case _:
            return st.one_of(inner)


ALL = [kind for kind in vars(messages).values() if isinstance(kind, type) and issubclass(kind, Message)]
ANY_MESSAGE = st.one_of([values(kind) for kind in ALL if kind is not Message])
SIZES = st.lists(st.integers(0, 2**40), max_size=5)


def test_the_wire_knows_every_message() -> None:
    assert {*wire.MESSAGE_TYPES, Message} == {*ALL}


@pytest.mark.parametrize("kind", wire.MESSAGE_TYPES, ids=lambda kind: kind.__name__)
@settings(deadline=None)
@given(data=st.data(), sizes=SIZES)
def test_a_message_comes_back_as_it_was(kind: type[Message], data: st.DataObject, sizes: list[int]) -> None:
    message = data.draw(values(kind))
    assert wire.decode(wire.encode(message, sizes), source=0) == (message, sizes)


@settings(deadline=None)
@given(message=ANY_MESSAGE, sizes=SIZES, data=st.data())
def test_a_truncated_frame_is_refused_and_its_source_named(
    message: Message, sizes: list[int], data: st.DataObject
) -> None:
    frame = wire.encode(message, sizes)
    length = data.draw(st.integers(0, len(frame) - 1))
    with pytest.raises(wire.WireError, match="ank 17"):
        wire.decode(frame[:length], source=17)


@settings(deadline=None)
@given(message=ANY_MESSAGE, data=st.data())
def test_a_damaged_frame_gives_a_message_or_a_wire_error_and_nothing_else(
    message: Message, data: st.DataObject
) -> None:
    frame = bytearray(wire.encode(message, [3, 4]))
    frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(wire.WireError):
        decoded, sizes = wire.decode(frame, source=17)
        assert isinstance(decoded, wire.MESSAGE_TYPES)
        assert all(size >= 0 for size in sizes)


def test_an_unknown_message_is_refused() -> None:
    class Stranger(Message, frozen=True):
        room: int

    with pytest.raises(HeadraceError, match=r"from rank 3 can't be read.*Stranger"):
        wire.decode(wire.encode(Stranger(1)), source=3)


def test_another_protocol_is_refused() -> None:
    frame = bytes((wire.PROTOCOL + 1,)) + wire.encode(Ask(1))[1:]
    with pytest.raises(HeadraceError, match=f"Rank 3 sent protocol {wire.PROTOCOL + 1}"):
        wire.decode(frame, source=3)


def test_a_field_of_another_type_is_refused() -> None:
    frame = bytes((wire.PROTOCOL,)) + msgspec.msgpack.encode([[], ["Pull", "one", [], "", None]])
    with pytest.raises(HeadraceError, match="Expected `int`, got `str`"):
        wire.decode(frame, source=3)


def test_a_negative_size_is_refused() -> None:
    with pytest.raises(HeadraceError, match="rank 3"):
        wire.decode(wire.encode(Ask(1), [-1]), source=3)


@pytest.mark.parametrize(
    "buffer", [np.zeros(4, np.int32), np.zeros((2, 2), np.uint8), np.zeros(8, np.uint8)[::2]], ids=str
)
def test_only_flat_contiguous_bytes_are_buffers(buffer: Any) -> None:
    with pytest.raises(TypeError, match="contiguous uint8"):
        wire.sizes_of([np.zeros(1, np.uint8), buffer])
