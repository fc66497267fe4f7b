"""Reading metrics.jsonl: one JSON object per optimizer step, appended while the run goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

Row = dict[str, Any]


@dataclass
class MetricsTail:
    """Follows a file that another process appends to."""

    file: Path
    offset: int = 0
    """Bytes read so far."""

    @classmethod
    def at_end(cls, file: Path) -> Self:
        """Follow from here on: lines that are there already don't count."""
        return cls(file, file.stat().st_size if file.exists() else 0)

    def new_rows(self) -> Iterator[Row]:
        """The rows that were completed since the last call; a line without its end stays for the next."""
        if not self.file.is_file():
            return
        if self.file.stat().st_size < self.offset:
            self.offset = 0  # a resumed run has cut the file back to its checkpoint
        with open(self.file, "rb") as file:
            file.seek(self.offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self.offset += len(whole)
        yield from (json.loads(line) for line in whole.splitlines() if line.strip())


def read_rows(file: Path) -> list[Row]:
    """All whole rows of a metrics file; none if there is no file."""
    return list(MetricsTail(file).new_rows())
