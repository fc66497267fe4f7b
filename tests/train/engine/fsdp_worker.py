"""One trainer rank of test_fsdp: python fsdp_worker.py RANK RANKS FOLDER. Writes what the tests compare."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from engine_kit import (
    LENGTHS,
    denominators,
    make_engine,
    make_samples,
    train_steps_of_rank,
    weighted_nll,
    whole_gradients,
    whole_weights,
)
from safetensors.torch import save_file

from headrace.comm.errors import HeadraceError
from headrace.train import model
from headrace.train.batch import LossOutput
from headrace.train.config import WarmStartConfig
from headrace.train.warm_start import warm_start

EXAMPLES = [([number, 60], [(number * 3) % 50, 61]) for number in range(1, 13)]


def gradients_case(folder: Path, rank: int, ranks: int) -> None:
    """Samples 0 to 6 on rank 0 (several micro-batches), the others on rank 1, none on rank 2."""
    samples = make_samples(LENGTHS)
    mine = {0: samples[:7], 1: samples[7:]}.get(rank, [])
    for name, limit in {"gathered": model.GATHERED_LIMIT_BYTES, "regathered": 0}.items():
        model.GATHERED_LIMIT_BYTES = limit
        engine = make_engine(folder / "untied", dist.group.WORLD, activation_checkpointing=name == "regathered")
        logprobs = engine.forward(mine)
        stats = engine.forward_backward(mine, weighted_nll, denominators(samples), 0)
        save_file(whole_gradients(engine), folder / f"{name}_{rank}.safetensors", {k: str(v) for k, v in stats.items()})
        np.savez(folder / f"{name}_{rank}.npz", *logprobs)


def steps_case(folder: Path, rank: int, ranks: int, dtype: str) -> None:
    """Five steps; then five by way of a saved state."""
    samples = make_samples(LENGTHS)
    engine = make_engine(folder / "tied", dist.group.WORLD, dtype)
    train_steps_of_rank(engine, samples, range(3), rank, ranks)
    state = folder / f"state_{dtype}"
    state.mkdir(exist_ok=True)
    engine.save_state(state)
    train_steps_of_rank(engine, samples, range(3, 5), rank, ranks)
    save_file(whole_weights(engine), folder / f"steps_{dtype}_{rank}.safetensors")
    dist.barrier()
    resumed = make_engine(folder / "tied", dist.group.WORLD, dtype)
    resumed.load_state(state)
    train_steps_of_rank(resumed, samples, range(3, 5), rank, ranks)
    save_file(whole_weights(resumed), folder / f"resumed_{dtype}_{rank}.safetensors")
    resumed.save_model(folder / f"model_{dtype}")
    exported = {
        weight.spec.name: torch.from_numpy(weight.data.copy())
        for weight in resumed.export_weights("bfloat16", rank, ranks)
    }
    save_file(exported, folder / f"export_{dtype}_{rank}.safetensors")


def broken_case(folder: Path, rank: int) -> None:
    """A gradient that isn't finite on one rank alone."""
    engine = make_engine(folder / "tied", dist.group.WORLD)

    def broken(logprobs: torch.Tensor, *_: object) -> LossOutput:
        return LossOutput(logprobs.sum() * (torch.nan if rank == 0 else 1.0), {})

    engine.forward_backward(make_samples([9]), broken, denominators(make_samples([9])), 0)
    try:
        engine.optim_step(5)
    except HeadraceError as error:
        (folder / f"broken_{rank}.txt").write_text(str(error))


def main(rank: int, ranks: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=120))
    gradients_case(folder, rank, ranks)
    for dtype in ("float32", "bfloat16"):
        steps_case(folder, rank, ranks, dtype)
    broken_case(folder, rank)
    engine = make_engine(folder / "tied", dist.group.WORLD)
    losses = warm_start(engine, EXAMPLES, WarmStartConfig(steps=4, batch=5, lr=1e-2), 0, rank, ranks)
    (folder / f"warm_{rank}.txt").write_text(" ".join(map(repr, losses)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
