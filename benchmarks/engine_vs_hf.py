"""Tokens per second of the torch engine against Hugging Face `generate`: same model, threads, requests and concurrency.

64 requests with prompts of 16 to 128 tokens and responses of 8 to 64, sampled at temperature 1, none ended early.
Hugging Face gets them as its users give them: in the order of arrival, left-padded, in batches as large as the engine
has slots, each batch generating until its longest response is done. Both are credited with the requested tokens only.
The engine also computes the log-prob of every token, which `generate` isn't asked for.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks import interleaved_medians, report
from headrace.rollout.engine import Request, SamplingParams
from headrace.rollout.torch_engine import TorchEngine, load_torch_engine

MODEL = Path("models/SmolLM2-135M-Instruct")
SLOTS = 32
"""Requests that the engine decodes at the same time, and the size of Hugging Face's batches."""

SMOLLM2 = {
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True)
class Job:
    prompt: npt.NDArray[np.int32]
    response: int
    """Tokens to be generated."""


def make_jobs(count: int, vocabulary: int) -> list[Job]:
    rng = np.random.default_rng(0)
    return [
        Job(rng.integers(10, vocabulary, rng.integers(16, 129)).astype(np.int32), int(rng.integers(8, 65)))
        for _ in range(count)
    ]


def run_engine(engine: TorchEngine, jobs: list[Job]) -> float:
    """Useful tokens per second."""
    begun = time.perf_counter()
    for i, job in enumerate(jobs):
        engine.add(Request(i, job.prompt, SamplingParams(job.response), (0, i, 0)))
    tokens = 0
    while tokens < sum(job.response for job in jobs):
        tokens += sum(len(chunk.tokens) for chunk in engine.step())
    return tokens / (time.perf_counter() - begun)


@torch.inference_mode()
def run_hugging_face(model: Any, jobs: list[Job], batch: int) -> float:
    """Useful tokens per second."""
    begun = time.perf_counter()
    for first in range(0, len(jobs), batch):
        part = jobs[first : first + batch]
        width = max(len(job.prompt) for job in part)
        tokens = torch.zeros((len(part), width), dtype=torch.int64)
        mask = torch.zeros_like(tokens)
        for row, job in enumerate(part):
            tokens[row, width - len(job.prompt) :] = torch.from_numpy(job.prompt)
            mask[row, width - len(job.prompt) :] = 1
        longest = max(job.response for job in part)
        out = model.generate(
            tokens, attention_mask=mask, max_new_tokens=longest, do_sample=True, top_k=0, pad_token_id=0
        )
        if out.shape != (len(part), width + longest):
            raise RuntimeError(f"generate returned {tuple(out.shape)}, not {(len(part), width + longest)}")
    return sum(job.response for job in jobs) / (time.perf_counter() - begun)


def measure(folder: Path, dtype: str, requests: int, repeats: int) -> list[float]:
    """Medians [ours, theirs] in tokens per second."""
    engine = load_torch_engine(folder, dtype, torch.device("cpu"), SLOTS)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    model.generation_config.eos_token_id = None
    jobs = make_jobs(requests, model.config.vocab_size)
    run_engine(engine, jobs[:2])
    run_hugging_face(model, jobs[:2], 2)
    return interleaved_medians(
        [lambda: run_engine(engine, jobs), lambda: run_hugging_face(model, jobs, SLOTS)], repeats
    )


def make_random_model(folder: Path) -> Path:
    """SmolLM2-135M's shape with random weights."""
    config = AutoConfig.for_model(**SMOLLM2)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    parser.add_argument("--quick", action="store_true", help="bfloat16 only, 32 requests")
    parser.add_argument("--model", type=Path, default=MODEL, help=f"Hugging Face folder (default {MODEL})")
    parser.add_argument("--random", action="store_true", help="a random model of SmolLM2-135M's shape instead")
    parser.add_argument("--threads", type=int, default=1, help="torch threads of both (default 1)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    dtypes = ["bfloat16"] if options.quick else ["bfloat16", "float32"]
    with tempfile.TemporaryDirectory() as scratch:
        folder = make_random_model(Path(scratch)) if options.random else options.model
        for dtype in dtypes:
            ours, theirs = measure(folder, dtype, 32 if options.quick else 64, 3)
            case = f"{dtype} threads={options.threads}"
            report("engine_vs_hf", case, ours, theirs, "tokens/s", options.json)


if __name__ == "__main__":
    main()
