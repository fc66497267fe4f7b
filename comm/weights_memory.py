"""How much memory the weight channel takes at its peak, from sizes and config alone: for planners, without torch.

    host    trainer    mpi: snapshots of its share · collective: one, and a bucket of the other trainers' shares
            generator  whole versions that arrive; with `node_shared` they are the node's
            node       with `node_shared`: the buffers that its generators share, whichever of them pulls
    device  each rank  collective on an accelerator: one bucket, and what HCCL takes for the group

Not counted, since it is small: manifests and checksums (tens of bytes per tensor), headers, and up to 64 MiB that
malloc keeps of smaller buffers. Nor what others own: the weights in the engines, the trainers' process group, and
NCCL's buffers, which depend on topology and release.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from headrace.comm.weights_mpi import SNAPSHOTS
from headrace.comm.weights_node import BUFFERS
from headrace.comm.weights_pull import LASTING, STAGING, WINDOW

HCCL_BUFFERS = 2
"""HCCL takes `HCCL_BUFFSIZE` so many times per group."""

Parts = dict[str, int]
"""What for → bytes."""


@dataclass(frozen=True, slots=True)
class ChannelMemory:
    """Most bytes that are touched at once, by what they are for."""

    trainer_host: Parts
    """Of the trainer with the largest share."""
    generator_host: Parts
    """Of every generator."""
    node_host: Parts
    """Of every node with generators, beside those of its ranks."""
    trainer_device: Parts
    """Of every trainer."""
    generator_device: Parts
    """Of every generator."""

    def host_of_node(self, trainers: int, generators: int) -> int:
        """Bytes of host memory of a node with so many ranks of each role."""
        shared = sum(self.node_host.values()) if generators else 0
        own = trainers * sum(self.trainer_host.values()) + generators * sum(self.generator_host.values())
        return shared + own


def weights_memory(
    shares: Sequence[int],
    transport: Literal["mpi", "collective"],
    bucket_bytes: int,
    delta: bool = False,
    node_shared: bool = False,
    used_in_place: bool = False,
    accelerator: bool = False,
    hccl_buffer_bytes: int = 0,
) -> ChannelMemory:
    """The peak of a channel.

    Args:
        shares: bytes of each trainer's share of a version, in the number format on the wire.
        transport: what `weights.transport` comes to.
        bucket_bytes: `weights.bucket_mb` in bytes.
        delta: `weights.encoding: delta`.
        node_shared: `weights.node_shared`.
        used_in_place: engines use weights where they have arrived; one of the versions is then the engine's own.
        accelerator: whether weights go through a device.
        hccl_buffer_bytes: `HCCL_BUFFSIZE` in bytes; 0 where the device group isn't HCCL's.
    """
    if transport == "collective":
        return _collective(shares, bucket_bytes, accelerator, hccl_buffer_bytes)
    share, version = max(shares), sum(shares)
    snapshots = SNAPSHOTS + delta
    trainer = {"snapshots": snapshots * share, "the last of them while it grows": share}
    buffers = BUFFERS if node_shared else LASTING if used_in_place else STAGING
    staging = {"whole versions": buffers * version}
    generator: Parts = {}
    if delta:
        # A generator has the version before in general; what has changed since is kept with each snapshot, and is
        # never longer than the share.
        trainer["what has changed"] = snapshots * share
        generator["what has changed, on its way"] = sum(min(each, WINDOW * bucket_bytes) for each in shares)
    if node_shared:
        return ChannelMemory(trainer, generator, staging, {}, {})
    return ChannelMemory(trainer, staging | generator, {}, {}, {})


def _collective(shares: Sequence[int], bucket_bytes: int, accelerator: bool, hccl_buffer_bytes: int) -> ChannelMemory:
    share = max(shares)
    trainer = {"its share": share, "the same while it grows": share}
    if len(shares) > 1:
        trainer["a bucket of the others"] = min(bucket_bytes, share)
    device: Parts = {"a bucket": bucket_bytes} if accelerator else {}
    if hccl_buffer_bytes:
        device["HCCL"] = HCCL_BUFFERS * hccl_buffer_bytes
    return ChannelMemory(trainer, {"a whole version": sum(shares)}, {}, device, device)
