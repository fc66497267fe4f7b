"""The `weights` section of the config, and the base class of every section."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from typing_extensions import Self


class Section(BaseModel):
    """Base of all config sections: unknown keys are refused, the text under a field is its documentation."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True)


class WeightsConfig(Section):
    """How a new version of the weights gets from the trainers to the generators."""

    transport: Literal["auto", "mpi", "collective"] = "auto"
    """`mpi`: host-staged, in the background, from a snapshot; a generator takes in the newest whole version when it
    is ready. `collective`: bucketed broadcast on a device group (HCCL, NCCL or gloo) at which all generators meet.
    `auto`: `collective` on accelerators, `mpi` on CPU and with `encoding: delta` or `node_shared`."""

    node_shared: bool = False
    """One copy of a version per node, in memory that its generators share: one of them pulls it, all load from it in
    place. It takes two buffers of a version per node, three while a generator is slow to load, instead of two per
    generator. Transport `mpi` only; the generators of a host run as one user and see each other in /proc."""

    dtype: Literal["model", "float32", "bfloat16", "float16"] = "model"
    """Number format on the wire. `model`: the dtype of `model.dtype`."""

    encoding: Literal["full", "delta"] = "full"
    """`full`: all bytes of every version. `delta`: where a generator has the version before, only what has changed
    since, bit for bit; in bfloat16 most weights stay what they are in a small step. Whether that is sooner done is
    measured, and all bytes are sent where it isn't. Transport `mpi` only; a trainer keeps a version more."""

    verify: bool = False
    """Check every load by checksum (xxh3 of every tensor, as sent and as received)."""

    publish_every: int = Field(1, ge=1)
    """Optimizer steps per published version. `ledger.max_staleness` counts publications."""

    bucket_mb: int = Field(64, ge=1, le=1024)
    """Size of one message or broadcast, in MiB. Larger tensors are split over several."""

    @model_validator(mode="after")
    def _a_broadcast_has_no_delta(self) -> Self:
        if self.encoding == "delta" and self.transport == "collective":
            raise ValueError("weights.encoding: delta needs weights.transport: mpi; a broadcast sends all bytes")
        return self

    @model_validator(mode="after")
    def _a_broadcast_goes_to_every_generator(self) -> Self:
        if self.node_shared and self.transport == "collective":
            raise ValueError(
                "weights.node_shared needs weights.transport: mpi; in a broadcast every generator receives for itself"
            )
        return self
