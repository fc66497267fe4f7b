"""A group at work on a generator, from its start until its data are handed over."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from headrace.comm.messages import SampleMeta, TicketGrant
from headrace.comm.trajectory import Trajectory, Unit
from headrace.rollout.engine import Chunk
from headrace.rollout.task import Task

CUT = "cut"
"""How a sample finishes that was ended because its group held up a step."""


@dataclass(slots=True)
class Sample:
    """One response."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)
    """(version, tokens sampled with it), in order."""
    finish: str = ""
    """As in `Trajectory`; empty while more tokens are to come."""
    text: str = ""
    reward: float | None = None
    left_out: bool = False
    """The group goes on without it."""

    def append(self, chunk: Chunk) -> None:
        self.tokens.extend(chunk.tokens)
        self.logprobs.extend(chunk.logprobs)
        if self.spans and self.spans[-1][0] == chunk.version:
            self.spans[-1] = (chunk.version, self.spans[-1][1] + len(chunk.tokens))
        else:
            self.spans.append((chunk.version, len(chunk.tokens)))

    @property
    def growing(self) -> bool:
        return not self.finish and not self.left_out

    @staticmethod
    def resumed(kept: Trajectory) -> Sample:
        """One that was at work when the run was stopped."""
        sampled = kept.versions >= 0
        return Sample(
            tokens=kept.tokens[sampled].tolist(),
            logprobs=kept.logprobs[sampled].tolist(),
            spans=kept.spans,
            finish=kept.finish,
            text=kept.response_text,
            reward=None if math.isnan(kept.reward) else kept.reward,
        )


@dataclass(slots=True)
class Group:
    """What a ticket has become so far."""

    grant: TicketGrant
    task: Task
    prompt: npt.NDArray[np.int32]
    samples: list[Sample]
    late: bool = False
    """It holds up a step, as its ledger has said."""

    @staticmethod
    def resumed(
        grant: TicketGrant, task: Task, prompt: npt.NDArray[np.int32], size: int, kept: Iterable[Trajectory]
    ) -> Group:
        """One of `size` samples that was at work when the run was stopped; those that aren't kept were left out."""
        samples = [Sample(left_out=True) for _ in range(size)]
        for trajectory in kept:
            samples[trajectory.unit.sample] = Sample.resumed(trajectory)
        return Group(grant, task, prompt, samples)

    @property
    def key(self) -> tuple[int, int]:
        return self.grant.ticket, self.grant.attempt

    @property
    def begun(self) -> bool:
        """Whether there is any token."""
        return any(sample.tokens for sample in self.samples)

    @property
    def growing(self) -> list[Unit]:
        """The samples that lack their last token."""
        return [self.unit(index) for index, sample in enumerate(self.samples) if sample.growing]

    @property
    def complete(self) -> bool:
        """Whether every sample has a reward or is left out."""
        return all(sample.reward is not None or sample.left_out for sample in self.samples)

    @property
    def left_out(self) -> list[tuple[int, int, int]]:
        """Those samples, as `Finished` names them."""
        ticket, attempt = self.key
        return [(ticket, index, attempt) for index, sample in enumerate(self.samples) if sample.left_out]

    def unit(self, index: int) -> Unit:
        return Unit(self.grant.ticket, index, self.grant.attempt)

    def trajectories(self) -> list[Trajectory]:
        """The data, without the samples that are left out. In a group that isn't complete, samples without a reward
        have NaN, those that lack tokens an empty `finish`."""
        return [self._trajectory(index) for index, sample in enumerate(self.samples) if not sample.left_out]

    def metas(self) -> list[SampleMeta]:
        """The same for the ledger."""
        return [self._meta(index) for index, sample in enumerate(self.samples) if not sample.left_out]

    def _trajectory(self, index: int) -> Trajectory:
        """The prompt's rows are masked out."""
        sample = self.samples[index]
        prompt, length = len(self.prompt), len(self.prompt) + len(sample.tokens)
        tokens, mask = np.empty(length, np.int32), np.zeros(length, np.uint8)
        logprobs, versions = np.zeros(length, np.float32), np.full(length, -1, np.int32)
        tokens[:prompt], tokens[prompt:] = self.prompt, sample.tokens
        mask[prompt:], logprobs[prompt:] = 1, sample.logprobs
        sampled_by, counts = np.array(sample.spans, np.int32).reshape(-1, 2).T
        versions[prompt:] = np.repeat(sampled_by, counts)
        return Trajectory(
            unit=self.unit(index),
            tokens=tokens,
            loss_mask=mask,
            logprobs=logprobs,
            versions=versions,
            reward=math.nan if sample.reward is None else sample.reward,
            finish=sample.finish,
            prompt_text=str(self.task.question),
            response_text=sample.text,
        )

    def _meta(self, index: int) -> SampleMeta:
        sample = self.samples[index]
        assert sample.reward is not None
        return SampleMeta(
            *self.unit(index),
            born=min(version for version, _ in sample.spans),
            prompt_tokens=len(self.prompt),
            response_tokens=len(sample.tokens),
            reward=sample.reward,
            spans=tuple(sample.spans) if len(sample.spans) > 1 else (),
        )
