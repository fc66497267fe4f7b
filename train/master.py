"""Master weights: what the optimizer sees of a model.

| world | compute weights | master weights | gradient |
|---|---|---|---|
| one rank, float32 | the model's parameters | the same tensors | the parameters' own |
| one rank, bfloat16 | the model's parameters, a bfloat16 copy | float32 | summed over micro-batches in float32 |
| several ranks | gathered by FSDP2 in the compute dtype | this rank's float32 shards | reduced by FSDP2 in float32 |
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


@dataclass(slots=True)
class MasterWeight:
    """One weight of the model."""

    name: str
    """As in the Hugging Face checkpoint."""
    parameter: nn.Parameter
    """The model's own: plain, or a DTensor sharded along dimension 0."""
    master: Tensor
    """float32, this rank's part."""

    @property
    def shape(self) -> torch.Size:
        """Of the whole weight."""
        return self.parameter.shape

    @property
    def rows(self) -> slice:
        """The rows of the whole weight that this rank holds (FSDP2 shards like `torch.chunk`)."""
        if not isinstance(self.parameter, DTensor):
            return slice(0, self.shape[0])
        mesh = self.parameter.device_mesh
        chunk = -(-self.shape[0] // mesh.size())
        start = min(mesh.get_local_rank() * chunk, self.shape[0])
        return slice(start, start + self.master.shape[0])

    def fold_gradient(self) -> None:
        """Move the gradient of the last backward pass into the float32 sum, where the two differ."""
        gradient = self.parameter.grad
        if gradient is None or self.master is self.parameter:
            return
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        if self.master.grad is None:
            self.master.grad = local.float()
        else:
            self.master.grad.add_(local)
        self.parameter.grad = None

    def gradient(self) -> Tensor:
        """The float32 sum so far; zeros if nothing was added."""
        self.fold_gradient()
        if self.master.grad is None:
            self.master.grad = torch.zeros_like(self.master)
        return self.master.grad

    def drop_gradient(self) -> None:
        self.parameter.grad = self.master.grad = None

    @torch.no_grad()
    def publish(self) -> None:
        """Bring the compute weights up to date with the master weights."""
        if not isinstance(self.parameter, DTensor) and self.master is not self.parameter:
            self.parameter.copy_(self.master)

    @torch.no_grad()
    def whole(self, local: Tensor) -> Tensor:
        """The whole tensor of which each rank holds `local`, shaped like `master`; all ranks take part."""
        if not isinstance(self.parameter, DTensor):
            return local
        sharded = DTensor.from_local(
            local,
            self.parameter.device_mesh,
            self.parameter.placements,
            run_check=False,
            shape=self.parameter.shape,
            stride=self.parameter.stride(),
        )
        return sharded.full_tensor()


def master_weights(causal_lm: nn.Module, compute_dtype: torch.dtype) -> list[MasterWeight]:
    """Split a float32 (perhaps sharded) model into compute and master weights; tied weights appear once."""
    return [_split(name, parameter, compute_dtype) for name, parameter in causal_lm.named_parameters()]


@torch.no_grad()
def _split(name: str, parameter: nn.Parameter, compute_dtype: torch.dtype) -> MasterWeight:
    if isinstance(parameter, DTensor):
        return MasterWeight(name, parameter, parameter.to_local().detach().requires_grad_())
    if compute_dtype == torch.float32:
        return MasterWeight(name, parameter, parameter)
    master = parameter.detach().clone().requires_grad_()
    parameter.data = parameter.data.to(compute_dtype)
    return MasterWeight(name, parameter, master)


def divide(weights: list[MasterWeight], shares: int) -> list[int]:
    """The share of each weight: parts of about equal size, the largest weights first to the emptiest share."""
    filled = [0] * shares
    share_of = [0] * len(weights)
    for index in sorted(range(len(weights)), key=lambda i: (-weights[i].shape.numel(), i)):
        share_of[index] = filled.index(min(filled))
        filled[share_of[index]] += weights[index].shape.numel()
    return share_of
