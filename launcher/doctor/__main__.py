"""The doctor's ranks; started by `headrace doctor`, or by hand:

    mpirun -n 4 python -m headrace.launcher.doctor --ranks 4
    srun --mpi=pmix python -m headrace.launcher.doctor --ranks 8

Every rank runs the same checks in the same order. Rank 0 prints the table, or writes the report that
`headrace doctor` reads.
"""

from __future__ import annotations

import argparse
import faulthandler
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from headrace.comm.errors import HeadraceError
from headrace.comm.last_words import wait_until_read
from headrace.comm.mpi import check_world
from headrace.launcher.doctor import hosts, network
from headrace.launcher.doctor.findings import Finding, fail, failed, guarded, ok, show
from headrace.launcher.doctor.hosts import Facts, by_host
from headrace.launcher.doctor.network import Pair
from headrace.launcher.doctor.report import Report
from headrace.launcher.doctor.shared import judge_shared, measure_shared
from headrace.launcher.doctor.talk import LostError, Talk

if TYPE_CHECKING:
    from mpi4py import MPI
    from torch._C._distributed_c10d import TCPStore

STAGE_LIMIT_S = 30.0
START_LIMIT_S = 120.0
"""Of MPI's own start, which waits for the ranks on all hosts."""

CHECK_LIMIT = 5.0
"""Stage limits that one check may take."""

LEAVE_LIMIT_S = 60.0
LOST_REMEDY = "Look at the hosts of these ranks; the role map of a run, or `srun -l hostname`, names them."


@dataclass
class World:
    """What the checks of this rank share."""

    talk: Talk
    folder: Path
    facts: list[Facts] = field(default_factory=list)
    pairs: list[Pair] = field(default_factory=list)
    store: TCPStore | None = None

    @property
    def leaders(self) -> dict[str, int]:
        """The first rank of every host."""
        return {host: ranks[0] for host, ranks in by_host(self.facts).items()}

    @property
    def ends(self) -> dict[str, int]:
        return network.ends_of(self.leaders, self.talk.size)

    @property
    def compare(self) -> bool:
        """Whether ends that are slower than others are worth a word."""
        return len(self.leaders) > 1


def check_talk(world: World) -> Finding:
    """The first stage: everybody is there, and the messages that the couriers rely on come through."""
    world.facts = world.talk.stage("tell about themselves", Facts, hosts.look)
    return ok("world", f"{world.talk.size} ranks in one world; matched probes deliver their messages")


def check_reach(world: World) -> Finding:
    named = {host: world.facts[rank].addresses for host, rank in world.leaders.items()}
    listed = {host: list(addresses.values()) for host, addresses in named.items()}
    return network.judge_reach(named, network.measure_reach(world.talk, listed, world.leaders))


def check_store(world: World) -> Finding:
    """The rendezvous of process groups, as every job does it."""
    from headrace.comm.groups import share_store

    names = [one.host for one in world.facts]

    def part() -> None:
        world.store = share_store(world.talk.comm, names, world.talk.limit_s)

    world.talk.stage("meet at a store", type(None), part)
    assert world.store is not None
    return network.judge_store(names, world.store.host, world.store.port)


def check_collective(world: World) -> Finding:
    """One all-reduce over all ranks, on their devices."""
    import torch

    from headrace.comm.devices import detect
    from headrace.comm.groups import make_group

    talk, device, store = world.talk, detect(), world.store
    if store is None:
        return fail("collective", "not tried, since the ranks couldn't meet")
    mine = world.facts[talk.rank]
    local = by_host(world.facts)[mine.host].index(talk.rank) % max(1, mine.devices)

    def part() -> float:
        device.set_in_thread(local)
        group = make_group(device.backend, store, "doctor", range(talk.size), talk.rank, talk.limit_s)
        tensor = torch.full((1024,), float(talk.rank + 1), device=device.torch_device(local))
        group.handle.allreduce([tensor]).wait()
        return float(tensor.mean())

    sums = talk.stage(f"all-reduce by {device.backend}", float, part)
    expected = talk.size * (talk.size + 1) / 2
    if set(sums) != {expected}:
        return fail("collective", f"an all-reduce by {device.backend} gave {sorted(set(sums))} instead of {expected}")
    return ok("collective", f"an all-reduce by {device.backend} over all ranks is right")


