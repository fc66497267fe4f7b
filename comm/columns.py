"""Groups of samples as contiguous columns, in memory and on the wire.

    group (key)
      samples   n
      columns   name → one array, the samples one after the other,    ─▶ one buffer each; small ones, and those of one
                       and the rows of each sample                       number per sample, in the header
      texts     name → n strings                                      ─▶ msgpack header

A group leaves the owner's memory without a copy, and a consumer's arrays are views of the buffers that arrived. Which
fields there are is said by a `Schema`; a group may hold some of them only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Annotated, Any, Generic, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.comm.messages import Key
from headrace.comm.schema import ExchangeError, Field, Schema, check_text
from headrace.comm.transport import Buffer

K = TypeVar("K", bound=Key)

Sample = Mapping[str, Any]
"""Name of a field → array, number (fixed, of shape ()) or string. An optional field may be None or left out."""

MISSING = -1
"""In place of the number of rows, where a sample lacks an optional field."""

_MOST_ROWS = 1 << 40
"""Of one sample; more is a damaged header."""


@dataclass(frozen=True, slots=True)
class Column:
    """One field of all samples of a group."""

    data: npt.NDArray[Any]
    """[rows of all samples, *shape of the field], contiguous."""
    lengths: list[int]
    """Rows of each sample (1 in a fixed field), or `MISSING`."""
    ragged: bool = True

    def rows(self) -> Iterator[Any]:
        """The share of each sample, as views; of a fixed field of shape () a number. None where it is missing."""
        start = 0
        for length in self.lengths:
            if length == MISSING:
                yield None
            elif self.ragged:
                yield self.data[start : start + length]
            else:
                yield self.data[start]
            start += max(length, 0)

    def pick(self, places: Sequence[int]) -> Column:
        """The same of some samples: a view if they stand one after the other, otherwise copied."""
        starts = [0, *accumulate(max(length, 0) for length in self.lengths)]
        lengths = [self.lengths[place] for place in places]
        if all(after == before + 1 for before, after in pairwise(places)):
            begin, end = (starts[places[0]], starts[places[-1] + 1]) if places else (0, 0)
            return Column(self.data[begin:end], lengths, self.ragged)
        parts = [self.data[starts[place] : starts[place + 1]] for place in places]
        return Column(_joined(parts, self.data.dtype, self.data.shape[1:], fresh), lengths, self.ragged)

    @property
    def bytes(self) -> Buffer:
        """The data as bytes [nbytes], sharing their memory."""
        return self.data.reshape(-1).view(np.uint8)


@dataclass(frozen=True, slots=True)
class Group(Generic[K]):
    """Samples under one key. `group["tokens"]` are the tokens of each of them; iterating gives them as dicts."""

    key: K
    samples: int
    columns: dict[str, Column]
    texts: dict[str, list[str | None]]

    @property
    def nbytes(self) -> int:
        """Bytes of the columns."""
        return sum(column.data.nbytes for column in self.columns.values())

    @property
    def fields(self) -> set[str]:
        """Those that it holds."""
        return self.columns.keys() | self.texts.keys()

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, name: str) -> list[Any]:
        """A field of every sample: views, numbers or strings, or None where it is missing."""
        return list(self.columns[name].rows()) if name in self.columns else list(self.texts[name])

    def __iter__(self) -> Iterator[dict[str, Any]]:
        each = {name: self[name] for name in (*self.columns, *self.texts)}
        return ({name: values[place] for name, values in each.items()} for place in range(self.samples))


class _ColumnHeader(msgspec.Struct, frozen=True, array_like=True):
    name: str
    dtype: str
    lengths: list[Annotated[int, msgspec.Meta(ge=MISSING, le=_MOST_ROWS)]]
    data: bytes | None
    """None: a buffer follows."""


class _GroupHeader(msgspec.Struct, frozen=True, array_like=True):
    key: Key
    samples: Annotated[int, msgspec.Meta(ge=0)]
    columns: list[_ColumnHeader]
    texts: list[tuple[str, list[str | None]]]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[_GroupHeader])


Take = Callable[[int], Buffer]
"""Gives memory of so many bytes, with any contents."""


def fresh(nbytes: int) -> Buffer:
    """Memory that was never used."""
    return np.empty(nbytes, np.uint8)


def gather(schema: Schema, key: K, samples: Sequence[Sample], take: Take = fresh) -> Group[K]:
    """Copy samples into read-only columns, in memory that `take` gives.

    Raises:
        ExchangeError: the key, or a value, doesn't fit the schema; the text names sample and field.
    """
    schema.check_key(key)
    _check_names(schema, key, samples)
    columns: dict[str, Column] = {}
    texts: dict[str, list[str | None]] = {}
    for name, field in schema.fields.items():
        values = [sample.get(name) for sample in samples]
        where = _Place(schema, key, name, field)
        if field.kind == "text":
            texts[name] = [where.string(index, value) for index, value in enumerate(values)]
        else:
            columns[name] = _column(field, [where.array(index, value) for index, value in enumerate(values)], take)
    return Group(key, len(samples), columns, texts)


def select(schema: Schema, group: Group[K], fields: Iterable[str] | None, rows: Sequence[int] | None) -> Group[K]:
    """The group with only these fields and samples (None: all), sharing its arrays where `Column.pick` can.

    Raises:
        ExchangeError: there is no such field or sample.
    """
    wanted = schema.check_fields(fields)
    columns = {name: group.columns[name] for name in wanted if name in group.columns}
    texts = {name: group.texts[name] for name in wanted if name in group.texts}
    if rows is None:
        return Group(group.key, group.samples, columns, texts)
    outside = [row for row in rows if not 0 <= row < group.samples]
    if outside:
        raise ExchangeError(f"{schema.name(group.key)} has {group.samples} samples; there is no sample {outside[0]}.")
    picked = {name: column.pick(rows) for name, column in columns.items()}
    return Group(group.key, len(rows), picked, {name: [each[row] for row in rows] for name, each in texts.items()})


def pack_groups(schema: Schema, groups: Iterable[Group[Any]], eager_bytes: int = 0) -> tuple[bytes, list[Buffer]]:
    """A header and, for every group and column in its order, a buffer of bytes that shares the column's memory.

    Columns of one number per sample have no buffer, nor have those of fewer than `eager_bytes`: they are copied into
    the header.
    """
    headers, buffers = [], []
    for group in groups:
        columns = []
        for name, column in group.columns.items():
            field = schema.fields[name]
            eager = field.scalar or column.data.nbytes < eager_bytes
            data = column.data.tobytes() if eager else None
            columns.append(_ColumnHeader(name, field.dtype, column.lengths, data))
            if not eager:
                buffers.append(column.bytes)
        headers.append(_GroupHeader(group.key, group.samples, columns, [*group.texts.items()]))
    return _encoder.encode(headers), buffers


def unpack_groups(schema: Schema, header: bytes, buffers: Sequence[Buffer]) -> dict[Key, Group[Key]]:
    """The groups of what `pack_groups` made; their columns are views of the buffers.

    Raises:
        ExchangeError: header and buffers don't fit the schema or each other.
    """
    try:
        headers = _decoder.decode(header)
    except msgspec.DecodeError as error:
        raise ExchangeError(f"The header of {len(header)} bytes before samples can't be read ({error}).") from error
    named = sum(column.data is None for item in headers for column in item.columns)
    if named != len(buffers):
        raise ExchangeError(f"A header of samples names {named} columns, but {len(buffers)} buffers came with it.")
    remaining = iter(buffers)
    groups = {item.key: _read_group(schema, item, remaining) for item in headers}
    if len(groups) != len(headers):
        raise ExchangeError("A header of samples names a group twice.")
    return groups


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a value stands, for the errors."""

    schema: Schema
    key: Key
    name: str
    field: Field

    def array(self, index: int, value: object) -> npt.NDArray[Any] | None:
        if value is None:
            self._check_optional(index)
            return None
        array = self.field.array(value)
        if array is None:
            raise self._misfit(index, value)
        return array

    def string(self, index: int, value: object) -> str | None:
        if value is None:
            self._check_optional(index)
            return None
        if not isinstance(value, str):
            raise self._misfit(index, value)
        check_text(value, self._told(index))
        return value

    def _check_optional(self, index: int) -> None:
        if not self.field.optional:
            raise ExchangeError(f"{self._told(index)} is missing; the schema says {self.field}, and not optional.")

    def _misfit(self, index: int, value: object) -> ExchangeError:
        found = f"{value.dtype} {list(value.shape)}" if hasattr(value, "dtype") and hasattr(value, "shape") else None
        told = f"{self._told(index)} is {found or f'of type {type(value).__name__}'}; the schema says {self.field}."
        carried = f" Give its bits, as {self.field.carrier} of the same shape." if self.raw else ""
        return ExchangeError(told + carried)

    @property
    def raw(self) -> bool:
        return self.field.kind != "text" and self.field.dtype != self.field.carrier.str

    def _told(self, index: int) -> str:
        return f"Field {self.name} of sample {index} of {self.schema.name(self.key)}"


