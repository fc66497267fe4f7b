"""Tokens per second of forward and backward pass: the torch training engine against bare Hugging Face.

Both see the same tokens, in the same dtype, with the same threads, without an optimizer. The engine gets them as ragged
samples of 32 to 224 tokens, nearly all in the loss, and packs them. Hugging Face gets them as its users give them,
`model(input_ids, labels)`, as a batch of equal rows, so that it wastes nothing. The engine also computes every token's
entropy, which Hugging Face isn't asked for.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from benchmarks import interleaved_medians, report
from benchmarks.engine_vs_hf import MODEL, make_random_model
from headrace.train.batch import Denominators, TrainSample
from headrace.train.config import TrainConfig
from headrace.train.torch_engine import TorchTrainEngine
from headrace.train.warm_start import cross_entropy

TOKENS = 4096
ROW = 128


def make_samples(vocabulary: int) -> list[TrainSample]:
    """TOKENS tokens, ragged."""
    rng = np.random.default_rng(0)
    cuts = [0]
    while TOKENS - cuts[-1] > 256:
        cuts.append(cuts[-1] + int(rng.integers(32, 225)))
    tokens = rng.integers(10, vocabulary, TOKENS).astype(np.int32)
    return [make_sample(part) for part in np.split(tokens, cuts[1:])]


def make_sample(tokens: Any) -> TrainSample:
    zeros = np.zeros(len(tokens), np.float32)
    mask = np.ones_like(zeros)
    mask[0] = 0
    return TrainSample(tokens, mask, zeros, zeros, np.zeros(len(tokens), np.int32), 0)


def run_engine(engine: TorchTrainEngine, samples: Sequence[TrainSample]) -> float:
    """Tokens per second."""
    counts = Denominators(float(sum(sample.loss_mask.sum() for sample in samples)), len(samples), TOKENS)
    engine.zero_grad()
    begun = time.perf_counter()
    engine.forward_backward(samples, cross_entropy, counts, 0)
    return TOKENS / (time.perf_counter() - begun)


def run_hugging_face(model: Any, rows: torch.Tensor) -> float:
    """Tokens per second."""
    model.zero_grad()
    begun = time.perf_counter()
    model(input_ids=rows, labels=rows, use_cache=False).loss.backward()
    return TOKENS / (time.perf_counter() - begun)


def measure(folder: Path, dtype: str, repeats: int) -> list[float]:
    """Medians [ours, theirs] in tokens per second."""
    config = TrainConfig(micro_batch_tokens=TOKENS)
    engine = TorchTrainEngine(folder, config, dtype, 1, torch.device("cpu"), None, 0, deterministic=False)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).train()
    samples = make_samples(model.config.vocab_size)
    rows = torch.from_numpy(np.concatenate([sample.tokens for sample in samples])).long().view(-1, ROW)
    runs = [lambda: run_engine(engine, samples), lambda: run_hugging_face(model, rows)]
    interleaved_medians(runs, 1)  # warm up
    return interleaved_medians(runs, repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    parser.add_argument("--quick", action="store_true", help="bfloat16 only, three rounds")
    parser.add_argument("--model", type=Path, default=MODEL, help=f"Hugging Face folder (default {MODEL})")
    parser.add_argument("--random", action="store_true", help="a random model of SmolLM2-135M's shape instead")
    parser.add_argument("--threads", type=int, default=1, help="torch threads of both (default 1)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as scratch:
        folder = make_random_model(Path(scratch)) if options.random else options.model
        for dtype in ["bfloat16"] if options.quick else ["bfloat16", "float32"]:
            ours, theirs = measure(folder, dtype, 3 if options.quick else 5)
            report("train_vs_hf", f"{dtype} threads={options.threads}", ours, theirs, "tokens/s", options.json)


if __name__ == "__main__":
    main()
