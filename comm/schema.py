"""What samples consist of: named fields, each with a number format and a shape.

    fixed    an array of one shape for all samples             "reward": fixed(np.float32)
    ragged   its first axis differs from sample to sample      "tokens": ragged(np.int32)
    text     a string                                          "finish": text()

An optional field may be missing in some samples. Formats that numpy lacks (`RAW`) travel bit for bit: a bfloat16 array
is given, and comes, as a uint16 array of the same shape.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from headrace.comm.errors import HeadraceError
from headrace.comm.messages import Key

RAW: dict[str, np.dtype[Any]] = {
    "bfloat16": np.dtype(np.uint16),
    "float8_e4m3fn": np.dtype(np.uint8),
    "float8_e4m3fnuz": np.dtype(np.uint8),
    "float8_e5m2": np.dtype(np.uint8),
    "float8_e5m2fnuz": np.dtype(np.uint8),
}
"""Formats by their names in torch and ml_dtypes, and the numpy dtype whose bits carry them."""

_PYTHON_KINDS = {bool: "b", int: "iuf", float: "f"}
"""Kinds of numpy dtypes that take a plain Python number without losing what it means."""


class ExchangeError(HeadraceError):
    """Samples that can't be stored, found or read: an unknown group or field, or data that don't fit the schema."""


class Field(msgspec.Struct, frozen=True, array_like=True):
    """One field of a schema; made by `fixed`, `ragged` and `text`."""

    kind: Literal["fixed", "ragged", "text"]
    dtype: str = ""
    """A key of `RAW`, or numpy's `dtype.str`; empty for a text."""
    shape: tuple[int, ...] = ()
    """Of the whole array (fixed), or of everything after its first axis (ragged)."""
    optional: bool = False

    @property
    def carrier(self) -> np.dtype[Any]:
        """The numpy dtype of the arrays; not of a text."""
        return _carrier(self.dtype)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row (ragged), or of one sample (fixed)."""
        return math.prod(self.shape) * self.carrier.itemsize

    @property
    def scalar(self) -> bool:
        """One number per sample."""
        return self.kind == "fixed" and not self.shape

    def __str__(self) -> str:
        """For instance `int32 [*]`, `bfloat16 [*, 64]`, `float32 []`; * is the axis that differs."""
        if self.kind == "text":
            return "a text"
        name = self.dtype if self.dtype in RAW else self.carrier.name
        axes = [*(["*"] if self.kind == "ragged" else []), *map(str, self.shape)]
        return f"{name} [{', '.join(axes)}]"

    def array(self, value: object) -> npt.NDArray[Any] | None:
        """The value as an array of this field, sharing its memory; None if it doesn't fit."""
        if type(value) in _PYTHON_KINDS:
            return self._number(value)
        try:
            array = np.asarray(value) if hasattr(value, "__array__") else None
        except (TypeError, RuntimeError):  # torch tensors of a format that numpy lacks, on a device, or with gradients
            return None
        if array is None:
            return None
        if self.dtype in RAW and array.dtype.name == self.dtype:  # of ml_dtypes
            array = array.view(self.carrier)
        row = array.shape if self.kind == "fixed" else array.shape[1:]
        fits = array.dtype == self.carrier and row == self.shape and (self.kind == "fixed" or array.ndim > 0)
        return array if fits else None

    def _number(self, value: Any) -> npt.NDArray[Any] | None:
        dtype = self.carrier
        if not self.scalar or self.dtype in RAW or dtype.kind not in _PYTHON_KINDS[type(value)]:
            return None
        if dtype.kind in "iu" and not np.iinfo(dtype).min <= value <= np.iinfo(dtype).max:
            return None
        return np.array(value, dtype)


def fixed(dtype: object, shape: Sequence[int] = (), optional: bool = False) -> Field:
    """A field of one shape for all samples; `()` is one number.

    Args:
        dtype: anything that numpy takes for a dtype, a torch dtype, or a name of `RAW`.
        shape: of the array of each sample.
        optional: samples may lack it.

    Raises:
        ExchangeError: the dtype can't be sent as bytes, or the shape is no shape.
    """
    return Field("fixed", _dtype_name(dtype), _shape(shape), optional)


def ragged(dtype: object, shape: Sequence[int] = (), optional: bool = False) -> Field:
    """A field whose first axis differs from sample to sample; `shape` is that of the other axes. See `fixed`."""
    return Field("ragged", _dtype_name(dtype), _shape(shape), optional)


def text(optional: bool = False) -> Field:
    """A string in each sample."""
    return Field("text", optional=optional)


