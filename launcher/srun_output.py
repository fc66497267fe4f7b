"""What srun says about the ends of ranks.

srun: error: node3: tasks 4-5,7: Exited with exit code 1
srun: error: node1: task 0: Killed
srun: error: Node failure on node2
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

REPORT = re.compile(r"^srun: error: (\S+): tasks? ([\d,-]+): (?:Exited with exit code (\d+)|(.+))$")
LOST_NODE = re.compile(r"Node failure on (\S+)|NODE_FAIL|DUE TO NODE FAILURE")
GARBLED = re.compile(r"^slurmstepd-?\S*: error: mpi/pmi2: invalid client request")
"""Slurm's plugin cuts what MPICH writes now and then, at the end of its buffer (seen with 22.05); the start hangs."""
NOISE = re.compile(
    r"^(srun: error: \S+: tasks? |srun: launch/slurm: _step_signal|srun: Force Terminated|srun: got SIG"
    r"|srun: forcing job termination|srun: Job step aborted|slurmstepd-?\S*: error: (\*\*\* STEP |mpi/pmi2: )|cmd=put "
    r"|\[(proxy:\d+|mpiexec)@|\[\S+:\d+\] pmix_ptl_base: )"
)
"""Lines about ranks that end; the launcher tells their end in its own words."""

SIGNALS = {signal.strsignal(number): int(number) for number in signal.valid_signals()}
LOST_CONTACT = 14
"""Status of Open MPI's ranks whose node's daemon has gone away."""

UNKNOWN = 1
"""Status of an end for which srun has words of its own, such as `Out Of Memory`."""


@dataclass(frozen=True, slots=True)
class Report:
    """Ranks of one node that ended alike."""

    node: str
    ranks: tuple[int, ...]
    status: int
    """As a shell gives it: 128 + number for a signal."""


def reports(output: Iterable[str]) -> Iterator[Report]:
    """The ends that srun has reported, in their order."""
    for match in filter(None, map(REPORT.match, output)):
        node, ranks, code, words = match.groups()
        yield Report(node, tuple(_ranks(ranks)), int(code) if code else _status_of(words))


def without_followers(deaths: Sequence[int], told: Sequence[Report]) -> list[int]:
    """`deaths` without the ranks that ended since srun had begun to end the step."""
    followers = {rank for report in told if report.status == LOST_CONTACT for rank in report.ranks}
    return [rank for rank in deaths if rank not in followers]


def in_order(told: Iterable[Report], deaths: Sequence[int]) -> list[Report]:
    """Sorted by the first death of each: srun hears of ends in any order. `deaths`: ranks, first dead first."""
    place = {rank: index for index, rank in enumerate(deaths)}
    return sorted(told, key=lambda report: min(place.get(rank, len(deaths)) for rank in report.ranks))


def lost_a_node(output: Iterable[str]) -> bool:
    """Whether Slurm ended the step since one of its nodes failed."""
    return any(map(LOST_NODE.search, output))


def is_garbled(output: Iterable[str]) -> bool:
    """Whether MPICH and Slurm didn't understand each other, by chance."""
    return any(map(GARBLED.match, output))


def _status_of(words: str) -> int:
    number = SIGNALS.get(words.removesuffix(" (core dumped)"))
    return 128 + number if number else UNKNOWN


def _ranks(text: str) -> Iterator[int]:
    for part in text.split(","):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)
