"""The engine's part of a checkpoint: safetensors files that any number of ranks can load.

Each rank writes one file `engine_RANK_of_RANKS.safetensors` with its share of the *whole* tensors, so the files don't
depend on how FSDP2 cut them:

    master/NAME        float32, the master weight
    exp_avg/NAME       float32, AdamW's first moment        (absent before the first update)
    exp_avg_sq/NAME    float32, AdamW's second moment
    rng                uint8, torch's CPU generator of this rank

and in the metadata `updates`, the number of AdamW updates so far (its bias correction).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from headrace.comm.errors import DataError
from headrace.train.collectives import Peers
from headrace.train.master import MasterWeight, divide

MOMENTS = ("exp_avg", "exp_avg_sq")


def save(
    folder: Path, weights: Sequence[MasterWeight], optimizer: torch.optim.Optimizer, updates: int, peers: Peers
) -> None:
    """Write this rank's file; every rank must call it. Gathering is over before the first byte is written, so a full
    disk can't leave the other ranks waiting."""
    share_of = divide(list(weights), peers.size)
    tensors: dict[str, Tensor] = {"rng": torch.get_rng_state()}
    for weight, share in zip(weights, share_of, strict=True):
        for kind, local in _parts(weight, optimizer, updates):
            whole = weight.whole(local)
            if share == peers.rank:
                tensors[f"{kind}/{weight.name}"] = whole.detach().cpu().contiguous()
    save_file(tensors, folder / _file_name(peers.rank, peers.size), {"updates": str(updates)})


def load(folder: Path, weights: Sequence[MasterWeight], optimizer: torch.optim.Optimizer, peers: Peers) -> int:
    """Read this rank's part from the files of any number of ranks; returns the number of updates.
    Raises DataError if files or weights are missing or of another shape."""
    paths = sorted(folder.glob("engine_*_of_*.safetensors"))
    if not paths or paths != [folder / _file_name(rank, len(paths)) for rank in range(len(paths))]:
        raise DataError(
            f"The checkpoint {folder} has no complete set of engine files (found: "
            f"{', '.join(path.name for path in paths) or 'none'}). Resume from another checkpoint of the run."
        )
    with ExitStack() as stack:
        files = [stack.enter_context(safe_open(path, framework="pt")) for path in paths]
        where = {key: file for file in files for key in file.keys()}  # noqa: SIM118 - not a mapping
        updates = int(files[0].metadata()["updates"])
        for weight in weights:
            for kind, local in _parts(weight, optimizer, updates):
                _read(folder, where, f"{kind}/{weight.name}", weight, local)
        torch.set_rng_state(files[peers.rank % len(files)].get_tensor("rng"))
    return updates


def _file_name(rank: int, ranks: int) -> str:
    return f"engine_{rank:05d}_of_{ranks:05d}.safetensors"


def _parts(weight: MasterWeight, optimizer: torch.optim.Optimizer, updates: int) -> Iterator[tuple[str, Tensor]]:
    """Kind and this rank's tensor, in the order of the module's docstring; moments are made where there are none."""
    yield "master", weight.master
    if updates == 0:
        optimizer.state.pop(weight.master, None)
        return
    state = optimizer.state[weight.master]
    for moment in MOMENTS:
        yield moment, state.setdefault(moment, torch.zeros_like(weight.master))
    state["step"] = torch.tensor(float(updates), device=weight.master.device)


@torch.no_grad()
def _read(folder: Path, where: dict[str, Any], key: str, weight: MasterWeight, local: Tensor) -> None:
    if key not in where:
        raise DataError(f"The checkpoint {folder} lacks {key}: it was made from another model than model.path names.")
    piece = where[key].get_slice(key)
    if tuple(piece.get_shape()) != tuple(weight.shape):
        raise DataError(
            f"In the checkpoint {folder}, {key} has shape {tuple(piece.get_shape())}, but the model has "
            f"{tuple(weight.shape)}: it was made from another model than model.path names."
        )
    local.copy_(piece[weight.rows])
