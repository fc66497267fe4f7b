"""The environment of the ranks: what a batch system or another launcher left behind is taken out."""

from __future__ import annotations

from collections.abc import Mapping

from headrace.ranks.failure import JOB_MARK

STALE_PREFIXES = (
    "SLURM_",
    "PMI_",
    "PMI2_",
    "PMIX_",
    "PRTE_",
    "OMPI_",
    "OPAL_",
    "HYDRA_",
    "HYDI_",
    "MPIEXEC_",
    "MASTER_",
    "TORCHELASTIC_",
)
"""A local mpirun would take these for its own: Open MPI starts on the nodes of a Slurm job that has ended, MPICH
joins a world that isn't there, torch meets at another job's address. What an MPI really needs goes to `launch.env`."""

STALE_NAMES = frozenset(
    {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "PMI_RANK", "MPI_LOCALRANKID"}
)


def clean(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` without the variables of other launchers."""
    return {
        name: value
        for name, value in environ.items()
        if not name.startswith(STALE_PREFIXES) and name not in STALE_NAMES
    }


def rank_environment(environ: Mapping[str, str], threads: int, job: str) -> dict[str, str]:
    """The environment in which ranks with `threads` compute threads each start; models are never fetched by a rank."""
    fixed = {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        JOB_MARK: job,
    }
    return clean(environ) | fixed
