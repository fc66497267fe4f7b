"""Makes `fixtures/verl.safetensors`: random ragged batches and what verl 0.9.1's own functions make of them.

verl pins its own versions of transformers and tensordict, so it lives in an environment of its own:

    python -m venv /tmp/verl
    /tmp/verl/bin/pip install torch==2.13.0 'transformers>=5.5.3,<5.11,!=5.6.0' tensordict==0.10.0 \\
        ray codetiming omegaconf numpy packaging
    /tmp/verl/bin/pip install --no-deps verl==0.9.1
    /tmp/verl/bin/python tests/train/make_verl_fixtures.py

Everything is computed in fp64 and stored in fp32. Tensors are [cases, …]; batches are padded to `ROWS` × `WIDTH` with
the mask telling what counts. `loss/…` has the loss of a case and `grad/…` its gradient in the current log-probs.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from verl.trainer.ppo import core_algos, rollout_corr_helper
from verl.workers.config import FSDPActorConfig

CASES, ROWS, WIDTH = 64, 4, 6
SAMPLES = 12
CAP = 2.0
CLIPS = {"symmetric": (0.2, 0.2, None), "higher": (0.2, 0.28, None), "dual": (0.2, 0.28, 3.0)}
NO_DUAL_CLIP = 1e12
MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
KL = {"k1": "kl", "k2": "mse", "k3": "low_var_kl"}

Case = dict[str, Tensor]


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    columns: dict[str, list[Tensor]] = {}
    for _ in range(CASES):
        case = random_case(generator)
        wide = {name: column.double() if column.is_floating_point() else column for name, column in case.items()}
        for name, tensor in {**case, **results(wide)}.items():
            columns.setdefault(name, []).append(tensor)
    tensors = {name: torch.stack(column).contiguous() for name, column in columns.items()}
    file = Path(__file__).parent / "fixtures" / "verl.safetensors"
    file.parent.mkdir(exist_ok=True)
    save_file({name: t.float() if t.is_floating_point() else t for name, t in tensors.items()}, file)
    print(f"{file}: {len(tensors)} tensors, {file.stat().st_size:,} bytes")


def random_case(generator: torch.Generator) -> Case:
    """Log-probs that differ a little as a rule and very much now and then; masks with holes; rewards with ties."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator)

    shape = (ROWS, WIDTH)
    rollout = -1.5 * normal(*shape).abs()
    proximal = rollout + 0.3 * normal(*shape)
    outlier = normal(*shape) * (3.0 * (uniform(*shape) < 0.1) + 25.0 * (uniform(*shape) < 0.01))
    lengths = torch.randint(0, WIDTH + 1, (ROWS, 1), generator=generator)
    lengths[0] = WIDTH
    mask = (torch.arange(WIDTH) < lengths) & (uniform(*shape) < 0.85)
    mask[0, 0] = True
    return {
        "rollout": rollout,
        "proximal": proximal,
        "current": proximal + 0.4 * normal(*shape) + outlier,
        "reference": proximal + 0.5 * normal(*shape) + outlier.roll(1, dims=1),
        "advantages": normal(ROWS, 1).expand(shape) * (uniform(ROWS, 1) < 0.9),
        "mask": mask.float(),
        "rewards": (uniform(SAMPLES) * 4).round() / 4 if uniform(1) < 0.5 else normal(SAMPLES),
        "groups": torch.randint(0, 6, (SAMPLES,), generator=generator),
    }


def results(case: Case) -> Case:
    return advantages(case) | aggregates(case) | policy_losses(case) | corrected_losses(case) | own(case) | kl(case)


def advantages(case: Case) -> Case:
    rewards, ones, groups = case["rewards"].unsqueeze(1), torch.ones(SAMPLES, 1).double(), case["groups"].numpy()

    def of(by_std: bool) -> Tensor:
        return core_algos.compute_grpo_outcome_advantage(rewards, ones, groups, norm_adv_by_std_in_grpo=by_std)[0]

    leave_one_out, _ = core_algos.compute_rloo_outcome_advantage(rewards, ones, groups)
    return {
        "advantage/grpo": of(True)[:, 0],
        "advantage/dr_grpo": of(False)[:, 0],
        "advantage/rloo": leave_one_out[:, 0],
    }


