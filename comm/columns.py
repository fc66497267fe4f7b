"""Groups of trajectories as contiguous columns, in memory and on the wire.

    group (ticket, attempt)
      samples   [n]  unit, reward, finish, texts           ─▶ msgpack header
      columns        tokens, loss_mask, logprobs, versions ─▶ one buffer each, the samples one after the other
      lengths   [n]  rows of each sample, per column       ─▶ msgpack header

A column is ragged: one concatenated array and the length of every sample's share. So a group leaves the owner's
memory without a copy, and a consumer's trajectories are views of the buffers that arrived.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.comm.errors import HeadraceError
from headrace.comm.trajectory import Trajectory, Unit
from headrace.comm.transport import Buffer

GroupKey = tuple[int, int]
"""(ticket, attempt)."""

COLUMN_DTYPES: dict[str, np.dtype[Any]] = {
    "tokens": np.dtype(np.int32),
    "loss_mask": np.dtype(np.uint8),
    "logprobs": np.dtype(np.float32),
    "versions": np.dtype(np.int32),
}
"""The columns of a trajectory: one row per token."""

TEXTS = ("prompt_text", "response_text")

FIELDS = (*COLUMN_DTYPES, *TEXTS)
"""What can be asked for by name; unit, reward and finish always come along."""


class ExchangeError(HeadraceError):
    """Samples that can't be stored, found or read: an unknown group or field, or data that don't fit the schema."""


class SampleRow(msgspec.Struct, frozen=True, array_like=True):
    """What a sample has once rather than per token."""

    sample: int
    reward: float
    finish: str
    prompt_text: str
    response_text: str


@dataclass(frozen=True, slots=True)
class Column:
    """One field of all samples of a group."""

    data: npt.NDArray[Any]
    """[sum of lengths], contiguous."""
    lengths: list[int]
    """Rows of each sample."""

    def rows(self) -> Iterator[npt.NDArray[Any]]:
        """The share of each sample, as views."""
        return (self.data[start:end] for start, end in pairwise(accumulate(self.lengths, initial=0)))


@dataclass(frozen=True, slots=True)
class Group:
    """Samples of one ticket on one attempt."""

    key: GroupKey
    samples: list[SampleRow]
    columns: dict[str, Column]

    @property
    def nbytes(self) -> int:
        """Bytes of the columns."""
        return sum(column.data.nbytes for column in self.columns.values())


class _ColumnHeader(msgspec.Struct, frozen=True, array_like=True):
    name: str
    dtype: str
    lengths: list[Annotated[int, msgspec.Meta(ge=0)]]


class _GroupHeader(msgspec.Struct, frozen=True, array_like=True):
    ticket: int
    attempt: int
    samples: list[SampleRow]
    columns: list[_ColumnHeader]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[_GroupHeader])


def make_group(ticket: int, attempt: int, trajectories: Sequence[Trajectory]) -> Group:
    """Copy trajectories into read-only columns.

    Raises:
        ExchangeError: a trajectory is of another group, a column of another dtype, or their lengths differ.
    """
    for trajectory in trajectories:
        _check_trajectory((ticket, attempt), trajectory)
    columns = {name: _concatenate(name, trajectories) for name in COLUMN_DTYPES}
    samples = [
        SampleRow(item.unit.sample, float(item.reward), item.finish, item.prompt_text, item.response_text)
        for item in trajectories
    ]
    return Group((ticket, attempt), samples, columns)


def trajectories_of(group: Group) -> list[Trajectory]:
    """The samples of a group as views of its columns; columns that it lacks are arrays of length 0."""
    absent = [np.empty(0, np.uint8)] * len(group.samples)
    rows = {
        name: list(group.columns[name].rows()) if name in group.columns else [row.view(dtype) for row in absent]
        for name, dtype in COLUMN_DTYPES.items()
    }
    ticket, attempt = group.key
    return [
        Trajectory(
            Unit(ticket, sample.sample, attempt),
            **{name: rows[name][index] for name in COLUMN_DTYPES},
            reward=sample.reward,
            finish=sample.finish,
            prompt_text=sample.prompt_text,
            response_text=sample.response_text,
        )
        for index, sample in enumerate(group.samples)
    ]


def select(group: Group, fields: Sequence[str] | None) -> Group:
    """The group with only the named fields (None: all), sharing its arrays; texts that weren't named are empty.

    Raises:
        ExchangeError: there is no such field.
    """
    if fields is None:
        return group
    unknown = sorted(set(fields) - set(FIELDS))
    if unknown:
        raise ExchangeError(f"Samples have no field {', '.join(unknown)}; the fields are {', '.join(FIELDS)}.")
    blank = {name: "" for name in TEXTS if name not in fields}
    samples = [msgspec.structs.replace(sample, **blank) for sample in group.samples] if blank else group.samples
    return Group(group.key, samples, {name: column for name, column in group.columns.items() if name in fields})


def pack_groups(groups: Iterable[Group]) -> tuple[bytes, list[Buffer]]:
    """A header and, for every group and column in its order, one buffer of bytes that shares the column's memory."""
    headers, buffers = [], []
    for group in groups:
        columns = [_ColumnHeader(name, item.data.dtype.str, item.lengths) for name, item in group.columns.items()]
        headers.append(_GroupHeader(*group.key, group.samples, columns))
        buffers += [item.data.view(np.uint8) for item in group.columns.values()]
    return _encoder.encode(headers), buffers


