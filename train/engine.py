"""The interface of a training engine, in the style of Tinker: the same calls serve supervised fine-tuning and RL.

Engines know nothing of RL; algorithms know nothing of engines. Every call is made by all trainer ranks, in one order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from headrace.comm.weights import WeightTensor
from headrace.train.batch import Denominators, LossFunction, TrainSample


@dataclass(frozen=True, slots=True)
class StepResult:
    """What `optim_step` did."""

    grad_norm: float
    """Global norm before clipping."""
    lr: float


class TrainEngine(Protocol):
    """A model that learns."""

    def forward(self, samples: Sequence[TrainSample]) -> list[npt.NDArray[np.float32]]:
        """Log-probabilities of every token of every sample under the current weights, [T] each; no gradient.
        Each rank gives its own samples (perhaps none) and gets theirs back."""
        ...

    def forward_backward(
        self, samples: Sequence[TrainSample], loss: LossFunction, denominators: Denominators, policy_version: int
    ) -> dict[str, float]:
        """Add the gradient of the loss over this rank's samples; return `loss` and the loss's stats summed over all
        ranks. After it every rank's gradient is the sum over all ranks."""
        ...

    def optim_step(self, step: int, lr: float | None = None) -> StepResult:
        """Clip, apply AdamW with the learning rate of optimizer step `step` (0, 1, …) or with `lr`, zero the
        gradients. Raises HeadraceError, on every rank, if the gradient isn't finite."""
        ...

    def zero_grad(self) -> None: ...

    def reset_optimizer(self) -> None:
        """Forget AdamW's moments and start its bias correction anew."""
        ...

    def export_weights(self, dtype: str, share: int, shares: int) -> Iterator[WeightTensor]:
        """The weights under their Hugging Face names in the wire dtype; tied tensors once. The tensors are divided
        into `shares` parts of about equal bytes; only those of part `share` are yielded, but all ranks take part."""
        ...

    def save_state(self, folder: Path) -> None:
        """Write fp32 master weights, optimizer and RNG, one file per rank, safetensors only; any number of ranks can
        load them."""
        ...

    def load_state(self, folder: Path) -> None: ...

    def save_model(self, folder: Path) -> None:
        """Write a new Hugging Face folder (config, safetensors), whole or not at all; tokenizer files are the caller's.
        Raises HeadraceError if it can't be written."""
        ...