def aggregates(case: Case) -> Case:
    return {f"aggregate/{mode}": core_algos.agg_loss(case["current"], case["mask"], mode) for mode in MODES}


def policy_losses(case: Case) -> Case:
    found: Case = {}
    for clip in CLIPS:
        for mode in MODES:
            found |= loss_and_grad(f"ppo/{clip}/{mode}", vanilla(case, "rollout", clip, mode), case)
        _, metrics = vanilla(case, "rollout", clip, "token-mean")(case["current"])
        found[f"clip_fraction/{clip}"] = torch.tensor(metrics["actor/pg_clipfrac"] + metrics["actor/pg_clipfrac_lower"])
    return found


def corrected_losses(case: Case) -> Case:
    found: Case = {}
    log_weights = case["proximal"] - case["rollout"]
    for level, cap in (("token", CAP), ("sequence", CAP), ("token", 1e12)):
        name = f"tis_{level}" if cap == CAP else "decoupled"
        weights, _ = rollout_corr_helper.compute_rollout_correction_weights(log_weights, case["mask"], level, cap)
        found[f"weights/{name}"] = weights
        for mode in MODES:
            found |= loss_and_grad(f"{name}/{mode}", vanilla(case, "proximal", "dual", mode, weights), case)
    return found


def own(case: Case) -> Case:
    """REINFORCE with the ratio as weight, and CISPO, the example of a loss of one's own."""
    mask, config = case["mask"], actor_config("higher")
    log_weights = case["current"] - case["rollout"]
    weights, _ = rollout_corr_helper.compute_rollout_correction_weights(log_weights, mask, "token", 1e12)

    def reinforce(current: Tensor) -> tuple[Tensor, dict[str, float]]:
        return core_algos.compute_policy_loss_reinforce(
            case["rollout"], current, case["advantages"], mask, "token-mean", config, weights
        )

    def cispo(current: Tensor) -> tuple[Tensor, dict[str, float]]:
        return core_algos.compute_policy_loss_cispo(
            case["rollout"], current, case["advantages"], mask, "token-mean", config
        )

    return loss_and_grad("reinforce", reinforce, case) | loss_and_grad("cispo", cispo, case)


def kl(case: Case) -> Case:
    found: Case = {}
    for name, form in KL.items():
        current = case["current"].clone().requires_grad_()
        penalty = core_algos.kl_penalty(current, case["reference"], form)
        found[f"kl/{name}"], found[f"grad/kl/{name}"] = penalty.detach(), torch.autograd.grad(penalty.sum(), current)[0]
    return found


PolicyLoss = Callable[[Tensor], tuple[Tensor, dict[str, float]]]


def vanilla(case: Case, old: str, clip: str, mode: str, weights: Tensor | None = None) -> PolicyLoss:
    def loss(current: Tensor) -> tuple[Tensor, dict[str, float]]:
        return core_algos.compute_policy_loss_vanilla(
            case[old], current, case["advantages"], case["mask"], mode, actor_config(clip), weights
        )

    return loss


def actor_config(clip: str) -> FSDPActorConfig:
    low, high, dual = CLIPS[clip]
    return FSDPActorConfig(
        clip_ratio_low=low, clip_ratio_high=high, clip_ratio_c=dual or NO_DUAL_CLIP, rollout_n=1, use_dynamic_bsz=True
    )


def loss_and_grad(name: str, loss: PolicyLoss, case: Case) -> Case:
    current = case["current"].clone().requires_grad_()
    value, _ = loss(current)
    return {f"loss/{name}": value.detach(), f"grad/{name}": torch.autograd.grad(value, current)[0]}


if __name__ == "__main__":
    main()
