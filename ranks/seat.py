"""What a rank has to settle before it imports torch or MPI: which devices it sees, and which Python it runs in.

    launcher ── HEADRACE_SEATS (who trains, a Python per role, devices per node) ──▶ every rank
    rank     ── variables of its node's devices set ── its role's Python differs? ── exec ──▶ the same rank in that one

Its number comes from the variables of whatever has started it; MPI itself will be started by the Python that stays.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping

import msgspec

from headrace.comm.errors import HeadraceError

SEATS = "HEADRACE_SEATS"
ROLE = "HEADRACE_ROLE"
"""The role whose Python this rank runs in."""

NUMBERS = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")
"""Variables with a rank's number. Under mpirun in a Slurm job the last one is that of mpirun's daemon."""


class Seats(msgspec.Struct, frozen=True):
    """What the launcher tells the ranks."""

    trainers: tuple[int, ...]
    pythons: dict[str, str]
    """Interpreter by role; none if all ranks run in the one that has started them."""
    visible: dict[str, dict[str, str]]
    """By variable and node: the devices that the job has there."""


def take_seat() -> None:
    """Settle this process; doesn't return if it goes on as another program.

    Raises:
        HeadraceError: its number can't be told.
    """
    text = os.environ.pop(SEATS, None)
    if text is None:
        return
    seats = msgspec.json.decode(text, type=Seats)
    node = os.environ.get("SLURMD_NODENAME", socket.gethostname())
    for name, devices in seats.visible.items():
        if node in devices:
            os.environ[name] = spelled(devices[node])
    if seats.pythons:
        role = "trainer" if rank_of(os.environ) in seats.trainers else "generator"
        os.environ[ROLE] = role
        python = seats.pythons[role]
        os.execv(python, [python, "-m", "headrace.ranks", *sys.argv[1:]])


def rank_of(environ: Mapping[str, str]) -> int:
    """The number of this rank, as its starter says."""
    found = next((environ[name] for name in NUMBERS if name in environ), None)
    if found is None:
        raise HeadraceError(f"launch.python by role: none of {', '.join(NUMBERS)} says which rank this process is.")
    return int(found)


def spelled(ranges: str) -> str:
    """`0-2,5` → `0,1,2,5`."""
    bounds = [part.partition("-") for part in ranges.split(",")]
    return ",".join(str(number) for first, _, last in bounds for number in range(int(first), int(last or first) + 1))
