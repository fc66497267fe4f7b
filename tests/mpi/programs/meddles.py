"""A rank of a job in which something goes wrong in the middle of a transfer. FAULT is `DEED:PLACE:RANK:TIME`: what the
rank does at the TIME-th event of that place.

kill     it is gone
stop     it does nothing for STOP_S seconds, none of its threads
corrupt  a byte of what is sent is changed on its way
raise    an exception

samples    the owner has begun to answer a pull, and most of the data is to follow
pull       the consumer has asked, and the answer is on its way
bucket     a trainer has begun to send a bucket of the weights (weights.transport: mpi)
part       a generator has received one, and more are to come
broadcast  a bucket is about to be broadcast (weights.transport: collective)
root       the same, by this rank
load       the engine is about to load a whole version
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from headrace.comm.messages import Message, Pull, Pulled, WeightsPart
from headrace.comm.mpi import MpiTransport
from headrace.comm.transport import Buffer, Received
from headrace.comm.weights import WeightTensor
from headrace.comm.weights_pull import MpiSubscriber
from headrace.ranks.seat import rank_of
from headrace.ranks.start import main
from headrace.rollout.latency_engine import LatencyEngine

DEED, PLACE, RANK, TIME = os.environ["FAULT"].split(":")
STOP_S = 2
seen = 0


def due(place: str, rank: int) -> bool:
    """Whether this is the moment."""
    global seen
    if place != PLACE or rank != int(RANK):
        return False
    seen += 1
    if seen == int(TIME):
        print(f"meddled: {DEED} at {PLACE}", flush=True)
    return seen == int(TIME)


def act() -> None:
    """For deeds that concern the whole process."""
    if DEED == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif DEED == "stop":
        subprocess.Popen(["sh", "-c", f"sleep {STOP_S}; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
    elif DEED == "raise":
        raise RuntimeError("the engine is out of order")


def changed(data: Buffer) -> Buffer:
    """A copy with another byte in its middle."""
    other = data.copy()
    other[other.size // 2] ^= 1
    return other


send, receive, load = MpiTransport.send, MpiSubscriber.receive, LatencyEngine.load_weights


def meddling_send(self: MpiTransport, target: int, message: Message, buffers: Sequence[Buffer] = ()) -> None:
    place = {Pull: "pull", Pulled: "samples", WeightsPart: "bucket"}.get(type(message), "")
    now = due(place, self.rank)
    send(self, target, message, [changed(each) for each in buffers] if now and DEED == "corrupt" else buffers)
    if now:
        act()


def meddling_receive(self: MpiSubscriber, received: Received, now: float) -> None:
    if isinstance(received.message, WeightsPart) and due("part", self._transport.rank):
        act()
    receive(self, received, now)


def meddling_load(self: LatencyEngine, version: int, tensors: Iterable[WeightTensor], lasting: bool = False) -> None:
    if due("load", rank_of(os.environ)):
        act()
    load(self, version, tensors, lasting)


class Handle:
    """A process group that meddles."""

    def __init__(self, handle: Any, rank: int, place: int) -> None:
        self._handle, self._rank, self._place = handle, rank, place

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)

    def broadcast(self, tensor: Any, root: int) -> Any:
        if due("broadcast", self._rank) or (root == self._place and due("root", self._rank)):
            act()
            if DEED == "corrupt":
                tensor.numpy()[:] = changed(tensor.numpy())
        return self._handle.broadcast(tensor, root)


def meddle_with_groups() -> None:
    """Imports torch, which a job without groups needn't."""
    from headrace.comm import groups

    make_group = groups.make_group

    def meddling(*arguments: Any) -> groups.DeviceGroup:
        group = make_group(*arguments)
        rank = rank_of(os.environ)
        return replace(group, handle=Handle(group.handle, rank, group.members.index(rank)))

    groups.make_group = meddling


MpiTransport.send = meddling_send
MpiSubscriber.receive = meddling_receive
LatencyEngine.load_weights = meddling_load
if PLACE in ("broadcast", "root"):
    meddle_with_groups()
main()
