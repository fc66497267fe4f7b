"""What has changed between two versions of a run of bytes, so that only that needs to travel.

After a small optimizer step most weights in bfloat16 are what they were: their change is lost in rounding. The bytes
are compared as units of 16 bits (one bfloat16 number; half a float32 one, of which the upper half often stays):

    old  A B C D E F          gaps    1, 2       unchanged units before each changed one, a byte each:
    new  A X C D Y F          values  X, Y       255 means that so many pass and no changed one follows

So a changed unit costs three bytes instead of two, and an unchanged one nothing. Finding the changes takes time, too:
where the network is fast and the changes are many, all bytes are sooner there (`Cheaper`).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from headrace.comm.errors import HeadraceError
from headrace.comm.transport import Buffer

UNIT = np.dtype(np.uint16)
_LONG = 255
"""A gap byte after which no changed unit comes."""


def encode(old: Buffer, new: Buffer) -> tuple[Buffer, Buffer] | None:
    """The gaps and the values (as bytes) that make `new` of `old`; None where they would be longer than `new` itself,
    or the bytes are no whole units.

    Args:
        old: [n] bytes.
        new: [n] bytes.

    Returns:
        gaps: [k] bytes.
        values: [2·changed] bytes.

    Raises:
        ValueError: they have different lengths.
    """
    if old.size != new.size:
        raise ValueError(f"{old.size} bytes can't become {new.size}")
    if new.size % UNIT.itemsize:
        return None
    units = new.view(UNIT)
    differ = old.view(UNIT) != units
    if np.count_nonzero(differ) * (1 + UNIT.itemsize) > new.size:
        return None  # before memory is taken for as many positions
    changed = np.flatnonzero(differ)
    gaps, values = _to_bytes(np.diff(changed, prepend=-1) - 1), units[changed].view(np.uint8)
    return (gaps, values) if gaps.size + values.size <= new.size else None


def apply(data: Buffer, gaps: Buffer, values: Buffer) -> None:
    """Make the new bytes of the old ones, in place.

    Raises:
        HeadraceError: gaps and values don't fit each other or the data.
    """
    changed = _positions(gaps)
    units = values.view(UNIT) if values.size % UNIT.itemsize == 0 else None
    count = data.size // UNIT.itemsize
    if (
        units is None
        or units.size != changed.size
        or data.size % UNIT.itemsize
        or (changed.size and changed[-1] >= count)
    ):
        raise HeadraceError(
            f"{gaps.size} bytes of gaps and {values.size} bytes of values don't fit {data.size} bytes of weights: the "
            "two ranks run different versions of headrace, or memory or network of their nodes corrupts data."
        )
    data.view(UNIT)[changed] = units


def _to_bytes(gaps: npt.NDArray[np.int64]) -> Buffer:
    """[changed] gaps → bytes: as many `_LONG` as fit into each, then the rest of it."""
    more, rest = np.divmod(gaps, _LONG)
    ends = np.cumsum(more + 1)
    found = np.full(int(ends[-1]) if ends.size else 0, _LONG, np.uint8)
    found[ends - 1] = rest
    return found


def _positions(gaps: Buffer) -> npt.NDArray[np.int64]:
    """Where the changed units are."""
    ends = np.flatnonzero(gaps != _LONG)
    return np.cumsum(gaps, dtype=np.int64)[ends] + np.arange(ends.size)


class Cheaper:
    """Whether changes or all bytes get a version to a generator sooner, by how long both took lately."""

    RETRY = 16
    """After so many versions the one that was slower is tried again: the learning rate falls, the network is shared."""
    MEMORY = 0.5
    """Weight of the newest measurement."""

    def __init__(self) -> None:
        self._cost_s: dict[bool, float] = {}
        """Changes? → seconds per byte of weights."""
        self._alike = 0
        """Versions since the choice was another one."""
        self._last = True

    def choose(self) -> bool:
        """Whether the next version is to be told by its changes."""
        better = self._cost_s.get(True, 0.0) <= self._cost_s.get(False, float("inf"))
        choice = better if self._alike < self.RETRY else not better
        self._alike = self._alike + 1 if choice == self._last else 0
        self._last = choice
        return choice

    def took(self, changes: bool, nbytes: int, seconds: float) -> None:
        """A generator has got `nbytes` of weights."""
        cost = seconds / max(1, nbytes)
        old = self._cost_s.get(changes, cost)
        self._cost_s[changes] = old + self.MEMORY * (cost - old)
