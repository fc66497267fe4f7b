"""How the losses of tokens become one number.

Every mode is a weighted sum over tokens, and the weights contain the denominators of the *whole step*. So the loss of
a step is the plain sum over micro-batches and ranks, whatever the packing, as long as no sequence is torn apart.
With m the loss mask, and the sums of m and the number of sequences with any token in the loss taken over the step:

    token_mean               m / Σm                          DAPO (arXiv:2503.14476), section 3.3
    seq_mean_token_sum       m / sequences
    seq_mean_token_mean      m / (Σ_sequence m) / sequences  GRPO (arXiv:2402.03300), eq. 3
    seq_mean_token_sum_norm  m / max_tokens / sequences      Dr. GRPO (arXiv:2503.20783), section 3.2
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from headrace.train.batch import Denominators, PackedBatch
from headrace.train.registry import Registry

AggregationMode = Callable[[PackedBatch, Denominators], Tensor]
"""(micro-batch, denominators) → weight of every token [N]."""

AGGREGATIONS: Registry[AggregationMode] = Registry("train.aggregation")


@AGGREGATIONS.register("token_mean")
def token_mean(batch: PackedBatch, denominators: Denominators) -> Tensor:
    """Every token of the step weighs the same."""
    return batch.loss_mask / (denominators.tokens or 1.0)


@AGGREGATIONS.register("seq_mean_token_sum")
def seq_mean_token_sum(batch: PackedBatch, denominators: Denominators) -> Tensor:
    """Mean over sequences of the sum over their tokens."""
    return batch.loss_mask / (denominators.sequences or 1)


@AGGREGATIONS.register("seq_mean_token_mean")
def seq_mean_token_mean(batch: PackedBatch, denominators: Denominators) -> Tensor:
    """Mean over sequences of the mean over their tokens: every sequence weighs the same."""
    length = sum_per_sequence(batch.loss_mask, batch)
    length = length.where(length > 0, 1.0)
    return batch.loss_mask / length[batch.sequence_ids] / (denominators.sequences or 1)


@AGGREGATIONS.register("seq_mean_token_sum_norm")
def seq_mean_token_sum_norm(batch: PackedBatch, denominators: Denominators) -> Tensor:
    """Mean over sequences of the sum over their tokens divided by the longest possible response."""
    return batch.loss_mask / denominators.max_tokens / (denominators.sequences or 1)


def weighted_sum(values: Tensor, weights: Tensor) -> Tensor:
    """Σ weights · values, scalar; what stands where the weight is 0 doesn't matter, not even NaN."""
    return (values * weights).where(weights != 0, 0.0).sum()


def sum_per_sequence(values: Tensor, batch: PackedBatch) -> Tensor:
    """Sums of `values` [N] over each of the n sequences of the micro-batch, [n]."""
    return values.new_zeros(len(batch.starts) - 1).index_add(0, batch.sequence_ids, values)