def _check_names(schema: Schema, key: Key, samples: Sequence[Sample]) -> None:
    for index, sample in enumerate(samples):
        if not isinstance(sample, Mapping):
            raise ExchangeError(
                f"Sample {index} of {schema.name(key)} is of type {type(sample).__name__}; a sample is a dict, by the "
                "names of the fields, and a group is a list of them."
            )
        unknown = sorted(sample.keys() - schema.fields.keys())
        if unknown:
            raise ExchangeError(
                f"Sample {index} of {schema.name(key)} has a field {unknown[0]}, which isn't in the schema; the fields "
                f"are {', '.join(schema.fields)}."
            )


def _column(field: Field, parts: Sequence[npt.NDArray[Any] | None], take: Take) -> Column:
    ragged = field.kind == "ragged"
    lengths = [MISSING if part is None else len(part) if ragged else 1 for part in parts]
    present = [part if ragged else part[None] for part in parts if part is not None]
    return Column(_joined(present, field.carrier, field.shape, take), lengths, ragged)


def _joined(
    parts: Sequence[npt.NDArray[Any]], dtype: np.dtype[Any], shape: tuple[int, ...], take: Take
) -> npt.NDArray[Any]:
    """One read-only array [rows of all parts, *shape] of them."""
    rows = sum(map(len, parts))
    data = take(rows * math.prod(shape) * dtype.itemsize).view(dtype).reshape(rows, *shape)
    if parts:
        np.concatenate(parts, out=data)  # without `out`, it would turn the bytes into the machine's order
    data.flags.writeable = False
    return data


