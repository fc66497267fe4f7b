"""What Slurm offers, and how the doctor's ranks are started in a job.

pmi_of(family, offered)   the --mpi= of srun that fits the MPI library; none → mpirun inside the job
start_line                how the ranks start, given that
job_script                the whole job, as sbatch gets it
"""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from headrace.comm.errors import HeadraceError
from headrace.launcher.config import LaunchConfig
from headrace.launcher.doctor.findings import Check, Finding, ok, warn
from headrace.launcher.mpi import Family, MpiInstallation
from headrace.launcher.profile import Profile
from headrace.launcher.queue import ask, tell
from headrace.launcher.starter import CUTTING, PMI, step_options
from headrace.launcher.submit import send

PMI_TYPES = re.compile(r"\b(none|pmi2|pmix(?:_v\d+)?|cray_shasta|openmpi)\b")
JOB_MINUTES = 10


def has_srun() -> bool:
    return shutil.which("srun") is not None


def offered_types() -> list[str]:
    """The types that `srun --mpi=` knows here.

    Raises:
        HeadraceError: srun doesn't answer.
    """
    _, output, errors = ask(["srun", "--mpi=list"])
    return list(dict.fromkeys(PMI_TYPES.findall(f"{output}\n{errors}")))  # older ones print it as an error


def pmi_of(family: Family, offered: Sequence[str]) -> str | None:
    """The type by which srun starts ranks of this MPI as one world, every time."""
    usual = next((kind for kind in PMI[family] if kind in offered), None)
    return None if usual == CUTTING else usual  # cray_shasta is offered also where there is no Cray


def examine_slurm(check: str, ask_slurm: Check) -> Finding:
    """A check that asks Slurm. A Slurm that doesn't answer is no failure: `headrace run` needs none."""
    try:
        return ask_slurm()
    except HeadraceError as error:
        return warn(check, str(error), "Look at SLURM_CONF and whether Slurm works (sinfo).")


def check_pmi(installation: MpiInstallation, offered: Sequence[str] | None = None) -> Finding:
    """Whether srun can start this MPI's ranks as one world.

    Args:
        offered: types; None asks srun.

    Raises:
        HeadraceError: srun doesn't answer.
    """
    offered = offered_types() if offered is None else offered
    if not offered:
        raise HeadraceError("`srun --mpi=list` names no type.")
    kind = pmi_of(installation.family, offered)
    types = ", ".join(offered)
    if kind is not None:
        return ok("PMI", f"srun offers {types}; {installation.family} starts by srun --mpi={kind}")
    wanted = " or ".join(PMI[installation.family])
    other = next((family for family in PMI if pmi_of(family, offered)), None)
    instead = f", or take launch.mpi={other}" if other else ""
    if CUTTING in PMI[installation.family] and CUTTING in offered:
        why = f"{CUTTING} cuts what its ranks tell each other: over several nodes a start fails by chance"
    else:
        why = f"{installation.family} needs {wanted}: each process would be a world of its own"
    remedy = f"Start the ranks by mpirun inside the job (launch.starter=mpirun), as the doctor does{instead}."
    return warn("PMI", f"srun offers {types}, but {why}", remedy)


def check_requeue() -> Finding:
    """Runs come back after a time limit or a lost node by being requeued.

    Raises:
        HeadraceError: Slurm doesn't answer.
    """
    code, output, error = ask(["scontrol", "show", "config"])
    if code:
        raise HeadraceError(f"Slurm doesn't answer: {' '.join(error.split()) or f'status {code}'}.")
    allowed = re.search(r"^JobRequeue\s*=\s*1", output, re.MULTILINE)
    version = re.search(r"^SLURM_VERSION\s*=\s*(\S+)", output, re.MULTILINE)
    name = f"Slurm {version[1]}" if version else "Slurm"
    if allowed:
        return ok("requeue", f"{name} requeues jobs (JobRequeue = 1)")
    return warn("requeue", f"{name} doesn't requeue jobs by itself (JobRequeue = 0)", "Give --requeue to sbatch.")


def start_line(
    installation: MpiInstallation, launch: LaunchConfig, pmi: str | None, ranks: int, program: Sequence[str]
) -> list[str]:
    """The command that starts the ranks inside a job, on all its nodes."""
    if pmi is not None:
        return ["srun", *step_options(ranks, pmi, launch.cpus_per_rank, launch.srun_options), *program]
    personal = ["--personality", "ompi"] if installation.mpirun.name == "prterun" else []
    flags = [*personal, "--allow-run-as-root", "--bind-to", "none"] if installation.family == "openmpi" else []
    return [str(installation.mpirun), *flags, "-n", str(ranks), *program]


def job_script(
    start: Sequence[str], nodes: int, ranks: int, log: Path, environment: Mapping[str, str], profile: Profile
) -> str:
    """A job that starts the ranks once, set up as the profile says.

    Args:
        start: see `start_line`.
        environment: of the ranks; counts more than the profile's.
    """
    lines = [f"#SBATCH {option}" for option in _options(nodes, ranks, log, profile)]
    lines += profile.lines()
    lines += [f"export {name}={shlex.quote(value)}" for name, value in environment.items()]
    return "\n".join(["#!/bin/bash", *lines, f"exec {shlex.join(start)}", ""])


def _options(nodes: int, ranks: int, log: Path, profile: Profile) -> Iterator[str]:
    yield "--job-name=headrace-doctor"
    yield f"--nodes={nodes}"
    yield f"--ntasks-per-node={-(-ranks // nodes)}"
    yield f"--cpus-per-task={profile.cpus_per_rank}"
    yield f"--time={JOB_MINUTES}"
    yield "--no-requeue"
    yield f"--output={log}"
    yield from profile.directives()


def sbatch(script: Path) -> int:
    """Submit a script; returns the number of the job.

    Raises:
        HeadraceError: Slurm refuses it.
    """
    return send(script, "A --profile names partition and account.")


def scancel(job: int) -> None:
    tell(["scancel", str(job)])
