"""A rank of a job that kills itself when told to by FAULT: `KIND:RANK:TIME`, at the TIME-th event of that KIND.

hello    it has said that it is there; trainers begin 2 s later than they could
pull     asked for the data of a formed step; it dies with the request in hand
answer   the same, with the answer on its way
started  it has told its ledger that a group is started
version  its engine is loading a version of the weights
stop     it was told to stop, and hasn't said that it is ready
bye      it has said that it is ready for the end of the run
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from headrace.comm.exchange import ExchangeOwner
from headrace.comm.messages import Bye, Hello, Message, Started
from headrace.comm.mpi import MpiTransport
from headrace.ranks.generator import GeneratorLoop
from headrace.ranks.start import main
from headrace.ranks.trainer import TrainerLoop

KIND, RANK, TIME = os.environ["FAULT"].split(":")
seen = 0


def event(kind: str, rank: int) -> None:
    global seen
    if kind == KIND and rank == int(RANK):
        seen += 1
        if seen == int(TIME):
            os.kill(os.getpid(), signal.SIGKILL)


answer, send = ExchangeOwner._answer, MpiTransport.send
switch, drop, start = GeneratorLoop.switch_version, GeneratorLoop.drop_all, TrainerLoop.start


def dying_answer(self: ExchangeOwner, consumer: int, pull: Any) -> bool:
    event("pull", self._transport.rank)
    answered = answer(self, consumer, pull)
    event("answer", self._transport.rank)
    return answered


def dying_send(self: MpiTransport, target: int, message: Message, buffers: Any = ()) -> None:
    send(self, target, message, buffers)
    kind = {Hello: "hello", Started: "started", Bye: "bye"}.get(type(message))
    if kind is not None:
        event(kind, self.rank)


def dying_switch(self: GeneratorLoop) -> bool:
    if self._subscriber.waiting:
        event("version", self._courier.transport.rank)
    return switch(self)


def dying_drop(self: GeneratorLoop) -> Any:
    event("stop", self._courier.transport.rank)
    return drop(self)


def slow_start(self: TrainerLoop) -> None:
    time.sleep(2)
    start(self)


if KIND == "hello":
    TrainerLoop.start = slow_start
ExchangeOwner._answer = dying_answer
MpiTransport.send = dying_send
GeneratorLoop.switch_version = dying_switch
GeneratorLoop.drop_all = dying_drop
main()
