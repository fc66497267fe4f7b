"""The device of this rank. No other file names a vendor.

torch_npu importable and a device there → npu, hccl
a CUDA device there                     → cuda, nccl
otherwise                               → cpu, gloo
"""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d


@dataclass(frozen=True, slots=True)
class Device:
    """A kind of device, with the torch backend for collectives on it."""

    kind: str
    """`cpu`, `cuda` or `npu`: the type in a `torch.device`."""
    backend: str
    """`gloo`, `nccl` or `hccl`."""

    def torch_device(self, local_index: int = 0) -> torch.device:
        """The `local_index`-th of the devices that this rank may see."""
        return torch.device(self.kind) if self.kind == "cpu" else torch.device(self.kind, local_index)

    def set_in_thread(self, local_index: int = 0) -> None:
        """Make it the device of the calling thread. Every thread that touches the device has to, HCCL insists."""
        torch.get_device_module(self.kind).set_device(self.torch_device(local_index))

    def synchronize(self) -> None:
        """Wait until the device has done what this thread gave it."""
        torch.get_device_module(self.kind).synchronize()

    def memory(self, local_index: int = 0) -> tuple[int, int]:
        """Free and total memory, in bytes; of the host for a CPU."""
        if self.kind == "cpu":
            page = os.sysconf("SC_PAGE_SIZE")
            return os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page
        free, total = torch.get_device_module(self.kind).mem_get_info(self.torch_device(local_index))
        return int(free), int(total)


CPU = Device("cpu", "gloo")
CUDA = Device("cuda", "nccl")
NPU = Device("npu", "hccl")


def detect() -> Device:
    """The best device that this process can use."""
    if _has_npu():
        return NPU
    return CUDA if torch.cuda.is_available() else CPU


def _has_npu() -> bool:
    try:
        torch_npu = importlib.import_module("torch_npu")
    except ModuleNotFoundError:
        return False
    return bool(torch_npu.npu.is_available())


def new_process_group(backend: str, store: c10d.Store, rank: int, size: int, timeout: timedelta, address: str) -> Any:
    """A process group beside whatever default group there is. Call its methods: `torch.distributed`'s refuse it.

    Args:
        backend: one of a `Device`.
        store: used by nothing else (a `PrefixStore`).
        rank: in the group.
        address: of this rank, as its peers reach it; only gloo needs it, the others choose their interfaces.
    """
    if backend == "gloo":
        return _gloo(store, rank, size, timeout, address)
    if backend == "nccl":
        return _nccl(store, rank, size, timeout)
    return _plugin(backend, store, rank, size, timeout)


def _gloo(store: c10d.Store, rank: int, size: int, timeout: timedelta, address: str) -> Any:
    # With a device of our own gloo looks no host name up: the machine's own name may not resolve.
    group: Any = dist.ProcessGroupGloo
    options = group._Options()
    options._timeout = timeout
    options._devices = [group.create_device(hostname=address)]
    return group(store, rank, size, options)


def _nccl(store: c10d.Store, rank: int, size: int, timeout: timedelta) -> Any:
    group: Any = dist.ProcessGroupNCCL
    options = group.Options()
    options._timeout = timeout
    return group(store, rank, size, options)


def _plugin(backend: str, store: c10d.Store, rank: int, size: int, timeout: timedelta) -> Any:
    """A backend that another package has registered with torch, as torch_npu does with hccl."""
    options: Any = c10d._DistributedBackendOptions()
    options.store, options.group_rank, options.group_size, options.timeout = store, rank, size, timeout
    options.group_id, options.global_ranks_in_group = backend, []
    return dist.Backend._plugins[backend.upper()].creator_fn(options, None)
