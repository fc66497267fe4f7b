"""Starts the doctor's ranks and gets their report: by mpirun on this machine, or in a job of Slurm.

on_this_machine   mpirun ──▶ ranks ── report.json
in_a_job          doctor.sh ── submit ──▶ queue ──▶ srun ──▶ ranks ── report.json
                  inside an allocation that is large enough srun starts them at once
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from headrace.launcher.config import LaunchConfig
from headrace.launcher.doctor.disk import existing
from headrace.launcher.doctor.findings import fail
from headrace.launcher.doctor.report import Report, read_report
from headrace.launcher.doctor.slurm import job_script, offered_types, pmi_of, sbatch, scancel, start_line
from headrace.launcher.environment import clean, rank_environment
from headrace.launcher.mpi import MpiInstallation
from headrace.launcher.processes import kill_job
from headrace.launcher.profile import Profile
from headrace.launcher.queue import queued

PROGRAM = ("-m", "headrace.launcher.doctor")
LOG = "doctor.log"
LAST_LINES = 8
STUCK = "Timeout ("
"""What a rank writes that ends itself at its limit."""

SILENT_REMEDY = (
    "These are MPI's own words: look for a host that it can't reach, or a launcher that isn't of its library."
)
POLL_S = 2.0

Submit = Callable[[Path], int]
"""Submits a job script; returns the number of the job."""


@dataclass(frozen=True, slots=True)
class Order:
    """Which ranks are wanted."""

    installation: MpiInstallation
    ranks: int
    threads: int
    """Compute threads of each."""
    launch: LaunchConfig
    folder: Path
    """Where run folders are made."""
    limit_s: float
    """Of the whole world, in seconds."""

    def program(self, report: Path) -> list[str]:
        return [
            *(*self.launch.wrap, self.launch.starting_python, *PROGRAM, "--ranks", str(self.ranks)),
            *("--folder", str(self.folder.absolute()), "--report", str(report)),
        ]

    def environment(self, job: str, environ: Mapping[str, str]) -> dict[str, str]:
        return rank_environment(environ, self.threads, job) | {**self.installation.environment, **self.launch.env}


def on_this_machine(order: Order) -> Report:
    """Start the ranks here by mpirun."""
    with tempfile.TemporaryDirectory(prefix="headrace-doctor-") as work:
        report = Path(work) / "report.json"
        command = [*order.installation.command(order.ranks), *order.program(report)]
        return _run(command, order, report, clean(os.environ))


def in_a_job(order: Order, nodes: int, profile: Profile, say: Callable[[str], None], submit: Submit = sbatch) -> Report:
    """Start the ranks on so many nodes: in the allocation of this shell if it has them, else in a job of their own.

    Args:
        say: told what is waited for.

    Raises:
        HeadraceError: Slurm refused.
    """
    with _job_folder(order.folder) as work:
        report = work / "report.json"
        pmi = order.launch.pmi or pmi_of(order.installation.family, offered_types())
        start = start_line(order.installation, order.launch, pmi, order.ranks, order.program(report))
        if int(os.environ.get("SLURM_NNODES", 0)) >= nodes:
            return _run(start, order, report, os.environ)
        script = work / "doctor.sh"
        environment = order.environment("doctor", {})
        script.write_text(job_script(start, nodes, order.ranks, work / LOG, environment, profile))
        return _wait(submit(script), order, report, say)


@contextmanager
def _job_folder(folder: Path) -> Iterator[Path]:
    """A new folder that all nodes see, beside the run folders; it stays if a job left only its log there."""
    work = Path(tempfile.mkdtemp(prefix=".doctor-", dir=existing(folder)))
    try:
        yield work
    finally:
        if (work / "report.json").exists() or not (work / LOG).exists():
            shutil.rmtree(work)


def _run(command: Sequence[str], order: Order, report: Path, environ: Mapping[str, str]) -> Report:
    """Run a command that starts the ranks, to its end or its limit; afterwards no process is left."""
    job = uuid.uuid4().hex
    environment = {**environ, **order.environment(job, {})}
    pipe, errors = subprocess.PIPE, subprocess.STDOUT
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=pipe,
        stderr=errors,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=order.limit_s)
    except subprocess.TimeoutExpired:
        return _silent(f"the ranks haven't ended within {order.limit_s:.0f} s", "")
    finally:
        process.send_signal(signal.SIGTERM)
        kill_job(job)
        process.kill()
    return _report(report, f"the ranks ended with status {process.returncode} and left no report", output)


def _wait(job: int, order: Order, report: Path, say: Callable[[str], None]) -> Report:
    """Wait for the report of a job; it is cancelled at the limit, and if the wait is interrupted."""
    say(f"job {job} is submitted; waiting for its report, {order.limit_s:.0f} s at the most")
    end, state = time.monotonic() + order.limit_s, "unknown"
    try:
        while time.monotonic() < end and not report.exists():
            found = queued([job])
            if job not in found:
                break
            state = f"{found[job].state} ({found[job].reason})"
            time.sleep(POLL_S)
        else:
            if not report.exists():
                return _silent(f"job {job} is still {state} after {order.limit_s:.0f} s", "")
    finally:
        if queued([job]) and not report.exists():
            scancel(job)
    log = report.with_name(LOG)
    output = log.read_text(errors="replace") if log.exists() else ""
    return _report(report, f"job {job} ended and left no report; its files are in {report.parent}", output)


def _report(file: Path, complaint: str, output: str) -> Report:
    return read_report(file) if file.exists() else _silent(complaint, output)


def _silent(complaint: str, output: str) -> Report:
    """Ranks that couldn't tell anything: their last lines do."""
    lines = [line for line in output.splitlines() if line.strip()][-LAST_LINES:]
    if any(line.startswith(STUCK) for line in output.splitlines()):
        complaint += "; a rank was stuck in a call of MPI"
    return Report([fail("world", "\n".join([complaint, *lines]), SILENT_REMEDY)])
