"""Supervised training before reinforcement learning, by the same engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from torch import Tensor

from headrace.comm.errors import DataError
from headrace.train.batch import Denominators, LossOutput, PackedBatch, TrainSample
from headrace.train.config import WarmStartConfig
from headrace.train.engine import TrainEngine

Example = tuple[Sequence[int], Sequence[int]]
"""Tokens of the prompt and of the response."""


def warm_start(
    engine: TrainEngine, examples: Sequence[Example], config: WarmStartConfig, seed: int, rank: int, ranks: int
) -> list[float]:
    """Train on the responses; return every step's cross-entropy per response token, in nats, the same on all ranks.

    Every rank gives all examples. Each epoch runs through them in an order drawn from `seed`; a batch may span two
    epochs. The learning rate falls linearly from `config.lr` to a tenth of it. The optimizer's moments are forgotten
    at the end, so that what follows starts afresh. Raises DataError if there are no examples or one has no response.
    """
    _check(examples)
    losses = []
    batches = _batches(len(examples), config.batch, seed)
    for step, batch in zip(range(config.steps), batches, strict=False):
        samples = [_sample(examples[index]) for index in batch]
        denominators = _denominators(samples)
        stats = engine.forward_backward(samples[rank::ranks], cross_entropy, denominators, policy_version=0)
        engine.optim_step(step, lr=_learning_rate(config, step))
        losses.append(stats["loss"])
    engine.reset_optimizer()
    return losses


def cross_entropy(logprobs: Tensor, entropy: Tensor, batch: PackedBatch, denominators: Denominators) -> LossOutput:
    """-Σ mask · logprob / tokens in the loss; `logprobs` [N]."""
    return LossOutput(-(logprobs * batch.loss_mask).sum() / denominators.tokens, {})


def _check(examples: Sequence[Example]) -> None:
    if not examples:
        raise DataError("The warm start has no examples. Check train.warm_start.file, or leave train.warm_start out.")
    for number, (prompt, response) in enumerate(examples):
        if not prompt or not response:
            missing = "response" if prompt else "prompt"
            raise DataError(
                f"Example {number} of the warm start has an empty {missing}. Give every example of "
                "train.warm_start.file both."
            )


def _batches(count: int, size: int, seed: int) -> Iterator[list[int]]:
    generator = np.random.default_rng(seed)
    waiting: list[int] = []
    while True:
        while len(waiting) < size:
            waiting.extend(generator.permutation(count).tolist())
        yield waiting[:size]
        waiting = waiting[size:]


def _learning_rate(config: WarmStartConfig, step: int) -> float:
    return config.lr * (1 - 0.9 * step / max(1, config.steps - 1))


def _sample(example: Example) -> TrainSample:
    prompt, response = example
    length = len(prompt) + len(response)
    mask = np.zeros(length, np.float32)
    mask[len(prompt) :] = 1
    return TrainSample(
        tokens=np.array([*prompt, *response], np.int32),
        loss_mask=mask,
        advantages=np.zeros(length, np.float32),
        rollout_logprobs=np.zeros(length, np.float32),
        versions=np.full(length, -1, np.int32),
        group=-1,
    )


def _denominators(samples: Sequence[TrainSample]) -> Denominators:
    tokens = sum(float(sample.loss_mask.sum()) for sample in samples)
    return Denominators(tokens, len(samples), max(len(sample.tokens) for sample in samples))
