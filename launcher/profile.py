"""What a cluster needs to know of a job: one YAML file per cluster, shipped ones in `sbatch/profiles`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, Field, ValidationError

from headrace.comm.config import Section
from headrace.comm.errors import ConfigError
from headrace.launcher.config import read_yaml
from headrace.launcher.mistakes import describe_mistakes

SBATCH = Path(__file__).resolve().parents[1] / "sbatch"
"""Templates and profiles: beside this package in the repository, within `headrace` where it is installed."""

CACHES = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor", "VLLM_CACHE_ROOT": "vllm"}
"""Caches that many ranks would fight over on a shared file system."""

INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME")

OPENMPI_INTERFACE = "OMPI_MCA_btl_tcp_if_include"
"""Goes to `launch.env`: exported by the job script it would look like a trace of another launcher, and be removed."""


class ContainerConfig(Section):
    """The container in which the ranks run; the launcher stays outside, where Slurm's commands are."""

    runtime: Literal["apptainer", "pyxis"]
    """`apptainer exec` before the ranks' Python, or srun's `--container-image` by the pyxis plugin."""

    image: str
    """Image file, or what pyxis takes."""

    python: Path
    """Python interpreter inside, with headrace."""

    mounts: list[str] = []
    """Folders as `OUTSIDE:INSIDE`; the run folder, models and data have to be seen under their own names. For the
    site's MPI, its folder, too."""

    options: list[str] = []
    """More words for the runtime, for instance `[--nv]`."""


class Profile(Section):
    """A cluster, or a partition of one."""

    model_config = ConfigDict(coerce_numbers_to_str=True)

    partition: str | None = None
    """Partition; none takes the cluster's default."""

    account: str | None = None
    """Account that is charged."""

    time: str = "01:00:00"
    """Time limit of one start, as sbatch takes it."""

    gres: str | None = None
    """Devices per node, as sbatch's `--gres` takes them."""

    devices_per_node: int | None = Field(None, ge=1)
    """How many of them a node has; a node doesn't get more ranks than that."""

    visible: dict[str, str] = {}
    """As `launch.visible`."""

    cpus_per_rank: int = Field(1, ge=1)
    """Cores per rank."""

    mem: str | None = None
    """Memory per node, as sbatch's `--mem` takes it."""

    exclusive: bool = False
    """Whole nodes, shared with no other job."""

    options: list[str] = []
    """More options for sbatch, for instance `[--qos=long, --constraint=ib]`."""

    mpi: Literal["auto", "site", "mpich", "openmpi"] = "auto"
    """Which MPI, as `launch.mpi`."""

    starter: Literal["srun", "mpirun"] = "srun"
    """What starts the ranks."""

    pmi: str | None = None
    """srun's `--mpi`; none takes the one that the MPI speaks."""

    modules: list[str] = []
    """Environment modules to load."""

    setup: list[str] = []
    """Lines of bash after that, for instance `source …/set_env.sh`."""

    environment: dict[str, str] = {}
    """Variables of launcher and ranks; a value may hold variables of the shell."""

    interface: str | None = None
    """Network interface by which nodes reach each other; none lets the libraries choose."""

    scratch: str | None = None
    """Folder on a disk of the node's own, for the compile caches of Triton, inductor and vLLM."""

    container: ContainerConfig | None = None
    """The ranks' container; none runs them as they are."""

    warn_s: int = Field(120, ge=1)
    """How long before the time limit the run is asked to write a checkpoint and leave, in seconds; Slurm may do so up
    to 60 s earlier."""

    requeues: int = Field(10, ge=0)
    """How often a run that had to leave goes back into the queue."""

    relaunches: int = Field(2, ge=0)
    """How often the job is started again within its allocation after a rank or a node has died."""

    def launch(self, own: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """A config's section `launch`: what follows from the profile, and what the config says itself over it."""
        own = own or {}
        named = {OPENMPI_INTERFACE: self.interface} if self.interface else {}
        keys: dict[str, Any] = {
            "mpi": self.mpi,
            "pmi": self.pmi,
            "cpus_per_rank": self.cpus_per_rank,
            "relaunches": self.relaunches,
            "visible": self.visible,
        }
        contained = _contain(self.container) if self.container else {}
        return {**keys, **contained, **own, "env": named | (own.get("env") or {})}

    def variables(self) -> dict[str, str]:
        """What a job script exports; values may hold variables of the shell."""
        caches = {name: f"{self.scratch}/headrace-$USER/{folder}" for name, folder in CACHES.items()}
        named = dict.fromkeys(INTERFACES, self.interface) if self.interface else {}
        return (caches if self.scratch else {}) | named | self.environment

    def lines(self) -> list[str]:
        """What a job script does before it starts anything, as bash."""
        exports = [f"export {name}={double_quote(value)}" for name, value in self.variables().items()]
        return [f"module load {module}" for module in self.modules] + self.setup + exports

    def directives(self) -> Iterator[str]:
        """Options of sbatch that say where a job runs; they come last, since the site's own are among them."""
        options = {"partition": self.partition, "account": self.account, "gres": self.gres, "mem": self.mem}
        yield from (f"--{name}={value}" for name, value in options.items() if value is not None)
        if self.exclusive:
            yield "--exclusive"
        yield from self.options


def double_quote(value: str) -> str:
    """For bash, with variables left in."""
    return '"' + re.sub(r'(["`\\])', r"\\\1", value) + '"'


def _contain(container: ContainerConfig) -> dict[str, Any]:
    mounts = ",".join(container.mounts)
    if container.runtime == "pyxis":
        mounted = [f"--container-mounts={mounts}"] if mounts else []
        return {
            "python": str(container.python),
            "srun_options": [f"--container-image={container.image}", *mounted, *container.options],
        }
    bound = ["--bind", mounts] if mounts else []
    return {
        "python": str(container.python),
        "wrap": ["apptainer", "exec", *bound, *container.options, container.image],
    }


def load_profile(name: str) -> Profile:
    """A shipped profile by its name, or a site's own by its path.

    Raises:
        ConfigError: there is none, or it can't be used.
    """
    file = Path(name)
    shipped = sorted(path.stem for path in (SBATCH / "profiles").glob("*.yaml"))
    if name in shipped:
        file = SBATCH / "profiles" / f"{name}.yaml"
    elif not file.is_file():
        raise ConfigError(f"--profile {name}: there is no such file. Shipped ones: {', '.join(shipped)}.")
    try:
        return Profile.model_validate(read_yaml(file))
    except ValidationError as error:
        raise ConfigError(describe_mistakes(error, Profile, str(file))) from None
