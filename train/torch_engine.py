"""The `torch` training engine: a Hugging Face decoder, plain on one rank and FSDP2 over several.

What a step is made of, on every rank:

    forward_backward(samples, loss)      plan → [micro-batch → log-probs → loss → backward] × rounds → reduce
      rounds = most micro-batches of any rank; a rank with fewer runs fillers of two tokens, so collectives match
      gradients stay on the rank until the last round, which reduces them (a sum, since the loss is divided by
      global denominators)
    optim_step(step)                     global norm → clip → AdamW on float32 masters → compute weights
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from headrace.comm.errors import HeadraceError
from headrace.comm.files import written_whole
from headrace.comm.weights import TensorSpec, WeightTensor
from headrace.train import engine_state
from headrace.train.batch import Denominators, LossFunction, PackedBatch, TrainSample
from headrace.train.collectives import Peers
from headrace.train.config import TrainConfig
from headrace.train.engine import StepResult
from headrace.train.master import divide, master_weights
from headrace.train.model import PolicyModel, fsdp_units, load_model, prepare_round, shard
from headrace.train.optimizer import clip, global_norm, learning_rate, make_adamw
from headrace.train.packing import filler_sample, pack, plan_micro_batches
from headrace.train.scoring import packed_logprobs, score


class TorchTrainEngine:
    """See `TrainEngine` for the calls. All ranks of `group` make every call, in one order.

    `dtype` is that of the forward and backward pass (`float32` or `bfloat16`); master weights are float32.
    `total_steps` ends the learning-rate schedule. `group` is the default process group, or None for one rank.
    `deterministic` makes torch refuse kernels whose result varies between runs (process-wide).
    `temperature` divides the logits, so that log-probs are those of the distribution sampled from.
    Raises DataError if the model folder can't be used.
    """

    def __init__(
        self,
        model_folder: Path,
        config: TrainConfig,
        dtype: str,
        total_steps: int,
        device: torch.device,
        group: dist.ProcessGroup | None,
        seed: int,
        deterministic: bool,
        temperature: float = 1.0,
    ) -> None:
        torch.manual_seed(seed)
        torch.use_deterministic_algorithms(deterministic)
        self.config = config
        self.total_steps = total_steps
        self.device = device
        self.dtype = getattr(torch, dtype)
        self.peers = Peers(group if group is not None and group.size() > 1 else None, device)
        causal_lm = load_model(model_folder, config.activation_checkpointing).to(device)
        self.policy = PolicyModel(causal_lm, temperature)
        if self.peers.group is not None:
            shard(self.policy, self.peers.group, device, self.dtype)
        self.weights = master_weights(causal_lm, self.dtype)
        self.reset_optimizer()

    # Log-probs and gradients

    def forward(self, samples: Sequence[TrainSample]) -> list[npt.NDArray[np.float32]]:
        return score(self.policy, samples, self.config.micro_batch_tokens, self.peers)

    def forward_backward(
        self, samples: Sequence[TrainSample], loss: LossFunction, denominators: Denominators, policy_version: int
    ) -> dict[str, float]:
        samples = [sample for sample in samples if sample.loss_mask.any()]
        plan = plan_micro_batches([len(sample.tokens) for sample in samples], self.config.micro_batch_tokens)
        rounds = self.peers.largest(len(plan))
        totals: dict[str, list[Tensor]] = defaultdict(list)
        for number in range(rounds):
            prepare_round(self.policy, last=number == rounds - 1)
            self._fold_gradients()
            if number >= len(plan):
                self._backward_filler()
                continue
            batch = self._pack([samples[index] for index in plan[number]], policy_version)
            logprobs, entropy = packed_logprobs(self.policy, batch, batch.loss_mask != 0)
            output = loss(logprobs, entropy, batch, denominators)
            torch.autograd.backward(output.loss * self.peers.size)  # FSDP2 averages over the ranks: make it a sum
            for name, value in {"loss": output.loss, **output.stats}.items():
                totals[name].append(value.detach())
        sums = {name: sum(float(value) for value in values) for name, values in totals.items()}
        return {"loss": 0.0, **self.peers.sum_named(sums)}

    def _pack(self, samples: Sequence[TrainSample], policy_version: int) -> PackedBatch:
        return pack(samples or [filler_sample()], policy_version, self.device)

    def _backward_filler(self) -> None:
        """Gradient 0 through the whole model."""
        batch = self._pack([], policy_version=0)
        logprobs, _ = packed_logprobs(self.policy, batch, batch.positions > 0)
        torch.autograd.backward(logprobs.sum() * 0.0)

    def _fold_gradients(self) -> None:
        for weight in self.weights:
            weight.fold_gradient()

    # The update

    def optim_step(self, step: int, lr: float | None = None) -> StepResult:
        gradients = [weight.gradient() for weight in self.weights]
        norm = global_norm(gradients, self.peers)
        if not math.isfinite(norm):
            raise HeadraceError(
                f"The gradient of optimizer step {step} isn't finite (global norm {norm}), so the weights would be "
                "lost. Resume from the last checkpoint with a lower train.lr or a smaller train.grad_clip; if it "
                "happens at the first step, look at the loss and at the samples."
            )
        clip(gradients, norm, self.config.grad_clip)
        rate = learning_rate(self.config, step, self.total_steps) if lr is None else lr
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.updates += 1
        self._publish()
        self.zero_grad()
        return StepResult(norm, rate)

    def _publish(self) -> None:
        """Compute weights from masters; what FSDP2 had gathered is out of date."""
        for weight in self.weights:
            weight.publish()
        for unit in fsdp_units(self.policy):
            unit.reshard()

    def zero_grad(self) -> None:
        for weight in self.weights:
            weight.drop_gradient()

    def reset_optimizer(self) -> None:
        """Forget AdamW's moments and start its bias correction anew."""
        decayed = [weight.master for weight in self.weights if len(weight.shape) >= 2]
        undecayed = [weight.master for weight in self.weights if len(weight.shape) < 2]
        self.optimizer = make_adamw(self.config, decayed, undecayed)
        self.updates = 0

    # Weights out, state in and out

    def export_weights(self, dtype: str, share: int, shares: int) -> Iterator[WeightTensor]:
        for weight, owner in zip(self.weights, divide(self.weights, shares), strict=True):
            whole = weight.whole(weight.master.detach().to(getattr(torch, dtype)))
            if owner == share:
                data = whole.cpu().contiguous().flatten().view(torch.uint8).numpy()
                yield WeightTensor(TensorSpec(weight.name, dtype, tuple(weight.shape)), data)

    def save_state(self, folder: Path) -> None:
        engine_state.save(folder, self.weights, self.optimizer, self.updates, self.peers)

    def load_state(self, folder: Path) -> None:
        self.updates = engine_state.load(folder, self.weights, self.optimizer, self.peers)
        self._publish()
        self.zero_grad()

    def save_model(self, folder: Path) -> None:
        tensors: dict[str, Tensor] = {}
        for weight in self.weights:
            whole = weight.whole(weight.master.detach().to(self.dtype))
            if self.peers.rank == 0:
                tensors[weight.name] = whole.cpu().contiguous()
        if self.peers.rank == 0:
            with written_whole(folder, "The model folder") as partial:
                save_file(tensors, partial / "model.safetensors", {"format": "pt"})
                self._save_configs(partial)
        self.peers.largest(0)  # nobody goes on before the files are there

    def _save_configs(self, folder: Path) -> None:
        causal_lm = self.policy.causal_lm
        causal_lm.config.dtype = self.dtype
        causal_lm.config.save_pretrained(folder)
        if causal_lm.generation_config is not None:
            causal_lm.generation_config.save_pretrained(folder)
