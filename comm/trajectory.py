"""What a generator makes and a trainer learns from: one sampled trajectory, as plain numpy columns."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt


class Unit(NamedTuple):
    """The unit of work on the wire: one sample of one ticket, on its n-th attempt."""

    ticket: int
    sample: int
    attempt: int


class Trajectory(msgspec.Struct):
    """One sample. All columns have the length T of prompt plus response; row t describes token t itself.

    `logprobs[t]` is the log-probability with which the rollout policy sampled `tokens[t]` given the tokens before it,
    under exactly the distribution sampled from (temperature, top-p and top-k applied); 0 where nothing was sampled.
    `versions[t]` is the version of the weights that sampled it; -1 where nothing was sampled.
    """

    unit: Unit
    tokens: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.uint8]
    logprobs: npt.NDArray[np.float32]
    versions: npt.NDArray[np.int32]
    reward: float
    finish: str
    """`stop` (a stop token was sampled), `length`, or `cut` (its ledger asked for what there was)."""

    prompt_text: str = ""
    response_text: str = ""

    @property
    def born(self) -> int:
        """The oldest version among the sampled tokens, in the loss or not."""
        return int(self.versions[self.versions >= 0].min())

    @property
    def spans(self) -> list[tuple[int, int]]:
        """(version, tokens sampled by it), in order."""
        versions = self.versions[self.versions >= 0]
        starts = np.flatnonzero(np.diff(versions, prepend=-1))
        counts = np.diff(starts, append=len(versions))
        return list(zip(versions[starts].tolist(), counts.tolist(), strict=True))

    @property
    def response_length(self) -> int:
        """Sampled tokens, in the loss or not."""
        return int((self.versions >= 0).sum())
