"""What the tests of the engines share: running an engine to its end, and the reference by Hugging Face."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from headrace.comm.weights import TensorSpec, WeightTensor
from headrace.rollout.engine import Chunk, Engine, Request, SamplingParams


@dataclass
class Sample:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish: str | None = None


def collect(samples: dict[Hashable, Sample], chunks: list[Chunk]) -> None:
    for chunk in chunks:
        sample = samples.setdefault(chunk.id, Sample())
        assert sample.finish is None, "a chunk after the last one"
        sample.tokens += chunk.tokens
        sample.logprobs += chunk.logprobs
        sample.versions += [chunk.version] * len(chunk.tokens)
        sample.finish = chunk.finish


def busy(engine: Engine) -> bool:
    capacity = engine.capacity()
    return capacity.running + capacity.waiting > 0


def run(engine: Engine, samples: dict[Hashable, Sample] | None = None) -> dict[Hashable, Sample]:
    """Step until nothing is left."""
    samples = {} if samples is None else samples
    while busy(engine):
        collect(samples, engine.step())
    return samples


def prompts(count: int, longest: int = 20, seed: int = 0, vocabulary: int = 97) -> list[npt.NDArray[np.int32]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocabulary, rng.integers(1, longest + 1)).astype(np.int32) for _ in range(count)]


def request(id: Hashable, prompt: npt.NDArray[np.int32], **params: Any) -> Request:
    ticket = id if isinstance(id, int) else 0
    return Request(id, prompt, SamplingParams(**{"max_tokens": 12, "temperature": 0.0} | params), (7, ticket, 0))


def hf_model(folder: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    model.generation_config.eos_token_id = None
    return model


@torch.inference_mode()
def hf_logits(model: Any, tokens: list[int]) -> torch.Tensor:
    """[T, vocabulary] float32 for one sequence, without cache or padding."""
    return model(torch.tensor([tokens])).logits[0].float()


def hf_logprobs(model: Any, prompt: npt.NDArray[np.int32], response: list[int]) -> list[float]:
    """Log-prob of every response token at temperature 1."""
    tokens = [*prompt.tolist(), *response]
    logprobs = hf_logits(model, tokens).log_softmax(-1)
    return [logprobs[len(prompt) - 1 + i, token].item() for i, token in enumerate(response)]


def folder_weights(folder: Path, dtype: torch.dtype = torch.float32) -> Iterator[WeightTensor]:
    """The weights of a folder as they come over a weight channel."""
    for name, tensor in load_file(folder / "model.safetensors").items():
        data = tensor.to(dtype).contiguous()
        spec = TensorSpec(name, str(dtype).removeprefix("torch."), tuple(data.shape))
        yield WeightTensor(spec, data.view(torch.uint8).reshape(-1).numpy())
