"""The interface of an inference engine, as small as it can be.

The generator's main thread calls all of it: `add` what the ledger granted, `step` again and again, `load_weights`
between two steps when a whole version is there. An engine never blocks for longer than one step, and knows nothing of
tickets.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from headrace.comm.weights import WeightTensor


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_token_ids: tuple[int, ...] = ()
    """Sampling one of these ends the request; it is part of the response."""


@dataclass(frozen=True, slots=True)
class Request:
    """One sample to be generated."""

    id: Hashable
    prompt: npt.NDArray[np.int32]
    """[P] token ids, P ≥ 1."""
    params: SamplingParams
    key: tuple[int, int, int] = (0, 0, 0)
    """(seed, ticket, sample): with the position of a token it fixes the random number that token is drawn by."""
    begun: tuple[int, ...] = ()
    """Tokens that the response has already, fewer than `max_tokens`: sampling goes on after them."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """New tokens of one request, all sampled by the weights of `version`."""

    id: Hashable
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Of exactly the distribution sampled from."""
    version: int
    finish: Literal["stop", "length", None] = None
    """Set with the last chunk of a request."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """Room for more."""

    slots: int
    """Slots in all."""
    running: int
    waiting: int


class Engine(Protocol):
    """A model that generates."""

    @property
    def version(self) -> int:
        """The version in force: the next token is sampled by it."""
        ...

    def add(self, request: Request) -> None:
        """Queue a request. Raises `DataError` when prompt plus `max_tokens` don't fit into the context."""
        ...

    def abort(self, id: Hashable) -> Chunk | None:
        """Forget a request, running or waiting; unknown ids are ignored. Returns the tokens, if any, that it has made
        since its last chunk."""
        ...

    def step(self) -> list[Chunk]:
        """Admit what fits, generate one token for every running request; empty when there is nothing to do."""
        ...

    def load_weights(self, version: int, tensors: Iterable[WeightTensor], lasting: bool = False) -> None:
        """Switch to a version, between two steps. Running requests go on. Raises before anything was changed when
        names, shapes or dtypes don't match; the old weights stay in force then. `lasting`: the memory of the tensors
        stays as it is until the next call has returned, so that weights may be used in place."""
        ...

    def capacity(self) -> Capacity: ...
