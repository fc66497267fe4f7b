"""What starts the ranks, as `launch.starter` says.

    here      mpirun on this machine, which knows nothing of any Slurm
    mpirun    mpirun over the nodes of the Slurm job that the launcher runs in; its daemons come by srun
    srun      one srun step over these nodes

All three are used alike by `headrace.launcher.run`.
"""

from __future__ import annotations

import shutil
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from headrace.comm.errors import ConfigError
from headrace.launcher.allocation import Allocation, place, ranks_per_node
from headrace.launcher.config import LaunchConfig
from headrace.launcher.mpi import Family, MpiInstallation
from headrace.launcher.processes import kill_job

PMI: dict[Family, tuple[str, ...]] = {"openmpi": ("pmix",), "mpich": ("pmi2", "cray_shasta")}
"""The process management interfaces that each family's library speaks under srun, the usual one first. Under any other
every process would be a world of its own."""

CUTTING = "pmi2"
"""Slurm's plugin of this type reads at most 1,024 bytes of a message and takes the rest for another one (22.05 to
26.05, `handle_pmi1_cmd`). MPICH 5 over several nodes sends the 4,096 bytes from the start of its address, zeros
shortened, in values of up to 1,022 characters: what lies behind the address decides whether a message is cut."""

TEARDOWN_S = 60
"""When the first rank has left, the others have so long to leave, too."""


class Starter(Protocol):
    """A program that starts the ranks and ends with their status."""

    @property
    def program(self) -> Path: ...

    @property
    def one_host(self) -> bool:
        """Whether all ranks run on the launcher's own host, so that it can watch their processes."""

    @property
    def nodes(self) -> tuple[str, ...]:
        """Of the Slurm job, those that get ranks; none without one."""

    @property
    def is_srun(self) -> bool:
        """Whether srun tells how ranks end; mpirun's own srun tells the same of mpirun's daemons."""

    @property
    def stop_signal(self) -> signal.Signals:
        """What the program passes on to every rank without ending them itself."""

    def describe(self) -> str: ...

    def environment(self, job: str) -> dict[str, str]:
        """What the program and the ranks need; `job` is the mark of the job's processes."""

    def command(self, ranks: int, job: str) -> list[str]:
        """The start of the command line; the program of the ranks and its arguments follow."""

    def kill(self, job: str) -> None:
        """End every process of the job at once, on every host."""


@dataclass(frozen=True, slots=True)
class Here:
    """mpirun on this machine."""

    installation: MpiInstallation
    nodes: tuple[str, ...] = ()
    one_host: bool = True
    is_srun: bool = False

    @property
    def program(self) -> Path:
        return self.installation.mpirun

    @property
    def stop_signal(self) -> signal.Signals:
        return self.installation.stop_signal

    def describe(self) -> str:
        return self.installation.describe()

    def environment(self, job: str) -> dict[str, str]:
        return dict(self.installation.environment)

    def command(self, ranks: int, job: str) -> list[str]:
        return self.installation.command(ranks)

    def kill(self, job: str) -> None:
        kill_job(job)


@dataclass(frozen=True, slots=True)
class InJob:
    """What both starters over the nodes of a Slurm job have in common."""

    installation: MpiInstallation
    allocation: Allocation
    nodes: tuple[str, ...]
    """Those of the allocation that get ranks."""

    @property
    def one_host(self) -> bool:
        return False

    @property
    def is_srun(self) -> bool:
        return isinstance(self, Srun)

    def environment(self, job: str) -> dict[str, str]:
        return {**self.installation.environment, **self.allocation.environ, "SLURM_JOB_NAME": job}

    def kill(self, job: str) -> None:
        self.allocation.end_steps(job)
        kill_job(job)


@dataclass(frozen=True, slots=True)
class JobMpirun(InJob):
    """mpirun over the nodes of the job; it starts its daemons by an srun of its own."""

    @property
    def program(self) -> Path:
        return self.installation.mpirun

    @property
    def stop_signal(self) -> signal.Signals:
        return self.installation.stop_signal

    def describe(self) -> str:
        return f"{self.installation.describe()} on {len(self.nodes)} nodes of job {self.allocation.job}"

    def command(self, ranks: int, job: str) -> list[str]:
        slots = dict(zip(self.nodes, ranks_per_node(ranks, len(self.nodes)), strict=False))
        return self.installation.command_on(ranks, slots, self.allocation.here, job)


@dataclass(frozen=True, slots=True)
class Srun(InJob):
    """One srun step."""

    program: Path
    pmi: str
    cpus_per_rank: int
    options: Sequence[str]
    """Of the site, after all others."""
    stop_signal: signal.Signals = signal.SIGUSR2
    """srun takes SIGTERM as an order to kill the step."""

    def describe(self) -> str:
        mpi = f"{self.installation.kind}, --mpi={self.pmi}"
        return f"srun ({mpi}) on {len(self.nodes)} nodes of job {self.allocation.job}"

    def command(self, ranks: int, job: str) -> list[str]:
        options = step_options(ranks, self.pmi, self.cpus_per_rank, self.options)
        return [str(self.program), f"--job-name={job}", *self._placed(ranks), *options]

    def _placed(self, ranks: int) -> list[str]:
        """One node filled after the other. Where the numbers differ, srun wants the node of every rank."""
        counts = ranks_per_node(ranks, len(self.nodes))
        if counts[0] != counts[-1]:
            return ["--distribution=arbitrary", f"--nodelist={','.join(place(ranks, self.nodes))}"]
        nodes = f"--nodelist={','.join(self.nodes[: len(counts)])}"
        return [f"--nodes={len(counts)}", f"--ntasks-per-node={counts[0]}", "--distribution=block", nodes]


def step_options(ranks: int, pmi: str, cpus_per_rank: int, site: Sequence[str]) -> list[str]:
    """Of srun, for a step of ranks, wherever they are placed; those of the site come last.

    Everything is said explicitly: srun takes what is left out from variables, which may be those of another job, and
    since Slurm 22.05 it doesn't take `--cpus-per-task` from sbatch."""
    return [
        f"--mpi={pmi}",
        f"--ntasks={ranks}",
        f"--cpus-per-task={cpus_per_rank}",
        "--mem=0",
        "--overlap",  # a step that had ranks on a lost node may never be over for Slurm
        "--export=ALL",
        "--kill-on-bad-exit=1",
        f"--wait={TEARDOWN_S}",
        "--unbuffered",
        *site,
    ]


def srun_starter(
    installation: MpiInstallation,
    allocation: Allocation,
    nodes: tuple[str, ...],
    launch: LaunchConfig,
    environ: Mapping[str, str],
) -> Srun:
    """
    Raises:
        ConfigError: there is no srun.
    """
    found = shutil.which("srun", path=environ.get("PATH"))
    if found is None:
        raise ConfigError("launch.starter: srun, but there is no srun on PATH. Use launch.starter=mpirun or here.")
    return Srun(
        installation=installation,
        allocation=allocation,
        nodes=nodes,
        program=Path(found),
        pmi=launch.pmi or PMI[installation.family][0],
        cpus_per_rank=launch.cpus_per_rank,
        options=launch.srun_options,
    )
