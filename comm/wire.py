"""The wire format: one frame per message, tagged msgpack checked against the types when decoded; nothing is unpickled.

    frame := PROTOCOL (1 byte) · msgpack [sizes of the buffers that follow, message]

The buffers themselves travel behind the frame as raw bytes; how is the transport's affair.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Union

import msgspec
import numpy as np

from headrace.comm import messages
from headrace.comm.errors import HeadraceError
from headrace.comm.messages import Message
from headrace.comm.transport import Buffer

PROTOCOL = 3
"""Raised whenever a message changes its fields; ranks of different protocols refuse each other."""


class WireError(HeadraceError):
    """A frame that this rank can't read: truncated, of another protocol, or of an unknown message."""


def _subclasses(base: type[Message]) -> Iterator[type[Message]]:
    for kind in base.__subclasses__():
        yield kind
        yield from _subclasses(kind)


MESSAGE_TYPES = tuple(kind for kind in _subclasses(Message) if kind.__module__ == messages.__name__)
"""Every message of `comm.messages`."""

_Sizes = list[Annotated[int, msgspec.Meta(ge=0)]]
_AnyMessage: Any = Union[MESSAGE_TYPES]  # noqa: UP007 (a union made of a tuple)
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[tuple[list[int], Message]] = msgspec.msgpack.Decoder(tuple[_Sizes, _AnyMessage])


def encode(message: Message, sizes: Sequence[int] = ()) -> bytes:
    """The frame of a message that `len(sizes)` buffers of so many bytes follow."""
    frame = bytearray((PROTOCOL,))
    _encoder.encode_into((sizes, message), frame, 1)
    return bytes(frame)


def decode(frame: bytes | bytearray | memoryview, source: int) -> tuple[Message, list[int]]:
    """The message of a frame and the sizes, in bytes, of the buffers that follow it.

    Raises:
        WireError: the frame can't be read; the text names `source`, the rank it came from.
    """
    view = memoryview(frame)
    if not len(view) or view[0] != PROTOCOL:
        found = f"protocol {view[0]}" if len(view) else "an empty frame"
        raise WireError(
            f"Rank {source} sent {found}, this rank speaks protocol {PROTOCOL}: "
            "all ranks must run the same version of headrace; check the Python environment of every role."
        )
    try:
        sizes, message = _decoder.decode(view[1:])
    except msgspec.DecodeError as error:
        raise WireError(
            f"A message of {len(view)} bytes from rank {source} can't be read ({error}): either the network "
            "damaged it, or that rank runs another version of headrace; check the Python environment of every role."
        ) from error
    return message, sizes


def check(message: Message) -> None:
    """Make sure that other ranks can read a message, before it leaves; for those that hold what a user's program gave.

    Raises:
        TypeError, ValueError: they can't; the text says what is wrong.
    """
    try:
        _decoder.decode(_encoder.encode(((), message)))
    except (msgspec.MsgspecError, OverflowError) as error:
        raise ValueError(str(error)) from error


def checked_places(places: Sequence[Buffer], sizes: list[int], source: int) -> list[Buffer]:
    """The memory for the buffers of a message.

    Raises:
        WireError: it doesn't fit what the message brings; the text names `source`, the rank it came from.
    """
    if sizes_of(places) != sizes:
        raise WireError(
            f"Rank {source} sent buffers of {sizes} bytes where there is room for {sizes_of(places)}: one of the two "
            "ranks runs another version of headrace; check the Python environment of every role."
        )
    return list(places)


def sizes_of(buffers: Sequence[Buffer]) -> list[int]:
    """The sizes for `encode`, in bytes.

    Raises:
        TypeError: a buffer isn't one-dimensional, contiguous uint8; MPI would send it in memory order without a word.
    """
    for buffer in buffers:
        if buffer.dtype != np.uint8 or buffer.ndim != 1 or not buffer.flags.c_contiguous:
            raise TypeError(f"a buffer must be contiguous uint8 [n], not {buffer.dtype} {list(buffer.shape)}")
    return [buffer.nbytes for buffer in buffers]
