"""The folder of a run.

runs/NAME/
  config.yaml          the resolved config of the last attempt
  metrics.jsonl        one object per optimizer step; beside it samples.jsonl, evaluations.jsonl, tensorboard/
  initial_model/       the model made by `model.tiny`
  attempt_01/          one per start of the job
    job.yaml           what the ranks of this attempt read
    mpirun.log         everything that mpirun and the ranks printed
    rank_000.log …     each rank's own log; rank_000.pid its process; error_000.txt why it failed
  latest -> attempt_01
  checkpoints/  reference/  export/  learning_curve.png
  .lock                held by the job that runs here
"""

from __future__ import annotations

import os
import shutil
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.comm.errors import ConfigError
from headrace.comm.files import disk_errors, write_whole
from headrace.launcher.config import Config, dump, read_yaml
from headrace.launcher.metrics import read_rows
from headrace.train.checkpoint import CheckpointStore

RECORDS = ("metrics.jsonl", "samples.jsonl", "evaluations.jsonl")
"""What the steps of a run leave behind, beside checkpoints."""

INITIAL_MODEL = "initial_model"
"""Folder in the run folder: the model made by `model.tiny`."""

MAY_CHANGE = (
    "run.name",
    "run.dir",
    "run.steps",
    "run.wait_limit_s",
    "run.heartbeat_s",
    "run.silence_limit_s",
    "data.reward_timeout_s",
    "data.reward_retries",
    "data.reward_workers",
    "ranks.",
    "ledger.",
    "rollout.memory_mb",
    "rollout.slots",
    "train.lr",
    "train.micro_batch_tokens",
    "train.activation_checkpointing",
    "weights.",
    "checkpoint.",
    "launch.",
)
"""Keys, and sections ending in a dot, that a resumed run may set anew: they change neither the tasks, nor what the
weights and the optimizer's state mean."""


LOCK = ".lock"
"""See `headrace.launcher.lock`; it holds the process id of the last launcher."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One start of a job, and where its files are."""

    run: Path
    number: int

    @property
    def folder(self) -> Path:
        return self.run / f"attempt_{self.number:02d}"

    @property
    def job_file(self) -> Path:
        return self.folder / "job.yaml"

    @property
    def mpirun_log(self) -> Path:
        return self.folder / "mpirun.log"

    def rank_log(self, rank: int) -> Path:
        return self.folder / f"rank_{rank:03d}.log"


def fresh_config(config: Config) -> Config:
    """The config with a run folder that doesn't exist yet: NAME, else NAME-2, NAME-3, …"""
    folder, number = config.run.folder, 1
    while os.path.lexists(folder):
        number += 1
        folder = config.run.folder.with_name(f"{config.run.folder.name}-{number}")
    if number == 1:
        return config
    changed = {"dir": folder} if config.run.dir is not None else {"name": f"{config.run.name}-{number}"}
    return config.model_copy(update={"run": config.run.model_copy(update=changed)})


def claim_fresh(config: Config) -> Config:
    """`fresh_config` with the folder made: of several that begin at one moment, each gets another."""
    chosen = fresh_config(config)
    while not _make(chosen.run.folder):
        chosen = fresh_config(config)
    return chosen


def claim(run: Path) -> None:
    """Make the folder of `fresh_config`.

    Raises:
        ConfigError: another process has made it meanwhile.
    """
    if not _make(run):
        raise ConfigError(f"Another run has just begun in {run}, which was free before. Submit this one once more.")


def _make(run: Path) -> bool:
    """False if something is there already."""
    with writing(run):
        run.parent.mkdir(parents=True, exist_ok=True)
        try:
            run.mkdir()
        except FileExistsError:
            return False
    return True


def check_new(config: Config) -> None:
    """
    Raises:
        ConfigError: the run folder is in use.
    """
    folder = config.run.folder
    if folder.exists() and not (folder.is_dir() and (_is_empty(folder) or is_barren(folder))):
        raise ConfigError(
            f"The run folder {folder} exists already. Add --resume to go on with that run, --fresh to start a new one "
            f"beside it ({fresh_config(config).run.folder}), or choose another name by run.name=NAME."
        )


def _is_empty(folder: Path) -> bool:
    return all(path.name == LOCK for path in folder.iterdir())


def is_barren(run: Path) -> bool:
    """Whether it is the folder of a run that never finished an optimizer step: another one may begin there."""
    return (run / "config.yaml").is_file() and not read_rows(run / "metrics.jsonl") and not checkpoints(run)