def _read_group(schema: Schema, header: _GroupHeader, buffers: Iterator[Buffer]) -> Group[Key]:
    schema.check_key(header.key)
    where = schema.name(header.key)
    columns = {item.name: _read_column(schema, item, buffers, header.samples, where) for item in header.columns}
    texts = dict(header.texts)
    for name, strings in texts.items():
        lengths = [MISSING if string is None else 1 for string in strings]
        _check_lengths(_field(schema, name, "", where), name, lengths, header.samples, where)
    if len(columns) + len(texts) != len(header.columns) + len(header.texts):
        raise ExchangeError(f"A field of {where} came twice.")
    return Group(header.key, header.samples, columns, texts)


def _read_column(schema: Schema, header: _ColumnHeader, buffers: Iterator[Buffer], samples: int, where: str) -> Column:
    data = next(buffers) if header.data is None else np.frombuffer(header.data, np.uint8)
    field = _field(schema, header.name, header.dtype, where)
    if field.kind == "text":
        raise ExchangeError(f"Field {header.name} of {where} came as an array; the schema says {field}.")
    _check_lengths(field, header.name, header.lengths, samples, where)
    rows = sum(length for length in header.lengths if length > 0)
    if data.nbytes != rows * field.row_bytes:
        raise ExchangeError(
            f"Field {header.name} of {where} came with {data.nbytes} bytes instead of {rows * field.row_bytes}."
        )
    return Column(data.view(field.carrier).reshape(rows, *field.shape), header.lengths, field.kind == "ragged")


def _field(schema: Schema, name: str, dtype: str, where: str) -> Field:
    field = schema.fields.get(name)
    if field is None or field.dtype != dtype:
        raise ExchangeError(f"Field {name} ({dtype or 'text'}) of {where} isn't in the schema.")
    return field


def _check_lengths(field: Field, name: str, lengths: Sequence[int], samples: int, where: str) -> None:
    if len(lengths) != samples:
        raise ExchangeError(f"Field {name} of {where} has {len(lengths)} lengths for {samples} samples.")
    if not field.optional and MISSING in lengths:
        raise ExchangeError(f"Field {name} of {where} is missing in a sample; the schema says {field}, not optional.")
    if field.kind == "fixed" and any(length not in (1, MISSING) for length in lengths):
        raise ExchangeError(f"Field {name} of {where} has several rows in a sample; the schema says {field}.")
