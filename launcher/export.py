"""A checkpoint of a run as a Hugging Face folder: weights in the model's dtype, config and tokenizer beside them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.comm.errors import ConfigError, DataError
from headrace.comm.files import written_whole
from headrace.launcher.config import read_yaml
from headrace.launcher.runfolder import INITIAL_MODEL, checkpoints

if TYPE_CHECKING:
    from torch import Tensor

MASTER = "master/"
"""Prefix of the fp32 weights in a checkpoint's engine files, see `headrace.train.engine_state`."""

NOT_COPIED = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.gguf", "*.pt", ".*")
"""What isn't taken over from the initial model: its weights."""


def export(run: Path, out: Path | None = None, step: int | None = None) -> Path:
    """Write a checkpoint of `run`, the newest unless `step` names one, to the folder `out`, which must not exist
    (RUN/export/step_NNNNNN by default); return that folder.

    Raises:
        HeadraceError: there is no such run or checkpoint, or `out` can't be written.
    """
    if not (run / "config.yaml").is_file():
        raise ConfigError(f"{run} isn't a run folder: it has no config.yaml. Give the folder, for instance runs/NAME.")
    config = read_yaml(run / "config.yaml")
    _check_trained(run, config)
    checkpoint = _checkpoint(run, step)
    model = config.get("model") or {}
    initial = Path(model["path"]) if model.get("path") else run / INITIAL_MODEL
    if not (initial / "config.json").is_file():
        raise DataError(f"The initial model {initial}, whose config and tokenizer the export needs, isn't there.")
    out = out or run / "export" / checkpoint.name
    if out.exists():
        raise ConfigError(f"{out} exists already; give another folder or remove it.")
    dtype = model.get("dtype", "bfloat16")
    with written_whole(out, "The export") as partial:
        shutil.copytree(initial, partial, ignore=shutil.ignore_patterns(*NOT_COPIED), dirs_exist_ok=True)
        _write_dtype(partial / "config.json", dtype)
        _write_weights(partial / "model.safetensors", checkpoint, dtype)
    return out


def _check_trained(run: Path, config: dict[str, Any]) -> None:
    if (config.get("rollout") or {}).get("engine") == "latency":
        raise ConfigError(
            f"{run} is a run of `rollout.engine: latency`, which makes up its tokens and trains no model: there are no "
            "weights to export. Export a run of the torch engine."
        )


def _checkpoint(run: Path, step: int | None) -> Path:
    found = checkpoints(run)
    if not found:
        raise DataError(f"{run} has no checkpoint yet (checkpoint.every says how often one is written).")
    if step is not None and step not in found:
        raise ConfigError(f"{run} has no checkpoint of step {step}; there are: {', '.join(map(str, found))}.")
    return found[max(found) if step is None else step]


def _write_dtype(file: Path, dtype: str) -> None:
    config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)
    file.write_text(json.dumps(config | {"dtype": dtype}, indent=2) + "\n", encoding="utf-8")


def _write_weights(file: Path, checkpoint: Path, dtype: str) -> None:
    import torch
    from safetensors.torch import save_file

    target = getattr(torch, dtype)
    save_file({name: tensor.to(target) for name, tensor in _master_weights(checkpoint)}, file, {"format": "pt"})


def _master_weights(checkpoint: Path) -> Iterator[tuple[str, Tensor]]:
    """(Hugging Face name, fp32 tensor), each read when it is asked for."""
    from safetensors import safe_open

    with ExitStack() as stack:
        for path in sorted(checkpoint.glob("engine_*.safetensors")):
            file = stack.enter_context(safe_open(path, framework="pt"))
            for key in file.keys():  # noqa: SIM118 - not a mapping
                if key.startswith(MASTER):
                    yield key.removeprefix(MASTER), file.get_tensor(key)
