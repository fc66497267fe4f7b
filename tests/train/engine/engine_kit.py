"""Tiny models and samples for the tests of the training engine, and for the ranks that they start."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from headrace.train.batch import Denominators, LossOutput, PackedBatch, TrainSample
from headrace.train.config import TrainConfig
from headrace.train.torch_engine import TorchTrainEngine

VOCABULARY = 97
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
CONFIGS = {
    "tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "untied": LlamaConfig(**SIZES, tie_word_embeddings=False),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=False),
}
LENGTHS = [5, 23, 2, 64, 17, 40, 9, 33, 12, 3]

Folders = dict[str, Path]


def make_model(name: str, folder: Path) -> Path:
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(CONFIGS[name])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0).add_(0.02 * torch.randn_like(parameter))  # so that no gradient is tiny or alike
    model.save_pretrained(folder)
    return folder


def make_samples(lengths: Sequence[int], seed: int = 0) -> list[TrainSample]:
    rng = np.random.default_rng(seed)
    return [make_sample(rng, length) for length in lengths]


def make_sample(rng: np.random.Generator, length: int) -> TrainSample:
    mask = (rng.random(length) < 0.7).astype(np.float32)
    mask[0], mask[-1] = 0, 1
    return TrainSample(
        tokens=rng.integers(0, VOCABULARY, length).astype(np.int32),
        loss_mask=mask,
        advantages=rng.normal(size=length).astype(np.float32),
        rollout_logprobs=np.zeros(length, np.float32),
        versions=np.zeros(length, np.int32),
        group=0,
    )


def denominators(samples: Sequence[TrainSample]) -> Denominators:
    return Denominators(float(sum(sample.loss_mask.sum() for sample in samples)), len(samples), 64)


def weighted_nll(logprobs: torch.Tensor, entropy: torch.Tensor, batch: PackedBatch, counts: Denominators) -> LossOutput:
    """-Σ mask · advantage · logprob / tokens."""
    loss = -(logprobs * batch.advantages * batch.loss_mask).sum() / counts.tokens
    return LossOutput(loss, {"entropy": (entropy * batch.loss_mask).sum() / counts.tokens})


def make_engine(folder: Path, group: Any = None, dtype: str = "float32", **options: Any) -> TorchTrainEngine:
    config = TrainConfig(**{"micro_batch_tokens": 80, "lr": 1e-2, "weight_decay": 0.1, **options})
    return TorchTrainEngine(folder, config, dtype, 10, torch.device("cpu"), group, seed=0, deterministic=True)


def whole_gradients(engine: TorchTrainEngine) -> dict[str, torch.Tensor]:
    return {weight.name: weight.whole(weight.gradient()).detach().clone() for weight in engine.weights}


def whole_weights(engine: TorchTrainEngine) -> dict[str, torch.Tensor]:
    return {weight.name: weight.whole(weight.master).detach().clone() for weight in engine.weights}


def train_steps(engine: TorchTrainEngine, samples: Sequence[TrainSample], steps: range) -> None:
    """The same steps for any engine: step k trains on the samples turned by k."""
    for step in steps:
        turned = [*samples[step:], *samples[:step]]
        engine.forward_backward(turned, weighted_nll, denominators(turned), step)
        engine.optim_step(step)


def train_steps_of_rank(
    engine: TorchTrainEngine, samples: Sequence[TrainSample], steps: range, rank: int, ranks: int
) -> None:
    """`train_steps` with every rank's part of the samples."""
    for step in steps:
        turned = [*samples[step:], *samples[:step]]
        engine.forward_backward(turned[rank::ranks], weighted_nll, denominators(turned), step)
        engine.optim_step(step)


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float = 1e-5) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=tolerance, atol=tolerance, msg=f"{name} differs")


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
