"""What a trainer does with a batch: the training engine and the algorithm, or a model of both."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from headrace.comm.trajectory import Trajectory
from headrace.comm.weights import TensorSpec, WeightTensor
from headrace.ranks.config import JobConfig
from headrace.ranks.tickets import FormedStep

if TYPE_CHECKING:
    from headrace.train.engine import TrainEngine
    from headrace.train.scoring import ReferenceModel


class Learner(Protocol):
    """The main-thread side of training; every trainer makes the same calls in the same order."""

    def learn(
        self, formed: FormedStep, groups: list[list[Trajectory]], indices: list[int], step: int
    ) -> dict[str, float | None]:
        """Train on one batch, of which this rank has `groups`, their places in the whole batch being `indices`.
        Returns metrics, the same on every rank."""
        ...

    def export(self, version: int) -> Iterator[WeightTensor]:
        """This rank's share of the weights."""
        ...

    def save(self, folder: Path) -> None: ...


class PolicyLearner:
    """A training engine with the objective that the config describes."""

    def __init__(
        self, engine: TrainEngine, reference: ReferenceModel | None, config: JobConfig, index: int, trainers: int
    ) -> None:
        """`reference` is the frozen model of the KL penalty; None without one."""
        from headrace.train.objective import make_objective, needs_proximal

        self._engine = engine
        self._reference = reference
        self._config = config
        self._index = index
        self._trainers = trainers
        self._objective = make_objective(config.train)
        self._needs_proximal = needs_proximal(config.train)
        self._dtype = config.model.dtype if config.weights.dtype == "model" else config.weights.dtype

    def learn(
        self, formed: FormedStep, groups: list[list[Trajectory]], indices: list[int], step: int
    ) -> dict[str, float | None]:
        from headrace.train.batch import Denominators
        from headrace.train.objective import build_samples

        samples = build_samples(groups, self._config.train, indices)
        denominators = Denominators(
            tokens=float(sum(group.loss_tokens for group in formed.groups)),
            sequences=sum(group.sequences for group in formed.groups),
            max_tokens=self._config.rollout.max_tokens,
        )
        if self._needs_proximal:
            for sample, logprobs in zip(samples, self._engine.forward(samples), strict=True):
                sample.proximal_logprobs = logprobs
        if self._reference is not None:
            for sample, logprobs in zip(samples, self._reference.forward(samples), strict=True):
                sample.reference_logprobs = logprobs
        stats = self._engine.forward_backward(samples, self._objective, denominators, policy_version=step)
        result = self._engine.optim_step(step)
        return _finish(stats) | {"train/grad_norm": result.grad_norm, "train/lr": result.lr}

    def export(self, version: int) -> Iterator[WeightTensor]:
        return self._engine.export_weights(self._dtype, self._index, self._trainers)

    def save(self, folder: Path) -> None:
        self._engine.save_state(folder)


def _finish(sums: dict[str, float]) -> dict[str, float | None]:
    """One mean out of the mismatch's numerator and count (None when no token has gap 0); `train/loss` for `loss`."""
    stats: dict[str, float | None] = dict(sums)
    total, tokens = sums["policy/kl_mismatch_sum"], sums["policy/kl_mismatch_tokens"]
    del stats["policy/kl_mismatch_sum"], stats["policy/kl_mismatch_tokens"]
    stats["policy/kl_mismatch"] = total / tokens if tokens else None
    stats["train/loss"] = stats.pop("loss")
    return stats


class LatencyLearner:
    """A model of training, for the latency engine: it takes time and makes up weights that carry their version."""

    def __init__(self, config: JobConfig, index: int) -> None:
        self._train_s = config.rollout.latency.train_s
        self._bytes = config.rollout.latency.weight_bytes
        self._index = index

    def learn(
        self, formed: FormedStep, groups: list[list[Trajectory]], indices: list[int], step: int
    ) -> dict[str, float | None]:
        time.sleep(self._train_s)
        return {}

    def export(self, version: int) -> Iterator[WeightTensor]:
        spec = TensorSpec(f"made_up.{self._index}", "uint8", (self._bytes,))
        yield WeightTensor(spec, np.full(self._bytes, version % 251, np.uint8))

    def save(self, folder: Path) -> None:
        """There is nothing but the ledger."""
