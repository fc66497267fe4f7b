"""How the next token is drawn from the logits, for all rows of a batch at once."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headrace.comm.errors import HeadraceError

FIRST_WIDTH = 256
"""How many of the likeliest tokens top-p looks at first; more are sorted only if these don't hold enough mass."""


def sample(
    logits: Tensor,
    temperature: npt.NDArray[np.float32],
    top_k: npt.NDArray[np.int64],
    top_p: npt.NDArray[np.float32],
    uniform: npt.NDArray[np.float32],
) -> tuple[Tensor, Tensor]:
    """Draw one token per row by the inverse of the cumulative distribution.

    The distribution is softmax(logits / temperature), restricted to the `top_k` likeliest tokens (0: all) and then to
    the likeliest tokens that hold at least `top_p` of what is left, and renormalised. Tokens as likely as the last one
    kept are kept too, so the distribution doesn't depend on how ties are sorted.
    At temperature 0 the likeliest token is taken, and its log-probability is that of temperature 1 over the whole
    vocabulary (the point mass itself would say 0 always).

    Args:
        logits: [n, vocabulary] float32.
        temperature, top_k, top_p: [n].
        uniform: [n] in [0, 1), one random number per row.

    Returns:
        tokens [n] int64 and their log-probabilities [n] float32.

    Raises:
        HeadraceError: the logits aren't numbers.
    """
    greedy = temperature == 0
    scores = logits / _column(np.where(greedy, np.float32(1), temperature), logits)
    scores -= scores.amax(-1, keepdim=True)
    weights = scores.exp()
    restricted = np.flatnonzero(~greedy & ((top_k > 0) | (top_p < 1)))
    if restricted.size:
        _restrict(weights, restricted, top_k, top_p)
    cumulative = weights.cumsum(-1)
    total = cumulative[:, -1:]
    if not bool(total.isfinite().all()):
        raise HeadraceError(
            "The model's logits aren't finite numbers, so nothing can be sampled: the weights have diverged. Start"
            " again from an earlier checkpoint with a lower train.lr or train.grad_clip, or with model.dtype float32."
        )
    # uniform ≤ 1 - 2**-24, so uniform * total < total also after rounding, and a token of weight 0 is never hit.
    tokens = torch.searchsorted(cumulative, _column(uniform, logits) * total, right=True)
    if greedy.any():
        tokens = torch.where(_column(greedy, logits), scores.argmax(-1, keepdim=True), tokens)
    return tokens[:, 0], (scores.gather(1, tokens) - total.log())[:, 0]


def _column(values: npt.NDArray[np.generic], like: Tensor) -> Tensor:
    """[n] → [n, 1] on the device of `like`."""
    return torch.from_numpy(values).to(like.device)[:, None]


def _restrict(
    weights: Tensor, rows: npt.NDArray[np.intp], top_k: npt.NDArray[np.int64], top_p: npt.NDArray[np.float32]
) -> None:
    """Zero, in place, what top-k and top-p leave out of these rows."""
    index = torch.from_numpy(rows).to(weights.device)
    chosen = weights[index]
    threshold = _threshold(chosen, top_k[rows], top_p[rows])
    weights[index] = chosen.where(chosen >= threshold, 0)


def _threshold(weights: Tensor, top_k: npt.NDArray[np.int64], top_p: npt.NDArray[np.float32]) -> Tensor:
    """[n, 1] the smallest weight that is kept in each row of `weights` [n, vocabulary]."""
    vocabulary = weights.shape[1]
    counts = np.where(top_k > 0, np.minimum(top_k, vocabulary), vocabulary)
    nucleus = top_p < 1
    width = min(vocabulary, max(int(counts[counts < vocabulary].max(initial=1)), FIRST_WIDTH if nucleus.any() else 1))
    share, limited = _column(np.where(nucleus, top_p, np.float32(0)), weights), _column(counts < vocabulary, weights)
    while True:
        head = weights.topk(width).values
        last = head.gather(1, _column(np.minimum(counts, width) - 1, weights)).where(limited, 0)
        mass = weights.where(weights >= last, 0).cumsum(-1)[:, -1:]
        reached = head.where(head >= last, 0).cumsum(-1) >= share * mass
        if width == vocabulary or bool(reached[:, -1].all()):
            break
        width = min(vocabulary, width * 8)
    reached[:, -1] = True
    smallest = head.gather(1, reached.to(torch.uint8).argmax(-1, keepdim=True))
    return torch.maximum(last, smallest.where(share > 0, 0))