def unpack_groups(header: bytes, buffers: Sequence[Buffer]) -> dict[GroupKey, list[Trajectory]]:
    """The trajectories of what `pack_groups` made; their columns are views of the buffers.

    Columns that weren't packed are arrays of length 0.

    Raises:
        ExchangeError: header and buffers don't fit the schema or each other.
    """
    try:
        headers = _decoder.decode(header)
    except msgspec.DecodeError as error:
        raise ExchangeError(
            f"The header of {len(header)} bytes before pulled samples can't be read ({error})."
        ) from error
    named = sum(len(item.columns) for item in headers)
    if named != len(buffers):
        raise ExchangeError(
            f"A header of pulled samples names {named} columns, but {len(buffers)} buffers came with it."
        )
    remaining = iter(buffers)
    groups = [_read_group(item, remaining) for item in headers]
    found = {group.key: trajectories_of(group) for group in groups}
    if len(found) != len(groups):
        raise ExchangeError("A header of pulled samples names a group twice.")
    return found


def _check_trajectory(key: GroupKey, trajectory: Trajectory) -> None:
    unit = trajectory.unit
    if (unit.ticket, unit.attempt) != key:
        raise ExchangeError(f"{unit} can't be stored in the group of ticket {key[0]}, attempt {key[1]}.")
    for name, dtype in COLUMN_DTYPES.items():
        column = getattr(trajectory, name)
        if column.dtype != dtype or column.ndim != 1:
            raise ExchangeError(
                f"Column {name} of {unit} is {column.dtype} {list(column.shape)}; the schema says {dtype} [T]."
            )
        if len(column) != len(trajectory.tokens):
            raise ExchangeError(f"Column {name} of {unit} has {len(column)} rows for {len(trajectory.tokens)} tokens.")


def _concatenate(name: str, trajectories: Sequence[Trajectory]) -> Column:
    parts = [getattr(item, name) for item in trajectories]
    data = np.concatenate([np.empty(0, COLUMN_DTYPES[name]), *parts])
    data.flags.writeable = False
    return Column(data, [len(part) for part in parts])


def _read_group(header: _GroupHeader, buffers: Iterator[Buffer]) -> Group:
    where = f"ticket {header.ticket}, attempt {header.attempt}"
    columns = {item.name: _read_column(item, next(buffers), len(header.samples), where) for item in header.columns}
    if len(columns) != len(header.columns):
        raise ExchangeError(f"A column of {where} came twice.")
    if len({tuple(column.lengths) for column in columns.values()}) > 1:
        raise ExchangeError(f"The columns of {where} disagree about the lengths of the samples.")
    return Group((header.ticket, header.attempt), header.samples, columns)


def _read_column(header: _ColumnHeader, buffer: Buffer, samples: int, where: str) -> Column:
    dtype = COLUMN_DTYPES.get(header.name)
    if dtype is None or header.dtype != dtype.str:
        raise ExchangeError(f"Column {header.name} ({header.dtype}) of {where} isn't in the schema of a sample.")
    if len(header.lengths) != samples:
        raise ExchangeError(f"Column {header.name} of {where} has {len(header.lengths)} lengths for {samples} samples.")
    expected = sum(header.lengths) * dtype.itemsize
    if buffer.nbytes != expected:
        raise ExchangeError(f"Column {header.name} of {where} came with {buffer.nbytes} bytes instead of {expected}.")
    return Column(buffer.view(dtype), header.lengths)
