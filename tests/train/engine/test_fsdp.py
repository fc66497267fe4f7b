"""FSDP2 over two and three ranks (gloo on this machine) against one rank."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_kit import (
    LENGTHS,
    Folders,
    assert_close,
    assert_equal,
    denominators,
    make_engine,
    train_steps,
    weighted_nll,
    whole_gradients,
    whole_weights,
)
from fsdp_worker import EXAMPLES
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from headrace.train.batch import TrainSample
from headrace.train.config import WarmStartConfig
from headrace.train.warm_start import warm_start

LIMIT_S = 240
WORKER = Path(__file__).parent / "fsdp_worker.py"


WORLDS = [pytest.param(2, id="2 ranks"), pytest.param(3, id="3 ranks", marks=pytest.mark.slow)]


@pytest.fixture(scope="module", params=WORLDS)
def world(request: pytest.FixtureRequest, folders: Folders, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which ranks have run all their cases."""
    folder = tmp_path_factory.mktemp("world")
    for name in ("tied", "untied"):
        shutil.copytree(folders[name], folder / name)
    run_ranks(request.param, folder)
    return folder


def run_ranks(ranks: int, folder: Path) -> None:
    command = [sys.executable, str(WORKER)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    logs = [(folder / f"log_{rank}.txt").open("w") for rank in range(ranks)]
    processes = [
        subprocess.Popen([*command, str(rank), str(ranks), str(folder)], env=environment, stdout=log, stderr=log)
        for rank, log in enumerate(logs)
    ]
    try:
        statuses = [process.wait(timeout=LIMIT_S) for process in processes]
    finally:
        for process, log in zip(processes, logs, strict=True):
            process.kill()
            process.wait()
            log.close()
    assert statuses == [0] * ranks, "\n".join(path.read_text()[-3000:] for path in sorted(folder.glob("log_*")))


def ranks_of(world: Path) -> int:
    return len(list(world.glob("log_*.txt")))


@pytest.mark.parametrize("mode", ["gathered", "regathered"])
def test_gradients_and_losses_equal_one_rank(
    world: Path, folders: Folders, samples: list[TrainSample], mode: str
) -> None:
    alone = make_engine(folders["untied"])
    stats = alone.forward_backward(samples, weighted_nll, denominators(samples), 0)
    gradients = whole_gradients(alone)
    for rank in range(ranks_of(world)):
        path = world / f"{mode}_{rank}.safetensors"
        assert_close(load_file(path), gradients)
        with safe_open(path, framework="pt") as file:
            assert {name: float(value) for name, value in file.metadata().items()} == pytest.approx(stats, abs=1e-5)


@pytest.mark.parametrize("mode", ["gathered", "regathered"])
def test_logprobs_equal_one_rank(world: Path, folders: Folders, samples: list[TrainSample], mode: str) -> None:
    expected = make_engine(folders["untied"]).forward(samples)
    found = []
    for rank in range(ranks_of(world)):
        with np.load(world / f"{mode}_{rank}.npz") as file:
            found += [file[name] for name in file.files]
    assert len(found) == len(LENGTHS)
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_after_steps_equal_one_rank(
    world: Path, folders: Folders, samples: list[TrainSample], dtype: str
) -> None:
    alone = make_engine(folders["tied"], dtype=dtype)
    train_steps(alone, samples, range(5))
    found = load_file(world / f"steps_{dtype}_0.safetensors")
    if dtype == "float32":
        assert_close(found, whole_weights(alone), 1e-4)
        return
    for name, weight in whole_weights(alone).items():  # AdamW turns a rounded sign into a whole step
        assert float((found[name] - weight).norm() / weight.norm()) < 0.05, name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_all_ranks_hold_the_same_weights_and_a_resumed_run_the_same_bits(world: Path, dtype: str) -> None:
    expected = load_file(world / f"steps_{dtype}_0.safetensors")
    for rank in range(ranks_of(world)):
        assert_equal(load_file(world / f"steps_{dtype}_{rank}.safetensors"), expected)
        assert_equal(load_file(world / f"resumed_{dtype}_{rank}.safetensors"), expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_shares_of_the_export_are_the_weights_once(world: Path, dtype: str) -> None:
    weights = load_file(world / f"steps_{dtype}_0.safetensors")
    shares = [load_file(world / f"export_{dtype}_{rank}.safetensors") for rank in range(ranks_of(world))]
    assert all(shares)
    assert sorted(name for share in shares for name in share) == sorted(weights)
    for name, data in ((name, data) for share in shares for name, data in share.items()):
        assert torch.equal(data, weights[name].bfloat16().flatten().view(torch.uint8)), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_saved_model_has_the_weights(world: Path, dtype: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(world / f"model_{dtype}", dtype="auto")
    weights = load_file(world / f"steps_{dtype}_0.safetensors")
    assert model.dtype == getattr(torch, dtype)
    assert_equal(
        {name: tensor.detach() for name, tensor in model.named_parameters()},
        {name: tensor.to(model.dtype) for name, tensor in weights.items()},
    )


def test_another_number_of_ranks_loads_the_state(world: Path, folders: Folders, samples: list[TrainSample]) -> None:
    engine = make_engine(folders["tied"])
    engine.load_state(world / "state_float32")
    assert engine.updates == 3
    train_steps(engine, samples, range(3, 5))
    assert_close(whole_weights(engine), load_file(world / "steps_float32_0.safetensors"), 1e-4)


def test_several_ranks_load_the_state_of_one(
    folders: Folders, samples: list[TrainSample], tmp_path: Path, world: Path
) -> None:
    engine = make_engine(folders["tied"])
    train_steps(engine, samples, range(3))
    engine.save_state(tmp_path)
    one = load_file(tmp_path / "engine_00000_of_00001.safetensors")
    several: dict[str, torch.Tensor] = {}
    for path in (world / "state_float32").glob("*.safetensors"):
        several |= load_file(path)
    assert several.keys() == one.keys()
    assert {key: tensor.shape for key, tensor in several.items()} == {key: tensor.shape for key, tensor in one.items()}


def test_a_gradient_that_isnt_finite_stops_every_rank(world: Path) -> None:
    for rank in range(ranks_of(world)):
        assert "optimizer step 5 isn't finite" in (world / f"broken_{rank}.txt").read_text()


def test_the_warm_start_equals_one_rank(world: Path, folders: Folders) -> None:
    expected = warm_start(make_engine(folders["tied"]), EXAMPLES, WarmStartConfig(steps=4, batch=5, lr=1e-2), 0, 0, 1)
    texts = {(world / f"warm_{rank}.txt").read_text() for rank in range(ranks_of(world))}
    assert len(texts) == 1
    assert [float(loss) for loss in texts.pop().split()] == pytest.approx(expected, abs=1e-4)
