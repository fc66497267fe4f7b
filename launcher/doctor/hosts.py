"""What each rank says about itself and its host, and what follows from all of it together.

`look` runs on every rank; the other functions are pure and get the facts of all ranks.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import socket
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from headrace.launcher.doctor.disk import cache_folders, file_system, judge_caches
from headrace.launcher.doctor.findings import Finding, fail, ok, warn, worst

THREAD_LEVELS = ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")
SERIALIZED = 2
ALIKE = ("headrace", "torch", "numpy", "mpi4py", "transformers", "msgspec")
SHARED_MEMORY_BYTES = 1 << 28
OPEN_FILES = 1024


class Facts(msgspec.Struct, frozen=True):
    """One rank."""

    host: str
    network: str
    """Same for processes that share one loopback interface."""
    cpus: list[int]
    """Those that it may run on."""
    cores: int
    """CPUs of the host."""
    threads: int
    """Compute threads of torch."""
    thread_level: int
    """What MPI gave: 0 to 3."""
    library: str
    """The MPI library that mpi4py loaded."""
    device: str
    devices: int
    """Accelerators that it sees."""
    visible: str
    """What the variable that restricts them says."""
    addresses: dict[str, str]
    """IPv4 address by interface."""
    own_address: str
    """What the host's own name resolves to; empty if it doesn't."""
    versions: dict[str, str]
    shared_memory: int
    """Free bytes of /dev/shm."""
    open_files: int
    """How many a process may have."""
    caches: dict[str, str]
    """File system by cache folder."""


def look() -> Facts:
    """The facts of this rank."""
    import torch
    from mpi4py import MPI

    from headrace.comm.devices import detect
    from headrace.comm.network import interfaces

    device = detect()
    return Facts(
        host=socket.gethostname(),
        network=f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}/{os.readlink('/proc/self/ns/net')}",
        cpus=sorted(os.sched_getaffinity(0)),
        cores=os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        thread_level=MPI.Query_thread(),
        library=" ".join(MPI.Get_library_version().split("\n")[0].split(",")[0].strip("\0").split()),
        device=device.kind,
        devices=0 if device.kind == "cpu" else torch.get_device_module(device.kind).device_count(),
        visible=os.environ.get("ASCEND_RT_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES", "")),
        addresses=interfaces(),
        own_address=_own_address(),
        versions={"python": platform.python_version(), **{name: importlib.metadata.version(name) for name in ALIKE}},
        shared_memory=_free("/dev/shm"),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        caches={str(folder): file_system(folder) for folder in cache_folders(os.environ)},
    )


def _own_address() -> str:
    with suppress(OSError):  # a name that doesn't resolve is a fact, too
        return socket.gethostbyname(socket.gethostname())
    return ""


def _free(folder: str) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize


# Judging


def by_host(facts: Sequence[Facts]) -> dict[str, list[int]]:
    """The ranks of every host."""
    hosts: dict[str, list[int]] = {}
    for rank, one in enumerate(facts):
        hosts.setdefault(one.host, []).append(rank)
    return hosts


def ranges(numbers: Iterable[int]) -> str:
    """[0, 1, 2, 5] → `0-2,5`."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)


def judge_hosts(facts: Sequence[Facts]) -> Finding:
    """Ranks of one host name must share one network: they would meet at its loopback address."""
    hosts = by_host(facts)
    doubled = [host for host, ranks in hosts.items() if len({facts[rank].network for rank in ranks}) > 1]
    if doubled:
        text = f"different machines or containers have the same host name: {', '.join(doubled)}"
        return fail("hosts", text, "Give each its own host name (for containers: use the host's network).")
    return ok("hosts", "; ".join(f"{host}: ranks {ranges(ranks)}" for host, ranks in hosts.items()))


def judge_host_names(facts: Sequence[Facts]) -> Finding:
    """headrace looks no name up, but torch, vLLM and MPI may, for their own connections."""
    hosts = {one.host: one.own_address for one in facts}
    if len(hosts) == 1:
        return ok("host names", "one host: no name is looked up")
    unknown = [host for host, address in hosts.items() if not address]
    loopback = [host for host, address in hosts.items() if address.startswith("127.")]
    remedy = "Mend /etc/hosts or the DNS, or name the interface: launch.env.GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME."
    complaints = [warn("", f"{', '.join(unknown)}: the own name doesn't resolve", remedy)] if unknown else []
    complaints += [warn("", f"{', '.join(loopback)}: the own name is a loopback address", remedy)] if loopback else []
    return worst("host names", complaints, ", ".join(f"{host} is {address}" for host, address in hosts.items()))


def judge_thread_level(facts: Sequence[Facts]) -> Finding:
    level = min(one.thread_level for one in facts)
    if level >= SERIALIZED:
        return ok("MPI threads", f"level {THREAD_LEVELS[level]}")
    remedy = "Unset MPI4PY_RC_THREAD_LEVEL and MPI4PY_RC_THREADS, or use an MPI that was built with threads."
    return fail("MPI threads", f"level {THREAD_LEVELS[level]}, needed: SERIALIZED", remedy)


