"""What travels over a weight channel, and the two ends of one.

    trainer rank                                             generator rank
    Publisher.publish(version, its share of the tensors) ─▶  Subscriber.take() → Version, between two engine steps

Every trainer rank sends its own share of the tensors; the shares are disjoint and together make the version. A share
is one run of bytes: its tensors in order, each beginning at a multiple of `ALIGNMENT`. Buckets are slices of that run,
so a large tensor spans several and small ones share one.

Tensors are names, shapes and bytes rather than torch tensors, so that the channel, and ranks that only model an engine,
need no torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from headrace.comm.errors import HeadraceError
from headrace.comm.service import Service

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "uint8": 1, "int32": 4, "int64": 8}

ALIGNMENT = 64
"""In bytes; a multiple of every item size, so that a tensor can be viewed in place in its number format."""


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """Name, number format and shape of one tensor."""

    name: str
    """As in the Hugging Face checkpoint of the model."""
    dtype: str
    """A key of `ITEM_BYTES`."""
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        count = 1
        for extent in self.shape:
            count *= extent
        return count * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class WeightTensor:
    """One tensor of a version."""

    spec: TensorSpec
    data: npt.NDArray[np.uint8]
    """[nbytes], contiguous, row-major; valid only until the call that it was handed to returns, or until the iterator
    that yielded it is advanced."""


@dataclass(frozen=True, slots=True)
class Version:
    """A whole version of the weights, as a generator gets it."""

    version: int
    tensors: list[WeightTensor]
    """Views of the channel's buffers, valid until `release`."""
    release: Callable[[], None]
    """Give the buffers back; call it once the engine has loaded (or refused) the tensors."""
    lasting: bool = False
    """It may be released as late as when the next one is loaded: there are buffers enough."""


class Publisher(Service, Protocol):
    """The trainer's end, a service of its courier. `publish` is called by the main thread of every trainer rank, with
    rising versions."""

    def publish(self, version: int, tensors: Iterable[WeightTensor]) -> None:
        """Send this rank's share of a version; return when the trainer may change the tensors and go on.

        Raises:
            WaitLimitError: generators didn't do their part in time; the message names them.
        """
        ...


class Subscriber(Service, Protocol):
    """The generator's end, a service of its courier; `waiting` and `take` are called by the main thread."""

    @property
    def waiting(self) -> bool:
        """Whether `take` would return a version."""
        ...

    def take(self) -> Version | None:
        """A whole version newer than the last one taken, or None."""
        ...


class Manifest(msgspec.Struct, frozen=True, array_like=True):
    """What is in a share. The offsets follow from the specs by `layout`."""

    specs: list[TensorSpec]
    checksums: list[int]
    """xxh3 (64 bits) of every tensor as sent; empty where loads aren't verified."""


@dataclass(frozen=True, slots=True)
class Share:
    """One sender's tensors of one version, as one run of bytes."""

    manifest: Manifest
    data: npt.NDArray[np.uint8]


class Slab:
    """Memory that is reused from version to version. It is allocated anew only when a share needs more. `SharedSlab`
    (`shared_memory.py`) is one that other processes can see."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)

    def room(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """The first `nbytes` bytes, with their contents. Earlier views stay valid only while there is room."""
        old = self._memory
        if nbytes > old.size:
            # At least twice the old size, so that packing tensors of unknown total size copies each byte about once.
            # Pages that are never touched cost nothing.
            self._memory = self._allocate(max(nbytes, 2 * old.size))
            self._memory[: old.size] = old
        return self._memory[:nbytes]

    def _allocate(self, nbytes: int) -> npt.NDArray[np.uint8]:
        return np.empty(nbytes, np.uint8)


def layout(specs: Sequence[TensorSpec]) -> tuple[list[int], int]:
    """Where each tensor of a share begins, and how long the share is, in bytes."""
    offsets, end = [], 0
    for spec in specs:
        offsets.append(_aligned(end))
        end = offsets[-1] + spec.nbytes
    return offsets, end


def pack(
    tensors: Iterable[WeightTensor],
    slab: Slab,
    verify: bool,
    packed: Callable[[npt.NDArray[np.uint8]], None] = lambda data: None,
) -> Share:
    """Copy tensors into a slab, one at a time as they come, with their checksums if asked for. `packed` gets all that
    is there after every tensor."""
    specs: list[TensorSpec] = []
    checksums: list[int] = []
    end = 0
    for tensor in tensors:
        if tensor.data.size != tensor.spec.nbytes:
            raise ValueError(f"{tensor.spec} comes with {tensor.data.size} bytes instead of {tensor.spec.nbytes}")
        start = _aligned(end)
        end = start + tensor.spec.nbytes
        slab.room(end)[start:] = tensor.data
        specs.append(tensor.spec)
        if verify:
            checksums.append(checksum(tensor.data))
        packed(slab.room(end))
    return Share(Manifest(specs, checksums), slab.room(end))


def unpack(specs: Sequence[TensorSpec], data: npt.NDArray[np.uint8]) -> list[WeightTensor]:
    """The tensors of a share, as views of its bytes."""
    offsets, _ = layout(specs)
    return [
        WeightTensor(spec, data[offset : offset + spec.nbytes]) for spec, offset in zip(specs, offsets, strict=True)
    ]


def joined(parts: Sequence[WeightTensor]) -> npt.NDArray[np.uint8] | None:
    """The bytes of tensors that lie one right behind the other in one buffer; None if they don't."""
    base = parts[0].data.base
    if base is None or any(part.data.base is not base for part in parts):
        return None
    start = parts[0].data.ctypes.data - base.ctypes.data
    end = start
    for part in parts:
        if part.data.ctypes.data != base.ctypes.data + end:
            return None
        end += part.data.nbytes
    return base[start:end]


def assemble(version: int, shares: dict[int, list[WeightTensor]]) -> list[WeightTensor]:
    """All tensors of a version, from the shares by sender.

    Raises:
        HeadraceError: two tensors have the same name; names it and its senders.
    """
    senders: dict[str, list[int]] = defaultdict(list)
    for sender, share in shares.items():
        for tensor in share:
            senders[tensor.spec.name].append(sender)
    for name, ranks in senders.items():
        if len(ranks) > 1:
            raise HeadraceError(
                f"Version {version} of the weights holds {len(ranks)} tensors named {name!r}, from trainer ranks "
                f"{ranks}. The trainers' shares must be disjoint: check how the training engine divides its tensors."
            )
    return [tensor for share in shares.values() for tensor in share]


def checksum(data: npt.NDArray[np.uint8]) -> int:
    """xxh3 of the bytes, 64 bits."""
    return int(xxhash.xxh3_64_intdigest(data.data))


def check_tensor(tensor: WeightTensor, expected: int, version: int, sender: int) -> None:
    """Compare a tensor as received with its checksum as sent.

    Raises:
        HeadraceError: they differ; names tensor and sender.
    """
    found = checksum(tensor.data)
    if found != expected:
        raise HeadraceError(
            f"Version {version} of the weights: tensor {tensor.spec.name!r} from trainer rank {sender} arrived damaged "
            f"(xxh3 {found:016x}, sent as {expected:016x}). The version was not loaded. Memory or network of one of "
            "the two nodes corrupts data: exclude the node and resume."
        )


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT
