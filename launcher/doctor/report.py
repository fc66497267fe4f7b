"""What the doctor's ranks tell `headrace doctor`."""

from __future__ import annotations

from pathlib import Path

import msgspec

from headrace.comm.files import write_whole
from headrace.launcher.doctor.findings import Finding
from headrace.launcher.doctor.hosts import Facts
from headrace.launcher.doctor.network import Pair


class Report(msgspec.Struct, frozen=True):
    """Findings and what they rest on."""

    findings: list[Finding]
    facts: list[Facts] = []
    """Of every rank."""
    pairs: list[Pair] = []

    def write(self, file: Path) -> None:
        """Whole or not at all, since somebody waits for it; many may write it at once, where each is rank 0 of 1."""
        write_whole(file, msgspec.json.encode(self))


def read_report(file: Path) -> Report:
    return msgspec.json.decode(file.read_bytes(), type=Report)
