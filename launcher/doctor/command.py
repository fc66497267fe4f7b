"""`headrace doctor`: all checks, a table or JSON, and a status."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec
from rich.console import Console

from headrace.comm.errors import ConfigError, HeadraceError
from headrace.launcher.config import Config, LaunchConfig, apply_override, read_yaml, validate
from headrace.launcher.doctor import disk, inputs, machine, slurm
from headrace.launcher.doctor.findings import Check, Finding, examine, fail, failed, show
from headrace.launcher.doctor.report import Report
from headrace.launcher.doctor.world import Order, in_a_job, on_this_machine
from headrace.launcher.environment import clean
from headrace.launcher.mpi import MpiInstallation, choose_mpi
from headrace.launcher.profile import Profile

CHECK_LIMIT_S = 60.0
WORLD_LIMIT_S = 300.0
SMALL_WORLD = 4
"""Ranks on this machine at the most, unless -n asks for more."""

QUEUE_LIMIT_S = 1800.0


@dataclass
class Patient:
    """What is examined."""

    profile: Profile
    config: Config | None
    installation: MpiInstallation | None
    findings: list[Finding] = field(default_factory=list)

    @property
    def launch(self) -> LaunchConfig:
        return self.config.launch if self.config else LaunchConfig.model_validate(self.profile.launch())

    @property
    def folder(self) -> Path:
        return self.config.run.folder if self.config else Path("runs")

    def examine(self, name: str, check: Check, limit_s: float = CHECK_LIMIT_S) -> None:
        self.findings.append(examine(name, check, limit_s))


def doctor(
    file: Path | None, overrides: Sequence[str], profile: Profile, ranks: int | None, nodes: int | None, as_json: bool
) -> int:
    """Examine this machine and a world of ranks; returns 1 if anything fails, else 0.

    Args:
        file: config of the job that is to run here; none examines what every job needs.
        profile: of the cluster.
        ranks: of the world.
        nodes: examine so many nodes, in a job of Slurm.
    """
    patient = _admit(file, overrides, profile)
    _say("checking this machine")
    _check_machine(patient)
    report = _check_world(patient, ranks, nodes)
    report = Report([*patient.findings, *report.findings], report.facts, report.pairs)
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(report)).decode())
    else:
        show(report.findings, Console())
    return 1 if failed(report.findings) else 0


def _say(text: str) -> None:
    """Beside the result, which is on stdout."""
    print(text, file=sys.stderr, flush=True)


def _admit(file: Path | None, overrides: Sequence[str], profile: Profile) -> Patient:
    """Read the config and choose the MPI; what is wrong with them is found, not raised."""
    patient = Patient(profile, None, None)
    if file is not None:
        try:
            patient.config = _load(file, overrides, profile)
            patient.findings.append(inputs.check_config(patient.config, str(file)))
        except ConfigError as error:
            patient.findings.append(fail("config", str(error)))
    try:
        patient.installation = choose_mpi(patient.launch.mpi, clean(os.environ))
        patient.findings.append(machine.check_mpi(patient.installation, patient.launch.mpi))
    except ConfigError as error:
        patient.findings.append(fail("MPI", str(error)))
    return patient


def _load(file: Path, overrides: Sequence[str], profile: Profile) -> Config:
    """The config as `headrace submit` would take it."""
    tree = read_yaml(file)
    for override in overrides:
        apply_override(tree, override)
    tree["launch"] = profile.launch(tree.get("launch"))
    return validate(tree, str(file))


def _check_machine(patient: Patient) -> None:
    config, folder = patient.config, patient.folder
    patient.examine("versions", machine.check_versions)
    patient.examine("environment", partial(machine.check_environment, os.environ))
    patient.examine("host name", machine.check_host_name)
    if config is not None:
        patient.examine("model", partial(inputs.check_model, config))
        patient.examine("data", partial(inputs.check_data, config), config.run.wait_limit_s + CHECK_LIMIT_S)
    patient.examine("free space", partial(disk.check_space, folder, config))
    patient.examine("file system", partial(disk.check_file_system, folder))
    patient.examine("locks", partial(disk.check_locks, folder))
    patient.examine("clock", partial(disk.check_clock, folder))
    if slurm.has_srun():
        patient.examine("requeue", partial(slurm.examine_slurm, "requeue", slurm.check_requeue))
        if patient.installation is not None:
            check_pmi = partial(slurm.check_pmi, patient.installation)
            patient.examine("PMI", partial(slurm.examine_slurm, "PMI", check_pmi))


def _check_world(patient: Patient, ranks: int | None, nodes: int | None) -> Report:
    if patient.installation is None:
        return Report([fail("world", "not tried, for want of an MPI")])
    if nodes is not None and not slurm.has_srun():
        return Report(
            [fail("world", f"--nodes {nodes} needs Slurm, but there is no srun on PATH", "Leave --nodes out.")]
        )
    order = _order(patient, patient.installation, _ranks(patient.config, ranks, nodes), nodes)
    start: Callable[[], Report] = (
        partial(on_this_machine, order) if nodes is None else partial(in_a_job, order, nodes, patient.profile, _say)
    )
    _say(f"starting {order.ranks} ranks {'by mpirun here' if nodes is None else f'on {nodes} nodes'}")
    try:
        return start()
    except HeadraceError as error:
        return Report([fail("world", str(error))])


def _ranks(config: Config | None, ranks: int | None, nodes: int | None) -> int:
    """As many as were asked for, or as the job has, but only a few of them on this machine."""
    if ranks is not None:
        return ranks
    wanted = config.ranks.trainers + config.ranks.generators if config else 2
    return max(wanted, nodes) if nodes is not None else min(wanted, SMALL_WORLD)


def _order(patient: Patient, installation: MpiInstallation, ranks: int, nodes: int | None) -> Order:
    threads = patient.config.ranks.threads if patient.config else 1
    return Order(
        installation=installation,
        ranks=ranks,
        threads=threads or max(1, len(os.sched_getaffinity(0)) * (nodes or 1) // ranks),
        launch=patient.launch,
        folder=patient.folder.parent,
        limit_s=WORLD_LIMIT_S if nodes is None else QUEUE_LIMIT_S,
    )
