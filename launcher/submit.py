"""`headrace submit`: one job script, readable before it is sent, that runs a config on a cluster.

    CONFIG + profile ──▶ runs/NAME/config.yaml (resolved)    ┐
                         runs/NAME/job.sbatch (the script)   ┴──▶ sbatch ──▶ job id, kept in runs/NAME/slurm_job

A sweep is an array of such runs, one folder each, under one script in runs/NAME.sweep.
"""

from __future__ import annotations

import copy
import itertools
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from headrace.comm.errors import ConfigError, HeadraceError
from headrace.launcher.allocation import ranks_per_node
from headrace.launcher.config import Config, apply_override, dump, read_yaml, validate
from headrace.launcher.crew import with_ranks
from headrace.launcher.environment import clean
from headrace.launcher.profile import SBATCH, Profile
from headrace.launcher.queue import ask, queued
from headrace.launcher.record import job_of, record_job
from headrace.launcher.runfolder import check_new, check_resume, claim, fresh_config, is_barren, write_text, writing
from headrace.launcher.start import check_inputs

TEMPLATE = "job.sbatch.j2"
SCRIPT = "job.sbatch"
UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")


@dataclass(frozen=True, slots=True)
class Wish:
    """What somebody wants to have run."""

    config: Path | Mapping[str, Any]
    """YAML file, or what would be in one."""
    overrides: Sequence[str] = ()
    nodes: int = 1
    spare_nodes: int = 0
    ranks: int | None = None
    """In all; none takes what the config says."""
    sweep: Sequence[str] = ()
    """`key.path=value,value,…`, each a dimension."""
    after: str | None = None
    """The job starts once this one has ended well."""
    time: str | None = None
    """Time limit of one start; none takes the profile's."""
    resume: bool = False
    fresh: bool = False


@dataclass(frozen=True, slots=True)
class Submission:
    """A job script with the configs of its runs; nothing is written yet."""

    configs: Sequence[Config]
    folder: Path
    """Where script and output of the job go: the run folder, or that of the sweep."""
    script: str
    fresh: bool
    """The run folders are to be new."""

    @property
    def file(self) -> Path:
        return self.folder / SCRIPT

    def write(self) -> None:
        """Write the script, and each run's config into its folder.

        Raises:
            HeadraceError: it can't be written, or another run has taken a folder that was to be new.
        """
        for config in self.configs:
            if self.fresh:
                claim(config.run.folder)
            write_text(config.run.folder, "config.yaml", dump(config))
        write_text(self.folder, SCRIPT, self.script)

    def send(self) -> str:
        """Hand the written script to Slurm.

        Returns:
            the id of the job.

        Raises:
            HeadraceError: Slurm refuses it, with its words.
        """
        job = send(self.file, f"The script is {self.file}.")
        if len(self.configs) == 1:
            with writing(self.folder):
                record_job(self.folder, job)
        return str(job)

    def logs(self, job: str) -> Path:
        """What the job prints, for a job id."""
        return self.folder / (f"slurm-{job}.out" if len(self.configs) == 1 else f"slurm-{job}_*.out")


def prepare(wish: Wish, profile: Profile) -> Submission:
    """Check everything that can be checked here, and render the script.

    Raises:
        HeadraceError: the config, its files, or what is asked of the cluster can't be used.
    """
    configs = [with_folder(config, wish.resume, wish.fresh) for config in _configs(wish, profile)]
    first = configs[0]
    for config in configs:
        check_inputs(config)
    single = len(configs) == 1
    folder = first.run.folder if single else Path("runs") / f"{_name(wish, profile)}.sweep"
    return Submission(configs, folder, render(configs, folder, wish, profile), wish.fresh)


def with_folder(config: Config, resume: bool, fresh: bool) -> Config:
    """Choose and check the run folder, as `headrace run` does."""
    config = fresh_config(config) if fresh else config
    if resume and not is_barren(config.run.folder):
        check_resume(config)
    else:
        check_new(config)
    if (job := job_of(config.run.folder)) is not None and queued([job]):
        raise ConfigError(
            f"Job {job} waits or runs for {config.run.folder} already. Wait for its end, stop it by `headrace cancel "
            f"{config.run.folder}`, or begin another run by --fresh or run.name=NAME."
        )
    return config


def _configs(wish: Wish, profile: Profile) -> Iterator[Config]:
    for settings in itertools.product(*map(_dimension, wish.sweep)):
        config = _load(wish, profile, settings)
        if settings:
            suffix = "-".join(UNSAFE.sub("-", setting.replace("=", "-")) for setting in settings)
            run = config.run.model_copy(update={"name": f"{config.run.name}-{suffix}", "dir": None})
            config = config.model_copy(update={"run": run})
        yield config


