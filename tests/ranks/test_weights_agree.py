"""What the trainer exports is what the generator samples with: log-probs on both sides agree after every update."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from headrace.comm.delta import Cheaper
from headrace.comm.simulated import SimulatedNetwork
from headrace.comm.weights import Version, WeightTensor
from headrace.comm.weights_mpi import MpiPublisher
from headrace.comm.weights_pull import LASTING, STAGING, MpiSubscriber
from headrace.rollout.config import RolloutConfig
from headrace.rollout.engine import Request, SamplingParams
from headrace.rollout.engines import make_engine
from headrace.train.batch import Denominators, LossOutput, TrainSample
from headrace.train.config import TrainConfig
from headrace.train.torch_engine import TorchTrainEngine

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
MODELS = {
    "llama tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama untied": LlamaConfig(**SIZES, tie_word_embeddings=False),
    "qwen2 tied": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3 untied": Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=False),
}


BUCKET_BYTES = 1000
"""Smaller than most tensors."""


class Channel:
    """From a trainer (rank 0) to a generator (rank 1) in one process."""

    def __init__(self, way: str) -> None:
        network, delta = SimulatedNetwork(2), way == "changes"
        cheaper, buffers = Cheaper() if delta else None, LASTING if way == "in place" else STAGING
        self._transports = [network.transport(rank) for rank in range(2)]
        self._publisher = MpiPublisher(self._transports[0], [1], BUCKET_BYTES, True, 1.0, cheaper)
        self._subscriber = MpiSubscriber(self._transports[1], [0], True, 1.0, delta, buffers)

    def send(self, version: int, tensors: Iterator[WeightTensor]) -> Version:
        self._publisher.publish(version, tensors)
        for _ in range(10_000):
            for transport, service in zip(self._transports, (self._publisher, self._subscriber), strict=True):
                for received in transport.poll():
                    service.receive(received, 0.0)
                service.tick(0.0)
            if (found := self._subscriber.take()) is not None:
                return found
        raise AssertionError(f"version {version} doesn't come")


def likelihood(logprobs, entropy, batch, counts):
    return LossOutput(-(logprobs * batch.loss_mask).sum() / counts.tokens, {})


def sample(engine, requests: int) -> list[TrainSample]:
    """Let the engine sample; its tokens with its log-probs, as training samples."""
    params = SamplingParams(max_tokens=12, temperature=0.7)
    prompts = [np.arange(3 + i, 8 + 2 * i, dtype=np.int32) % 61 for i in range(requests)]
    for index, prompt in enumerate(prompts):
        engine.add(Request(index, prompt, params, (0, index, 0)))
    made: dict[int, list[tuple[int, float]]] = {index: [] for index in range(requests)}
    while engine.capacity().running or engine.capacity().waiting:
        for chunk in engine.step():
            made[chunk.id].extend(zip(chunk.tokens, chunk.logprobs, strict=True))
    return [trajectory(prompts[index], pairs) for index, pairs in made.items()]


def trajectory(prompt: np.ndarray, pairs: list[tuple[int, float]]) -> TrainSample:
    blank = np.zeros(len(prompt))
    columns = np.array(pairs)
    tokens = np.concatenate([prompt, columns[:, 0]]).astype(np.int32)
    mask = np.concatenate([blank, np.ones(len(pairs))]).astype(np.float32)
    logprobs = np.concatenate([blank, columns[:, 1]]).astype(np.float32)
    return TrainSample(tokens, mask, mask.copy(), logprobs, mask.astype(np.int32), group=0)


def logprobs_of(samples: list[TrainSample]) -> list[float]:
    return [float(one.rollout_logprobs.sum()) for one in samples]


@pytest.mark.parametrize("way", ["copied", "in place", "changes"])
@pytest.mark.parametrize("name", MODELS)
def test_log_probs_of_both_sides_agree_after_every_update(tmp_path: Path, name: str, way: str) -> None:
    """For tied embeddings, fused projections, all names and tensors larger than a bucket, over the weight channel."""
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(MODELS[name]).save_pretrained(tmp_path)
    config = TrainConfig(lr=3e-2, micro_batch_tokens=64)
    trainer = TorchTrainEngine(tmp_path, config, "float32", 10, torch.device("cpu"), None, 0, False, temperature=0.7)
    generator = make_engine(RolloutConfig(slots=4), tmp_path, "float32", "cpu", 0, False, None)
    channel, earlier = Channel(way), None
    samples: list[TrainSample] = []
    kept: list[Version] = []
    for version in range(4):
        sent = channel.send(version, trainer.export_weights("float32", 0, 1))
        assert sent.version == version
        assert any(tensor.spec.nbytes > BUCKET_BYTES for tensor in sent.tensors)
        assert logprobs_of(sample(generator, 6) if samples else []) == logprobs_of(samples), "changed while in use"
        generator.load_weights(version, sent.tensors, sent.lasting)
        assert sent.lasting == (way == "in place")
        kept.append(sent)
        while len(kept) > sent.lasting:
            kept.pop(0).release()
        samples = sample(generator, 6)
        for one, logprobs in zip(samples, trainer.forward(samples), strict=True):
            sampled = one.loss_mask > 0
            np.testing.assert_allclose(one.rollout_logprobs[sampled], logprobs[sampled], atol=1e-4)
        assert logprobs_of(samples) != earlier, "the update changed nothing"
        earlier = logprobs_of(samples)
        counts = Denominators(float(sum(one.loss_mask.sum() for one in samples)), 6, 12)
        trainer.forward_backward(samples, likelihood, counts, version)
        trainer.optim_step(version)