class Schema:
    """The fields of all samples of an exchange, the same on every rank.

    Args:
        fields: by name.
        key: where groups are named by several integers, what these are, for instance `("ticket", "attempt")`: keys are
            then tuples of so many.

    Raises:
        ExchangeError: there is no field.
    """

    def __init__(self, fields: Mapping[str, Field], key: Sequence[str] = ()) -> None:
        if not fields:
            raise ExchangeError("A schema needs at least one field.")
        for name, field in fields.items():
            if not isinstance(name, str) or not isinstance(field, Field):
                raise ExchangeError(
                    f"{name!r}: {field!r} is no field of a schema: give a name, and `fixed`, `ragged` or `text`."
                )
        self.fields = dict(fields)
        self.key = tuple(key)

    @cached_property
    def fingerprint(self) -> str:
        """The same for equal schemas only; the order of the fields doesn't matter."""
        return xxhash.xxh3_64_hexdigest(self.encode())

    def encode(self) -> bytes:
        """For another rank, which wants to compare."""
        return msgspec.msgpack.encode((sorted(self.fields.items()), self.key))

    def difference(self, encoded: bytes) -> str:
        """In words, how the schema that another rank has encoded differs from this one."""
        try:
            fields, key = msgspec.msgpack.decode(encoded, type=tuple[list[tuple[str, Field]], list[str]])
        except msgspec.DecodeError as error:
            return f"it can't even be read ({error})"
        theirs = dict(fields)
        names = [name for name in {**self.fields, **theirs} if self.fields.get(name) != theirs.get(name)]
        parts = [f"{name} is {_told(theirs.get(name))} there and {_told(self.fields.get(name))} here" for name in names]
        if tuple(key) != self.key:
            parts.append(f"keys are ({', '.join(key)}) there and ({', '.join(self.key)}) here")
        return "; ".join(parts)

    def check_fields(self, names: Iterable[str] | None) -> list[str]:
        """The names; all of the schema for None.

        Raises:
            ExchangeError: there is no such field.
        """
        if names is None:
            return [*self.fields]
        wanted = [*dict.fromkeys(names)]
        unknown = [name for name in wanted if name not in self.fields]
        if unknown:
            raise ExchangeError(f"Samples have no field {', '.join(unknown)}; the fields are {', '.join(self.fields)}.")
        return wanted

    def check_key(self, key: Key) -> None:
        """Make sure that a key can name a group.

        Raises:
            ExchangeError: it is of another form.
        """
        if isinstance(key, str):
            check_text(key, "The key of a group")
        parts = key if isinstance(key, tuple) else (key,)
        whole = all(type(part) is int and -(2**63) <= part < 2**63 for part in parts)
        if self.key:
            if not isinstance(key, tuple) or len(key) != len(self.key) or not whole:
                raise ExchangeError(f"{key!r} can't be the key of a group: keys are ({', '.join(self.key)}), integers.")
        elif not whole and not isinstance(key, str):
            raise ExchangeError(
                f"{key!r} can't be the key of a group: a key is an integer of 64 bits, a string or a tuple of integers."
            )

    def name(self, key: Key) -> str:
        """A key in words."""
        if self.key and isinstance(key, tuple):
            return " ".join(f"{name} {part}" for name, part in zip(self.key, key, strict=True))
        return f"group {key!r}"

    def names(self, keys: Iterable[Key], most: int = 8) -> str:
        """Keys in words, the first few of them."""
        each = [*keys]
        more = f" and {len(each) - most} more" if len(each) > most else ""
        return ", ".join(map(self.name, each[:most])) + more


def plain_key(key: Any) -> Any:
    """numpy's integers as Python's; anything else as it is."""
    if isinstance(key, tuple):
        return tuple(plain_key(part) for part in key)
    return int(key) if isinstance(key, np.integer) else key


def check_text(value: str, what: str) -> None:
    """
    Raises:
        ExchangeError: it can't be sent, as strings with half a surrogate pair can't.
    """
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ExchangeError(f"{what} is no text: {error}.") from None


@lru_cache
def _carrier(dtype: str) -> np.dtype[Any]:
    return RAW[dtype] if dtype in RAW else np.dtype(dtype)


def _dtype_name(dtype: Any) -> str:
    told = str(dtype)
    name = told.removeprefix("torch.") if told.startswith("torch.") else getattr(dtype, "__name__", told)
    if name in RAW:
        return name
    try:
        found = np.dtype(told.removeprefix("torch.") if told.startswith("torch.") else dtype)
    except TypeError as error:
        known = ", ".join(RAW)
        raise ExchangeError(
            f"{dtype!r} is no dtype of a field: numpy doesn't know it, and it isn't {known}."
        ) from error
    if found.hasobject or found.names or not found.itemsize:
        raise ExchangeError(
            f"A field can't be of dtype {found}: its values must be plain numbers or strings of one size. "
            "Use one field for each part of a record, and `text()` for strings."
        )
    return str(found.str)


def _shape(shape: Sequence[int]) -> tuple[int, ...]:
    axes = tuple(int(axis) for axis in shape)
    if any(axis < 0 for axis in axes):
        raise ExchangeError(f"{list(axes)} is no shape of a field: use `ragged` for a first axis that differs.")
    return axes


def _told(field: Field | None) -> str:
    if field is None:
        return "missing"
    return f"{field}{', optional' if field.optional else ''}"
