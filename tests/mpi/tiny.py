"""Jobs of a model so small that a step takes milliseconds, and what tests do to them."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import torch
from jobs import merged, metrics_of
from safetensors.torch import load_file

EXAMPLES = Path(__file__).parents[2] / "examples"
ENVIRONMENT = EXAMPLES / "my_environment.py"


def tiny_config(**sections: dict[str, Any]) -> dict[str, Any]:
    config: dict[str, Any] = {
        "run": {"name": "job", "steps": 5, "deterministic": True, "seed": 3, "wait_limit_s": 100},
        "model": {
            "tiny": {"characters": "0123456789+=", "layers": 2, "hidden": 32, "heads": 2, "kv_heads": 1, "context": 16},
            "dtype": "float32",
        },
        "data": {
            "environment": f"{ENVIRONMENT}:addition",
            "reward": f"{ENVIRONMENT}:right_digits",
            "chat": False,
        },
        "ranks": {"generators": 2, "trainers": 1},
        "ledger": {"max_staleness": 0, "groups_per_step": 4},
        "rollout": {"group_size": 4, "max_tokens": 4, "slots": 16},
        "train": {"lr": 1e-2, "warm_start": {"steps": 5, "batch": 8, "lr": 1e-3}},
        "weights": {"verify": True},
        "checkpoint": {"every": 2},
    }
    return merged(config, sections)


def state_of(folder: Path) -> dict[tuple[str, str], torch.Tensor]:
    """The tensors of a checkpoint, by (file, name)."""
    files = sorted(folder.glob("*.safetensors"))
    assert files, f"no weights in {folder}"
    return {(file.name, name): tensor for file in files for name, tensor in load_file(file).items()}


def assert_same_bits(first: Path, second: Path) -> None:
    one, other = state_of(first), state_of(second)
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), f"{name} differs"


def await_steps(job: subprocess.Popen[str], folder: Path, steps: int) -> None:
    """Return once so many steps are in the metrics."""
    deadline = time.monotonic() + 120
    while len(metrics_of(folder)) < steps:
        assert job.poll() is None, job.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def kill_after(job: subprocess.Popen[str], folder: Path, steps: int, rank: int) -> None:
    """SIGKILL to one rank once so many steps are in the metrics."""
    await_steps(job, folder, steps)
    os.kill(int((folder / f"runs/job/latest/rank_{rank:03d}.pid").read_text()), signal.SIGKILL)