def has_begun(run: Path) -> bool:
    """Whether there is something to resume."""
    return (run / "config.yaml").is_file() and not is_barren(run)


def check_resume(config: Config) -> list[str]:
    """The changes, as `key old → new`, with which the run in the config's folder is to go on.

    Raises:
        ConfigError: there is no such run, a key changed that a run can't change on its way (after its first step), or
            the run is past `run.steps` already.
    """
    folder = config.run.folder
    if not (folder / "config.yaml").is_file():
        raise ConfigError(f"--resume: there is no run in {folder}. Leave --resume out to start it, or check run.name.")
    old, new = flatten(read_yaml(folder / "config.yaml")), flatten(config.model_dump(mode="json"))
    changed = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    changes = {key: f"{key} {old.get(key)} → {new.get(key)}" for key in changed}
    refused = [text for key, text in changes.items() if not key.startswith(MAY_CHANGE)]
    if refused and not is_barren(folder):
        raise ConfigError(
            f"--resume: the run in {folder} was started with other values: {'; '.join(refused)}. Set them back to go "
            "on with it, or start a new run by --fresh."
        )
    if config.run.steps < (done := steps_done(folder)):
        raise ConfigError(
            f"--resume: run.steps={config.run.steps}, but the run in {folder} has a checkpoint of step {done} already: "
            f"a run doesn't go back. Set run.steps to {done} or more to go on with it, or start a new run by --fresh."
        )
    return list(changes.values())


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """The leaves of nested mappings by dotted path; an empty mapping is a leaf."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        leaves |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {prefix + key: value}
    return leaves


def checkpoints(run: Path) -> dict[int, Path]:
    """The whole checkpoints of a run by step, oldest first."""
    store = CheckpointStore(run / "checkpoints", keep=1)
    return {step: store.path(step) for step in store.steps()}


def damaged_checkpoints(run: Path) -> list[Path]:
    """The folders of checkpoints that aren't whole, apart from those that a job was writing when it ended."""
    return CheckpointStore(run / "checkpoints", keep=1).damaged()


def steps_done(run: Path) -> int:
    """The step of the newest whole checkpoint, from which a resumed run goes on; 0 if there is none."""
    return max(checkpoints(run), default=0)


def begin_attempt(config: Config) -> Attempt:
    """Make the folders of the next attempt, with the config in them, and point `latest` there.

    Raises:
        HeadraceError: the folder can't be written, for instance since the disk is full.
    """
    run = config.run.folder
    with writing(run):
        run.mkdir(parents=True, exist_ok=True)
        attempt = Attempt(run, 1 + max(_attempt_numbers(run), default=0))
        attempt.folder.mkdir()
        write_whole(run / "config.yaml", dump(config).encode())
        _point(run / "latest", attempt.folder.name)
    return attempt


def write_job(attempt: Attempt, config: Config) -> None:
    """Write what the ranks read."""
    with writing(attempt.run):
        write_whole(attempt.job_file, dump(config.job()).encode())


def begin_again(attempt: Attempt) -> None:
    """Begin a run again from its first step: the records of the attempt before move into its folder, the model that it
    made goes, since the config may have changed."""
    before = Attempt(attempt.run, attempt.number - 1)
    with writing(attempt.run):
        for record in filter(Path.exists, (attempt.run / name for name in RECORDS)):
            record.rename(before.folder / record.name)
        shutil.rmtree(attempt.run / INITIAL_MODEL, ignore_errors=True)


def writing(run: Path) -> AbstractContextManager[None]:
    """Turn a failure to write into one paragraph."""
    remedy = "Free some space or mend the permissions there, or put the run elsewhere by run.dir=FOLDER."
    return disk_errors(f"The run folder {run}", run, remedy)


def _attempt_numbers(run: Path) -> list[int]:
    return [int(folder.name.removeprefix("attempt_")) for folder in run.glob("attempt_*[0-9]")]


def write_text(run: Path, name: str, text: str) -> None:
    """Write a file into a run folder, which is made if it isn't there."""
    with writing(run):
        run.mkdir(parents=True, exist_ok=True)
        write_whole(run / name, text.encode())


def _point(link: Path, target: str) -> None:
    partial = link.with_name(f".{link.name}.new")
    partial.unlink(missing_ok=True)
    partial.symlink_to(target)
    os.replace(partial, link)
