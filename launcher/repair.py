"""What the ranks of a job with `launch.repair` leave in the folder of their attempt."""

from __future__ import annotations

import re

from headrace.launcher.runfolder import Attempt
from headrace.ranks.farewell import LOSSES, STATUS

NAMED = re.compile(r"rank (\d+) ")


def losses(attempt: Attempt) -> list[str]:
    """A line about every generator that the job went on without."""
    file = attempt.folder / LOSSES
    return file.read_text(encoding="utf-8").splitlines() if file.is_file() else []


def lost_ranks(attempt: Attempt) -> list[int]:
    """Those generators."""
    return [int(found[1]) for found in map(NAMED.match, losses(attempt)) if found]


def end_status(attempt: Attempt) -> int | None:
    """The exit status of the job; None if it didn't come to its end."""
    file = attempt.folder / STATUS
    return int(file.read_text()) if file.is_file() else None
