"""The sections `data`, `rollout` and `eval` of the config."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator
from typing_extensions import Self

from headrace.comm.config import Section


class AnswerConfig(Section):
    """How the answer is found in the text of a response."""

    extract: Literal["whole", "first_number", "last_number", "tag", "regex"] = "whole"
    """`whole`: the stripped text. `first_number`, `last_number`: that number in the text. `tag`: the text between
    <answer> and </answer>. `regex`: the first group of `pattern`."""

    pattern: str | None = None
    """Regular expression with one group; only with `extract: regex`."""

    @model_validator(mode="after")
    def _pattern_with_regex(self) -> Self:
        if (self.extract == "regex") != (self.pattern is not None):
            raise ValueError("data.answer.pattern goes with data.answer.extract: regex, and only with it")
        return self

    @field_validator("pattern")
    @classmethod
    def _pattern_with_group(cls, pattern: str | None) -> str | None:
        try:
            groups = 1 if pattern is None else re.compile(pattern).groups
        except re.error as error:
            raise ValueError(f"data.answer.pattern isn't a regular expression: {error}") from error
        if groups < 1:
            raise ValueError("data.answer.pattern needs a group, in round brackets, around the answer")
        return pattern


class DataConfig(Section):
    """Where the tasks come from and how answers are scored."""

    environment: str | None = None
    """`reasoning_gym:FAMILY` (for instance `reasoning_gym:chain_sum`), or `package.module:function` of your own,
    called with `**options` and returning a sequence of `Task`. Either this or `data.file`."""

    options: dict[str, Any] = {}
    """Options of the environment, passed as they are."""

    file: Path | None = None
    """A JSONL file: one object per line with `prompt` (text or a list of chat messages) and, for the reward, any
    other fields. Either this or `data.environment`."""

    reward: str | None = None
    """Reward function as `package.module:function` or `path/to/file.py:function`, called with (task, response text)
    and returning a number. Needed with `data.file`; with an environment it replaces the environment's own."""

    size: int = Field(10_000, ge=1)
    """Tasks of the environment to train on, at most; those of `eval.tasks` come on top. A file has its own size."""

    epochs: int | None = Field(None, ge=1)
    """How often the tasks may be used; none means until `run.steps` are done."""

    shuffle: bool = True
    """Take the tasks of every epoch in a seeded random order."""

    prompt: str = "{question}"
    """Template of the prompt; `{question}` stands for the task's question."""

    system: str | None = None
    """System message, when a chat template is used."""

    chat: bool = True
    """Wrap the prompt by the tokenizer's chat template. False feeds the plain text."""

    answer: AnswerConfig = AnswerConfig()

    reward_timeout_s: float = Field(10.0, gt=0)
    """Longest time for one call of the reward, in seconds; it runs in a process of its own, which is ended then."""

    reward_retries: int = Field(2, ge=0)
    """How often a reward that raised, hung or returned something that isn't a finite number is tried again. After
    that the group fails, with the error kept, and another takes its place."""

    reward_workers: int = Field(1, ge=1)
    """Processes per generator that compute rewards."""

    @model_validator(mode="after")
    def _prompt_and_reward(self) -> Self:
        if self.file is not None and self.reward is None:
            raise ValueError("data.file needs data.reward, the function that scores a response")
        if "{question}" not in self.prompt:
            raise ValueError("data.prompt must contain {question}")
        return self


class LatencyConfig(Section):
    """The model of an engine that `rollout.engine: latency` uses: real protocol and messages, made-up tokens."""

    token_ms: float = Field(1.0, gt=0)
    """Time of one decode step, in milliseconds, whatever the number of running requests."""

    median_tokens: float = Field(64.0, gt=0)
    """Median of the lognormal response length, in tokens."""

    sigma: float = Field(1.0, ge=0)
    """Sigma of the lognormal response length."""

    train_s: float = Field(0.0, ge=0)
    """Time of one optimizer step of the trainers, in seconds; with this engine the trainers don't train either."""

    weight_bytes: int = Field(1024, ge=16)
    """Size of the made-up weights that travel at every publication, in bytes."""

    weight_delay_s: float = Field(0.0, ge=0)
    """A generator takes in a new version after a random delay between 0 and this, in seconds."""


class RolloutConfig(Section):
    """How samples are generated."""

    engine: Literal["torch", "latency"] = "torch"
    """`torch`: continuous batching over a KV cache, on the CPU or any torch device. `latency`: a model of an engine."""

    group_size: int = Field(8, ge=1)
    """Samples per prompt."""

    max_tokens: int = Field(64, ge=1)
    """Longest response, in tokens."""

    temperature: float = Field(1.0, ge=0)
    """Sampling temperature; 0 takes the likeliest token."""

    top_p: float = Field(1.0, gt=0, le=1)
    """Sample from the smallest set of tokens whose probabilities sum to at least this."""

    top_k: int = Field(0, ge=0)
    """Sample from the k likeliest tokens; 0 means all."""

    stop: list[str] = []
    """Texts of single tokens that end a response, besides the tokenizer's end of text."""

    slots: int = Field(32, ge=1)
    """Samples that one generator decodes at the same time."""

    memory_mb: float = Field(1024.0, gt=0, allow_inf_nan=False)
    """Host memory of one generator for groups that are finished and not trained, in MiB; a token takes 13 bytes. Above
    half of it groups leave the memory for the archive (`checkpoint.archive`) and are read back when they are trained.
    What can't leave, since there is no archive or its disk is full, makes the generator begin no further groups until
    there is room; but as many as `ledger.groups_per_step` it always may have, or no step could be formed."""

    kv: Literal["keep", "recompute"] = "keep"
    """What happens to the cached keys and values of running samples when new weights arrive: kept as they are, or
    computed again with the new weights."""

    partial: bool = True
    """New weights are taken in at once, and running samples go on with them: a response, and the responses of a group,
    may be of several versions. False: all tokens of a group are of one version. While newer weights wait no group is
    started, and they are taken in when nothing runs any more, so that slots stand idle meanwhile."""

    latency: LatencyConfig = LatencyConfig()


class EvalConfig(Section):
    """Greedy accuracy on held-out tasks, before the first step and after the last."""

    tasks: int = Field(0, ge=0)
    """Held-out tasks; 0 means no evaluation. They come from the same environment with another seed, or are the last
    ones of `data.file`, which training then doesn't see."""
