"""A process for tests of the archive: writes segments until it is killed, or under a limit of the size of files."""

from __future__ import annotations

import resource
import sys
import time
from pathlib import Path

import numpy as np

from headrace.comm.columns import Group
from headrace.comm.trajectories import GroupKey, make_group
from headrace.comm.trajectory import Trajectory, Unit
from headrace.ranks.archive import ArchiveFiles, ArchiveWriter
from headrace.ranks.segments import Record


def group(ticket: int, attempt: int = 0, samples: int = 2, tokens: int = 50) -> Group[GroupKey]:
    """A group whose contents follow from its ticket."""
    rng = np.random.default_rng(ticket)
    return make_group(
        ticket,
        attempt,
        [
            Trajectory(
                Unit(ticket, sample, attempt),
                tokens=rng.integers(0, 1000, tokens, np.int32),
                loss_mask=rng.integers(0, 2, tokens, np.uint8),
                logprobs=-rng.random(tokens, np.float32),
                versions=np.full(tokens, ticket // 4, np.int32),
                reward=float(sample),
                finish="stop",
                prompt_text=f"prompt {ticket}",
                response_text="ответ",
            )
            for sample in range(samples)
        ],
    )


def write_for_ever(folder: Path) -> None:
    """Print the ticket of every group that is written, after it is."""
    files = ArchiveFiles(folder, 0, 1)
    for ticket in range(1_000_000):
        files.add([Record(group(ticket), True)])
        print(ticket, flush=True)
        if ticket % 7 == 6:
            files.merge()
        if ticket % 50 == 49:
            files.cover(lambda number, ticket=ticket: number <= ticket - 20)  # type: ignore[misc]


def write_to_a_full_disk(folder: Path) -> None:
    """Files of over 20,000 bytes can't be written, then they can; print what is said."""
    writer = ArchiveWriter(
        ArchiveFiles(folder, 0, 1), lambda error: print("error", error), lambda text: print(text, flush=True)
    )
    for ticket, size, limit in ((0, 10, 20_000), (1, 10_000, 20_000), (2, 10_000, 20_000), (3, 10_000, -1)):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, -1))
        writer.put(group(ticket, tokens=size))
        time.sleep(1.3)
    writer.close()
    while not writer.closed:
        time.sleep(0.01)


if __name__ == "__main__":
    {"for_ever": write_for_ever, "full_disk": write_to_a_full_disk}[sys.argv[1]](Path(sys.argv[2]))