def _dimension(sweep: str) -> list[str]:
    """`train.lr=1e-6,3e-6` → [`train.lr=1e-6`, `train.lr=3e-6`]."""
    key, equals, values = sweep.partition("=")
    if not equals or not all(values.split(",")):
        raise ConfigError(f"--sweep {sweep!r}: write key.path=value,value, for instance train.lr=1e-6,3e-6.")
    return [f"{key}={value}" for value in values.split(",")]


def _load(wish: Wish, profile: Profile, settings: Sequence[str]) -> Config:
    """The config with what the profile says about starting it; the user's own word counts more."""
    tree, source = read_tree(wish.config, (*wish.overrides, *settings))
    tree["launch"] = profile.launch(tree.get("launch"))
    tree["launch"] |= {"starter": profile.starter, "nodes": wish.nodes}
    return with_ranks(validate(tree, source), wish.ranks)


def read_tree(config: Path | Mapping[str, Any], overrides: Sequence[str]) -> tuple[dict[str, Any], str]:
    """A config that isn't validated yet, with the overrides in it, and what errors call it."""
    tree = read_yaml(config) if isinstance(config, Path) else copy.deepcopy(dict(config))
    for override in overrides:
        apply_override(tree, override)
    return tree, str(config) if isinstance(config, Path) else "config"


def _name(wish: Wish, profile: Profile) -> str:
    return _load(wish, profile, ()).run.name


def render(configs: Sequence[Config], folder: Path, wish: Wish, profile: Profile) -> str:
    """The job script.

    Raises:
        ConfigError: the ranks don't fit on the nodes.
    """
    loader = jinja2.FileSystemLoader(SBATCH)
    environment = jinja2.Environment(
        loader=loader, undefined=jinja2.StrictUndefined, trim_blocks=True, keep_trailing_newline=True, autoescape=False
    )
    environment.filters["quote"] = lambda value: shlex.quote(str(value))
    return environment.get_template(TEMPLATE).render(
        script=folder / SCRIPT,
        directives=list(directives(configs, folder, wish, profile)),
        runs=[config.run.folder for config in configs],
        setup=profile.lines(),
        headrace=shlex.join([sys.executable, "-m", "headrace.launcher"]),
        requeues=profile.requeues,
    )


def directives(configs: Sequence[Config], folder: Path, wish: Wish, profile: Profile) -> Iterator[str]:
    """The options of sbatch, each as `--name=value` or `--name`, quoted for bash."""
    first, array = configs[0], len(configs) > 1
    yield f"--job-name={folder.name}"
    yield f"--chdir={shlex.quote(str(Path.cwd()))}"
    yield f"--output={folder.absolute() / ('slurm-%A_%a.out' if array else 'slurm-%j.out')}"
    yield "--open-mode=append"
    yield f"--nodes={wish.nodes + wish.spare_nodes}"
    yield f"--ntasks-per-node={_most_per_node(configs, wish, profile)}"
    yield f"--cpus-per-task={first.launch.cpus_per_rank}"
    yield f"--time={wish.time or profile.time}"
    yield f"--signal=B:USR2@{profile.warn_s}"
    yield "--requeue"
    yield "--no-kill"
    if array:
        yield f"--array=0-{len(configs) - 1}"
    if wish.after is not None:
        yield f"--dependency=afterok:{wish.after}"
    yield from profile.directives()


def _most_per_node(configs: Sequence[Config], wish: Wish, profile: Profile) -> int:
    most = 0
    for config in configs:
        ranks = config.ranks.trainers + config.ranks.generators
        if ranks < wish.nodes:
            raise ConfigError(f"--nodes {wish.nodes} is more than the {ranks} ranks: a node would have nothing to do.")
        most = max(most, *ranks_per_node(ranks, wish.nodes))
    if profile.devices_per_node is not None and most > profile.devices_per_node:
        raise ConfigError(
            f"{most} ranks on a node, but it has {profile.devices_per_node} devices (devices_per_node of the profile). "
            "Give more --nodes, or fewer ranks by -n, ranks.generators or ranks.trainers."
        )
    return most


def send(script: Path, hint: str) -> int:
    """Hand a script to Slurm.

    Args:
        hint: what to look at if Slurm refuses it.

    Returns:
        the number of the job.

    Raises:
        HeadraceError: Slurm refuses it, with its words.
    """
    code, output, error = ask(["sbatch", "--parsable", str(script)], sbatch_environment(os.environ))
    number = output.partition(";")[0]
    if code or not number.isdigit():
        told = " ".join((error or output).split()).removeprefix("sbatch: error: ")
        raise HeadraceError(f"Slurm doesn't take the job: {told.rstrip('.')}. {hint}")
    return int(number)


def sbatch_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Without what is left of other jobs, which sbatch would hand on to this one. What it takes from SBATCH_* stays."""
    kept = ("SLURM_CONF", "SLURM_CLUSTERS")
    return clean(environ) | {name: environ[name] for name in kept if name in environ}
