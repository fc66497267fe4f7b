"""The nodes of the Slurm job in which the launcher runs: their names, and which of them still answer."""

from __future__ import annotations

import contextlib
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from headrace.comm.errors import ConfigError, HeadraceError
from headrace.launcher.queue import ask, tell

KEPT = ("SLURM_CONF", "SLURM_JOB_ID", "SLURM_JOBID", "SLURM_CLUSTER_NAME", "SLURM_WORKING_CLUSTER")
"""All that srun needs to find its job. Any other SLURM_* variable would be an option for it, perhaps of another job."""

PROBE_S = 15.0
"""Longest time in which a node starts a process, or it is taken for lost."""

ELEMENT = re.compile(r"[^,\[]+(?:\[[^\]]*\][^,\[]*)*")
"""One element of a node list: commas within brackets belong to it."""

BRACKET = re.compile(r"\[([^\]]*)\]")


@dataclass(frozen=True, slots=True)
class Allocation:
    """What Slurm has given to this job."""

    job: int
    nodes: tuple[str, ...]
    here: str | None
    """The node that the launcher runs on; None on a login node."""
    environ: Mapping[str, str]
    """The variables of `KEPT`."""

    def answering(self) -> tuple[str, ...]:
        """The nodes that start a process within `PROBE_S`, asked all at once.

        Slurm itself takes minutes to call a silent node down (`SlurmdTimeout`)."""
        probes = {node: self._probe(node) for node in self.nodes}
        return tuple(node for node, probe in probes.items() if _answers(probe))

    def _probe(self, node: str) -> subprocess.Popen[bytes]:
        command = ["srun", f"--jobid={self.job}", "--overlap", "--mem=0", "--mpi=none", "--ntasks=1", "--nodes=1"]
        return subprocess.Popen(
            [*command, f"--nodelist={node}", "--immediate=5", "true"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def devices(self, gres: str) -> dict[str, str]:
        """The devices of a kind that this job has, `0-3,7` by node; only where the site's gres.conf gives them files.

        Raises:
            HeadraceError: Slurm doesn't answer.
        """
        code, text, error = ask(["scontrol", "show", "job", "--details", str(self.job)])
        if code:
            raise HeadraceError(f"`scontrol show job {self.job}` failed: {error}.")
        return dict(parse_devices(text, gres))

    def end_steps(self, name: str) -> None:
        """End the steps of this job that have this name, with all their processes on all nodes."""
        with contextlib.suppress(HeadraceError):  # Slurm doesn't answer: then it will end the steps with the job
            _, text, _ = ask(["squeue", "--noheader", "--steps", f"--jobs={self.job}", "--format=%i|%j"])
            for line in text.splitlines():
                step, _, called = line.strip().partition("|")
                if called == name:
                    tell(["scancel", "--signal=KILL", step])


def _answers(probe: subprocess.Popen[bytes]) -> bool:
    try:
        return probe.wait(PROBE_S) == 0
    except subprocess.TimeoutExpired:
        probe.kill()
        probe.wait()
        return False


def find_allocation(environ: Mapping[str, str]) -> Allocation:
    """The job that this process belongs to.

    Raises:
        ConfigError: it runs in none.
    """
    job, nodes = environ.get("SLURM_JOB_ID", ""), environ.get("SLURM_JOB_NODELIST", "")
    if not job.isdigit() or not nodes:
        raise ConfigError(
            "launch.starter: srun and mpirun start the ranks on the nodes of a Slurm job, and this isn't one "
            "(SLURM_JOB_ID and SLURM_JOB_NODELIST aren't set). Send the run by `headrace submit`, run it in a script "
            "for sbatch or after salloc, or use launch.starter=here for the ranks to run on this machine."
        )
    kept = {name: environ[name] for name in KEPT if name in environ}
    return Allocation(int(job), tuple(expand(nodes)), environ.get("SLURMD_NODENAME"), kept)


def parse_devices(text: str, gres: str) -> Iterator[tuple[str, str]]:
    """Node and devices from the lines of `scontrol show job --details`."""
    kind = re.compile(rf"\b{re.escape(gres)}(?::[^(,]*)?\(IDX:([\d,-]+)\)")
    for line in text.splitlines():
        nodes = re.match(r"\s+Nodes=(\S+) CPU_IDs=", line)
        found = kind.search(line)
        if nodes and found:
            yield from ((node, found[1]) for node in expand(nodes[1]))


def expand(nodes: str) -> Iterator[str]:
    """`node[01-03,7],login` → node01, node02, node03, node7, login; `scontrol` isn't there in every container."""
    for element in ELEMENT.findall(nodes):
        yield from _expand_one(element)


def _expand_one(element: str) -> Iterator[str]:
    bracket = BRACKET.search(element)
    if bracket is None:
        yield element
        return
    for number in _numbers(bracket[1]):
        yield from _expand_one(element[: bracket.start()] + number + element[bracket.end() :])


def _numbers(ranges: str) -> Iterator[str]:
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        yield from (f"{number:0{len(first)}d}" for number in range(int(first), int(last or first) + 1))


def ranks_per_node(ranks: int, nodes: int) -> list[int]:
    """How many ranks each node gets: all the same number, the first ones one more if it doesn't divide."""
    each, more = divmod(ranks, nodes)
    return [each + (node < more) for node in range(min(ranks, nodes))]


def place(ranks: int, nodes: Sequence[str]) -> list[str]:
    """The node of every rank, as both starters place them: one node filled after the other."""
    counts = ranks_per_node(ranks, len(nodes))
    return [node for node, count in zip(nodes, counts, strict=False) for _ in range(count)]
