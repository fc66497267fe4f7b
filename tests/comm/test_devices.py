"""Which device is chosen, by doubles of the vendors' modules; and groups of a backend that another package brings."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from headrace.comm.devices import CPU, CUDA, NPU, detect, new_process_group


@pytest.fixture
def vendors(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets which devices there are: `vendors(npu=None)` means that torch_npu isn't installed."""

    def install(npu: bool | None, cuda: bool) -> None:
        module = None if npu is None else SimpleNamespace(npu=SimpleNamespace(is_available=lambda: npu))
        monkeypatch.setitem(sys.modules, "torch_npu", module)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)

    return install


@pytest.mark.parametrize(
    ("npu", "cuda", "expected"),
    [
        (None, False, CPU),
        (False, False, CPU),
        (None, True, CUDA),
        (False, True, CUDA),
        (True, False, NPU),
        (True, True, NPU),
    ],
)
def test_the_best_device_that_is_there_is_chosen(vendors: Any, npu: bool | None, cuda: bool, expected: object) -> None:
    vendors(npu=npu, cuda=cuda)
    assert detect() == expected


def test_backends_go_with_devices() -> None:
    assert [(d.kind, d.backend) for d in (CPU, CUDA, NPU)] == [("cpu", "gloo"), ("cuda", "nccl"), ("npu", "hccl")]


def test_the_cpu_has_one_device_and_the_memory_of_the_host() -> None:
    assert CPU.torch_device(3) == torch.device("cpu")
    assert CUDA.torch_device(3) == torch.device("cuda:3")
    CPU.set_in_thread()
    CPU.synchronize()
    free, total = CPU.memory()
    assert 0 < free < total


def test_an_accelerator_is_set_synchronized_and_measured_through_its_own_module(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[object] = []
    module = SimpleNamespace(
        set_device=calls.append, synchronize=lambda: calls.append("wait"), mem_get_info=lambda device: (5, 7)
    )
    monkeypatch.setattr(torch, "get_device_module", {"cuda": module}.__getitem__)
    CUDA.set_in_thread(2)
    CUDA.synchronize()
    assert calls == [torch.device("cuda:2"), "wait"]
    assert CUDA.memory(2) == (5, 7)


@pytest.fixture
def plugin() -> Iterator[list[Any]]:
    """Registers a backend as torch_npu does; what it was asked to make ends up in the list."""
    asked: list[Any] = []
    dist.Backend.register_backend(
        "lookalike", lambda options, extra: asked.append(options) or "group", extended_api=True, devices=["cpu"]
    )
    yield asked
    del dist.Backend._plugins["LOOKALIKE"]
    dist.Backend.backend_list.remove("lookalike")


def test_a_registered_backend_is_made_with_rank_size_store_and_time_out(plugin: list[Any]) -> None:
    group = new_process_group("lookalike", HashStore(), 2, 5, timedelta(seconds=9), "127.0.0.1")
    assert group == "group"
    (options,) = plugin
    assert (options.group_rank, options.group_size, options.timeout) == (2, 5, timedelta(seconds=9))