def check_pairs(world: World) -> Finding:
    world.pairs = network.measure_pairs(world.talk, world.ends)
    return network.judge_pairs(world.pairs, world.compare)


def check_broadcasts(world: World) -> Finding:
    return network.judge_broadcasts(network.measure_broadcasts(world.talk, world.ends), world.compare)


def check_clocks(world: World) -> Finding:
    return network.judge_clocks(network.measure_clocks(world.talk, world.leaders))


def check_shared(world: World) -> Finding:
    return judge_shared(world.folder, measure_shared(world.talk, world.folder, world.leaders))


def of_facts(judge: Callable[[Sequence[Facts]], Finding]) -> Callable[[World], Finding]:
    return lambda world: judge(world.facts)


CHECKS: dict[str, Callable[[World], Finding]] = {
    "hosts": of_facts(hosts.judge_hosts),
    "same software": of_facts(hosts.judge_versions),
    "MPI threads": of_facts(hosts.judge_thread_level),
    "CPUs": of_facts(hosts.judge_cpus),
    "devices": of_facts(hosts.judge_devices),
    "shared memory": of_facts(hosts.judge_memory),
    "open files": of_facts(hosts.judge_open_files),
    "host names": of_facts(hosts.judge_host_names),
    "caches": of_facts(hosts.judge_cache_folders),
    "run folder": check_shared,
    "clocks": check_clocks,
    "interfaces": check_reach,
    "rendezvous": check_store,
    "collective": check_collective,
    "point-to-point": check_pairs,
    "broadcast": check_broadcasts,
}


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    _end_after(START_LIMIT_S)
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    world = World(Talk(comm, options.limit), options.folder)
    try:
        check_world(comm, options.ranks)
    except HeadraceError as error:
        _publish([fail("world", str(error))], world, options.report)
        sys.exit(1)
    findings: list[Finding] = []
    try:
        findings.append(check_talk(world))
        for name, check in CHECKS.items():
            _end_after(CHECK_LIMIT * options.limit)
            findings.append(guarded(name, partial(check, world), beyond=(LostError,)))
    except HeadraceError as error:
        findings.append(fail("world", str(error), LOST_REMEDY))
        _publish(findings, world, options.report)
        _abort(comm)
    except Exception:
        traceback.print_exc()
        _abort(comm)
    _publish(findings, world, options.report)
    _end_after(LEAVE_LIMIT_S)
    MPI.Finalize()  # here, since the interpreter's own end would call it without a limit
    sys.exit(1 if failed(findings) and comm.Get_rank() == 0 and options.report is None else 0)


def _end_after(limit_s: float) -> None:
    """End this process, with its stacks on stderr, unless it is called again within the limit: MPI may hang in calls
    that have none, and holds the interpreter's lock there, so that no thread of ours could."""
    faulthandler.dump_traceback_later(limit_s, exit=True)


def _publish(findings: Sequence[Finding], world: World, file: Path | None) -> None:
    """Rank 0 tells; so does every rank of a world of one, each the same."""
    if world.talk.rank != 0:
        return
    if file is not None:
        Report(list(findings), world.facts, world.pairs).write(file)
        return
    from rich.console import Console

    show(findings, Console())


def _abort(comm: MPI.Comm) -> NoReturn:
    wait_until_read((sys.stdout, sys.stderr))
    comm.Abort(1)
    sys.exit(1)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m headrace.launcher.doctor")
    parser.add_argument("--ranks", type=int, help="how many were started")
    parser.add_argument("--folder", type=Path, default=Path("runs"), help="where run folders are made")
    parser.add_argument("--report", type=Path, help="write a report there instead of printing a table")
    parser.add_argument("--limit", type=float, default=STAGE_LIMIT_S, help="of one stage, in seconds")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
