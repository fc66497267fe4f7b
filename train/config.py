"""The section `train` of the config."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator
from typing_extensions import Self

from headrace.comm.config import Section


class WarmStartConfig(Section):
    """Supervised training before the first step, by the same engine."""

    file: Path | None = None
    """JSONL with `prompt` and `response`; without it the environment's own questions and answers are used."""

    steps: int = Field(200, ge=1)
    """Optimizer steps."""

    batch: int = Field(64, ge=1)
    """Examples per step."""

    lr: float = Field(1e-3, gt=0)
    """Learning rate; it falls linearly to a tenth."""


class TrainConfig(Section):
    """How the model learns from the samples."""

    advantage: str = "grpo"
    """`grpo`, `dr_grpo`, or `package.module:function` / `path/to/file.py:function` of your own."""

    loss: str = "ppo"
    """`ppo` (clip-higher and dual clip by the options below), `decoupled_ppo`, `importance_sampling`, or your own by
    import path."""

    clip_low: float = Field(0.2, ge=0)
    """The ratio is clipped below at 1 - this."""

    clip_high: float = Field(0.2, ge=0)
    """The ratio is clipped above at 1 + this."""

    clip_dual: float | None = Field(None, gt=1)
    """Dual clip: for negative advantages the loss is bounded by this times the advantage. None leaves it out."""

    correction: Literal["none", "tis_token", "tis_sequence"] = "none"
    """Truncated importance sampling between rollout and training policy, by token or by sequence."""

    correction_cap: float = Field(2.0, gt=0)
    """Where the importance weight is truncated."""

    kl: Literal["none", "k1", "k2", "k3"] = "none"
    """Penalty on the divergence from the initial model, added to the loss with weight `kl_weight`."""

    kl_weight: float = Field(0.0, ge=0)
    """Weight of that penalty."""

    aggregation: Literal["token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "seq_mean_token_sum_norm"] = (
        "token_mean"
    )
    """How the losses of the tokens become one number, with denominators over the whole step."""

    lr: float = Field(1e-6, ge=0)
    """Learning rate of AdamW at its height."""

    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate after the warm-up, towards `lr_floor` times `lr` at the last step."""

    warmup_steps: int = Field(0, ge=0)
    """Steps over which the learning rate rises linearly from 0."""

    lr_floor: float = Field(0.0, ge=0, le=1)
    """Share of `lr` that is left at the last step."""

    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of AdamW's moments."""

    eps: float = Field(1e-8, gt=0)
    """AdamW's epsilon."""

    weight_decay: float = Field(0.0, ge=0)
    """AdamW's decoupled weight decay."""

    grad_clip: float = Field(1.0, ge=0)
    """Largest global norm of the gradient; 0 means no clipping."""

    micro_batch_tokens: int = Field(4096, ge=1)
    """Tokens in one packed micro-batch; a longer sample gets one of its own."""

    activation_checkpointing: bool = False
    """Recompute each decoder layer's activations in the backward pass."""

    warm_start: WarmStartConfig | None = None
    """Supervised training before the first step."""

    @model_validator(mode="after")
    def _kl_has_weight(self) -> Self:
        if (self.kl == "none") != (self.kl_weight == 0):
            raise ValueError("train.kl and train.kl_weight go together: give both or neither")
        return self
