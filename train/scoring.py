"""Log-probabilities without gradient: of the current weights, and of the frozen model that a KL penalty refers to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from headrace.train.attention import group_sequences
from headrace.train.batch import PackedBatch, TrainSample
from headrace.train.collectives import Peers
from headrace.train.model import PolicyModel, load_model, shard
from headrace.train.packing import filler_sample, pack, plan_micro_batches


def packed_logprobs(policy: PolicyModel, batch: PackedBatch, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies, float32 [N], of the tokens where `wanted` (bool [N]); 0 elsewhere."""
    rows = wanted.nonzero().flatten()
    groups = group_sequences(batch.starts.diff().tolist(), batch.tokens.device)
    found = policy(batch.tokens, batch.positions, rows, groups)
    logprobs, entropy = (values.new_zeros(len(wanted)).index_put((rows,), values) for values in found)
    return logprobs, entropy


@torch.no_grad()
def score(
    policy: PolicyModel, samples: Sequence[TrainSample], micro_batch_tokens: int, peers: Peers
) -> list[npt.NDArray[np.float32]]:
    """Log-probs of every token of every sample, float32 [T] each. Every rank calls it, with its own samples or none."""
    plan = plan_micro_batches([len(sample.tokens) for sample in samples], micro_batch_tokens)
    results: list[npt.NDArray[np.float32]] = [np.zeros(0, np.float32)] * len(samples)
    for number in range(peers.largest(len(plan))):
        chosen = plan[number] if number < len(plan) else []
        batch = pack([samples[index] for index in chosen] or [filler_sample()], 0, peers.device)
        logprobs, _ = packed_logprobs(policy, batch, batch.positions > 0)
        ends = batch.starts[1:-1].tolist()
        for index, piece in zip(chosen, np.split(logprobs.cpu().numpy(), ends), strict=False):
            results[index] = piece.copy()
    return results


class ReferenceModel:
    """A frozen model beside the one that is trained, sharded over the ranks like it.

    `model_folder` is a Hugging Face folder; the other arguments are those of `TorchTrainEngine`.
    Raises DataError if the folder can't be used.
    """

    def __init__(
        self,
        model_folder: Path,
        micro_batch_tokens: int,
        dtype: str,
        device: torch.device,
        group: dist.ProcessGroup | None,
        temperature: float,
    ) -> None:
        self._micro_batch_tokens = micro_batch_tokens
        self._peers = Peers(group if group is not None and group.size() > 1 else None, device)
        compute_dtype: torch.dtype = getattr(torch, dtype)
        causal_lm = load_model(model_folder, activation_checkpointing=False).to(device).requires_grad_(False)
        if self._peers.group is None:
            causal_lm = causal_lm.to(compute_dtype)
        self._policy = PolicyModel(causal_lm, temperature)
        if self._peers.group is not None:
            shard(self._policy, self._peers.group, device, compute_dtype)

    def forward(self, samples: Sequence[TrainSample]) -> list[npt.NDArray[np.float32]]:
        """As `TrainEngine.forward`."""
        return score(self._policy, samples, self._micro_batch_tokens, self._peers)