def judge_versions(facts: Sequence[Facts]) -> Finding:
    """The same software on every rank."""
    remedy = "Start every rank with the same environment, on a file system that all nodes see."
    values = {"MPI library": [one.library for one in facts]}
    values |= {name: [one.versions[name] for one in facts] for name in facts[0].versions}
    complaints = [fail("", f"{name}: {told}", remedy) for name, value in values.items() if (told := _differing(value))]
    return worst("same software", complaints, f"{facts[0].library}, Python {facts[0].versions['python']}")


def _differing(values: Sequence[str]) -> str:
    """Which ranks have which value, if not all have the same."""
    groups: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        groups.setdefault(value, []).append(rank)
    return ", ".join(f"{what} on ranks {ranges(ranks)}" for what, ranks in groups.items()) if len(groups) > 1 else ""


def judge_cpus(facts: Sequence[Facts]) -> Finding:
    """Enough CPUs for the threads of the ranks that share them."""
    complaints, told = [], []
    for host, ranks in by_host(facts).items():
        for mask, sharing in _by_mask(facts, ranks).items():
            threads = sum(facts[rank].threads for rank in sharing)
            who = f"{host}: ranks {ranges(sharing)} on CPUs {ranges(mask)}"
            told.append(f"{who}, threads: {threads}")
            if threads > len(mask):
                complaints.append(_too_few(who, mask, sharing, threads, facts[sharing[0]].cores))
    return worst("CPUs", complaints, "; ".join(told))


def _by_mask(facts: Sequence[Facts], ranks: Sequence[int]) -> dict[tuple[int, ...], list[int]]:
    masks: dict[tuple[int, ...], list[int]] = {}
    for rank in ranks:
        masks.setdefault(tuple(facts[rank].cpus), []).append(rank)
    return masks


def _too_few(who: str, mask: tuple[int, ...], sharing: list[int], threads: int, cores: int) -> Finding:
    text = f"{who} compute with {threads} threads in all"
    if len(mask) == 1 and cores > 1:
        remedy = "Give --cpus-per-task to srun (Slurm ≥ 22.05 doesn't inherit it), or --bind-to none to mpirun."
        return (
            fail("", f"{text}, but are bound to a single one of {cores} CPUs", remedy)
            if len(sharing) > 1
            else warn("", text, remedy)
        )
    return warn("", text, "Start fewer ranks per host, or set ranks.threads or --cpus-per-task.")


def judge_devices(facts: Sequence[Facts]) -> Finding:
    """A device for every rank: its own only one, or the one of its index within the host."""
    kinds = {one.device for one in facts}
    if len(kinds) > 1:
        told = _differing([one.device for one in facts])
        return fail("devices", f"ranks have different kinds of devices: {told}", "Use nodes of one kind.")
    if kinds == {"cpu"}:
        return ok("devices", "no accelerator: all ranks compute on CPUs")
    few = [
        f"{host}: {len(ranks)} ranks see {facts[ranks[0]].devices} devices"
        for host, ranks in by_host(facts).items()
        if not _each_has_one([facts[rank] for rank in ranks])
    ]
    if few:
        return fail(
            "devices", "; ".join(few), "Start as many ranks per host as it has devices, or ask for more (--gres)."
        )
    return ok("devices", f"every rank has one: {facts[0].devices} {facts[0].device} visible on {facts[0].host}")


def _each_has_one(local: Sequence[Facts]) -> bool:
    own = all(one.devices == 1 for one in local) and len({one.visible for one in local}) == len(local)
    return own or all(one.devices >= len(local) for one in local)


def judge_memory(facts: Sequence[Facts]) -> Finding:
    """Shared memory carries the messages between the ranks of a host."""
    least = min(facts, key=lambda one: one.shared_memory)
    text = f"{least.shared_memory / 2**30:.1f} GiB of shared memory free on {least.host}"
    if least.shared_memory < SHARED_MEMORY_BYTES:
        return warn("shared memory", text, "Enlarge /dev/shm (containers: --shm-size), or remove what lies there.")
    return ok("shared memory", text)


def judge_open_files(facts: Sequence[Facts]) -> Finding:
    least = min(facts, key=lambda one: one.open_files)
    text = f"{least.open_files} per process on {least.host}"
    if least.open_files < OPEN_FILES:
        return warn("open files", text, f"Raise the limit to {OPEN_FILES} or more (ulimit -n) before the start.")
    return ok("open files", text)


def judge_cache_folders(facts: Sequence[Facts]) -> Finding:
    """See `disk.judge_caches`; over all nodes."""
    return judge_caches({folder: kind for one in facts for folder, kind in one.caches.items()})
