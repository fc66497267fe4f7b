"""From Python: `submit_job` sends a run to this machine or to Slurm, and returns submitit's job of it.

config, overrides ──▶ checked, run folder chosen ──▶ RUN/config.yaml ──▶ submitit ──▶ job.result() → RunSummary
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from typing_extensions import Unpack

from headrace.comm.errors import ConfigError
from headrace.launcher.config import Config, dump, validate
from headrace.launcher.crew import with_ranks
from headrace.launcher.profile import Profile, load_profile
from headrace.launcher.queue import has_slurm
from headrace.launcher.record import record_job
from headrace.launcher.runfolder import claim, write_text, writing
from headrace.launcher.start import check_inputs
from headrace.launcher.submit import Wish, directives, prepare, read_tree, with_folder

if TYPE_CHECKING:  # an optional dependency
    from headrace.launcher.submitit_run import Run, RunJob

FILES = "submitit"
"""Folder in the run folder: scripts, pickles and logs of submitit."""

AnyConfig = Config | Mapping[str, Any] | Path | str
"""A config, what would be in its file, or the file."""


class SlurmOptions(TypedDict, total=False):
    """What only a cluster understands; as the options of `headrace submit`."""

    profile: str | Profile
    """The cluster: `cpu` (default), `nvidia`, `ascend`, a YAML file, or a Profile."""
    nodes: int
    spare_nodes: int
    after: str
    """The job starts once this one has ended well."""


def submit_job(
    config: AnyConfig,
    *,
    executor: Literal["mpirun", "slurm"] = "mpirun",
    ranks: int | None = None,
    overrides: Sequence[str] = (),
    resume: bool = False,
    fresh: bool = False,
    timeout_min: int | None = None,
    **slurm: Unpack[SlurmOptions],
) -> RunJob:
    """Start a run on this machine, or send it to Slurm; returns at once.

    Args:
        executor: `mpirun`: here. `slurm`: as `headrace submit` does.
        ranks: in all, as `-n`; none takes what the config says.
        overrides: `key.path=value`.
        resume: go on with the run that is in the run folder.
        fresh: if the run folder exists, take a new one beside it.
        timeout_min: minutes after which the run is queued again, to go on from its checkpoint; none takes the profile's
            `time` on Slurm, and no limit on this machine.
        slurm: for `executor="slurm"` only.

    Returns:
        a `submitit.Job`. `result()` waits and gives a RunSummary, or raises a RunError whose message is one paragraph;
        `cancel()` has the run write a checkpoint and leave; `run` is the run folder.

    Raises:
        HeadraceError: the config, its files, or what is asked of the cluster can't be used.
    """
    require_submitit()
    if executor == "slurm":
        return _send_to_slurm(_wish(config, overrides, ranks, resume, fresh, slurm), _profile(slurm, timeout_min))
    if executor != "mpirun":
        raise ConfigError(_no_executor(executor))
    if slurm:
        raise ConfigError(f'{", ".join(slurm)}: these are for executor="slurm"; mpirun starts the ranks here.')
    return _start_here(prepare_run(config, ranks=ranks, overrides=overrides, resume=resume, fresh=fresh), timeout_min)


def prepare_run(
    config: AnyConfig,
    *,
    ranks: int | None = None,
    overrides: Sequence[str] = (),
    resume: bool = False,
    fresh: bool = False,
) -> Run:
    """Make the run folder, for `submit` of `submitit.AutoExecutor(FOLDER, cluster="mpirun")`.

    The arguments are those of `submit_job`.

    Raises:
        HeadraceError: the config or its files can't be used.
    """
    require_submitit()
    tree, source = read_tree(_named(config), overrides)
    loaded = with_folder(with_ranks(validate(tree, source), ranks), resume, fresh)
    if loaded.launch.starter != "here":
        raise ConfigError(
            f'launch.starter: {loaded.launch.starter} starts ranks within a Slurm job. Use executor="slurm" of '
            "submit_job, or launch.starter=here."
        )
    check_inputs(loaded)
    return _written(loaded, fresh)


def require_submitit() -> None:
    """
    Raises:
        ConfigError: it isn't installed.
    """
    if importlib.util.find_spec("submitit") is None:
        raise ConfigError("Jobs from Python need submitit, which isn't installed: pip install 'headrace[submitit]'.")


def _no_executor(name: str) -> str:
    told = "submitit's `local` would make every task a world of one. " if name == "local" else ""
    return f'executor={name!r}: {told}Use "mpirun" to run on this machine, or "slurm".'


def _named(config: AnyConfig) -> Path | Mapping[str, Any]:
    if isinstance(config, Config):
        return config.model_dump(mode="json")
    return Path(config) if isinstance(config, str) else config


def _wish(
    config: AnyConfig, overrides: Sequence[str], ranks: int | None, resume: bool, fresh: bool, slurm: SlurmOptions
) -> Wish:
    return Wish(
        config=_named(config),
        overrides=overrides,
        ranks=ranks,
        resume=resume,
        fresh=fresh,
        nodes=slurm.get("nodes", 1),
        spare_nodes=slurm.get("spare_nodes", 0),
        after=slurm.get("after"),
    )


def _profile(slurm: SlurmOptions, timeout_min: int | None) -> Profile:
    named = slurm.get("profile", "cpu")
    profile = load_profile(named) if isinstance(named, str) else named
    return profile if timeout_min is None else profile.model_copy(update={"time": str(timeout_min)})


def _written(config: Config, fresh: bool) -> Run:
    from headrace.launcher.submitit_run import Run

    if fresh:
        claim(config.run.folder)
    write_text(config.run.folder, "config.yaml", dump(config))
    return Run(config.run.folder.absolute())


def _start_here(run: Run, timeout_min: int | None) -> RunJob:
    from headrace.launcher.submitit_mpirun import MpirunExecutor, MpirunJob

    executor = MpirunExecutor(run.folder / FILES)
    if timeout_min is not None:
        executor.update_parameters(timeout_min=timeout_min)
    job = executor.submit(run)
    assert isinstance(job, MpirunJob)
    return job


def _send_to_slurm(wish: Wish, profile: Profile) -> RunJob:
    from headrace.launcher.submitit_slurm import send

    if not has_slurm():
        raise ConfigError('executor="slurm": there is no Slurm here (no squeue on PATH). Use executor="mpirun".')
    submission = prepare(wish, profile)
    (config,) = submission.configs
    run = _written(config, wish.fresh)
    options = directives(submission.configs, submission.folder, wish, profile)
    job = send(run, run.folder / FILES, options, profile)
    with writing(run.folder):
        record_job(run.folder, int(job.job_id))
    return job
