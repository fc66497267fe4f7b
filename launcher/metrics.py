"""Reading metrics.jsonl: one JSON object per optimizer step, appended while the run goes on."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

Row = dict[str, Any]


class MetricsTail:
    """Follows the metrics of one attempt: the ranks cut the file back to their checkpoint, then append to it.

    What is there at first is of attempts before and doesn't count. Nor do, of the file that was cut back, the rows of
    the first `done` steps: they were kept from those attempts.
    """

    def __init__(self, file: Path, done: int = 0) -> None:
        self._file = file
        self._last_step = done
        self._inode, self._offset = (file.stat().st_ino, file.stat().st_size) if file.exists() else (0, 0)

    def new_rows(self) -> list[Row]:
        """The rows that were completed since the last call; a line without its end stays for the next."""
        if not self._file.is_file():
            return []
        rows = [row for row in _whole_rows(self._read_on()) if row["step"] > self._last_step]
        self._last_step = max([self._last_step, *(row["step"] for row in rows)])
        return rows

    def _read_on(self) -> bytes:
        """What follows the last whole line that was read; everything if the file was cut back or replaced."""
        with open(self._file, "rb") as file:
            status = os.fstat(file.fileno())
            if status.st_ino != self._inode or status.st_size < self._offset:
                self._inode, self._offset = status.st_ino, 0
            file.seek(self._offset)
            data = file.read()
        self._offset += data.rfind(b"\n") + 1
        return data


def read_rows(file: Path) -> list[Row]:
    """All whole rows of a metrics file; none if there is no file."""
    return _whole_rows(file.read_bytes()) if file.is_file() else []


def last_rows(file: Path, most_bytes: int = 1 << 16) -> list[Row]:
    """The last whole rows of a metrics file, as many as lie in its last bytes; none if there is no file."""
    if not file.is_file():
        return []
    with open(file, "rb") as opened:
        start = max(0, opened.seek(0, os.SEEK_END) - most_bytes)
        opened.seek(start)
        data = opened.read()
    return _whole_rows(data[data.find(b"\n") + 1 :] if start else data)


def _whole_rows(data: bytes) -> list[Row]:
    """What a crash of the machine has garbled is passed over; the ranks name it when the run goes on."""
    return [row for row in map(_row, data.split(b"\n")[:-1]) if row is not None]


def _row(line: bytes) -> Row | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None
