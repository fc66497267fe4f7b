"""The process beside every generator that computes rewards: rewards may be slow, raise, hang or crash.

    rank (MPI, torch)                 reward server                     reward workers
    RewardPool.submit ── call ──────► queue ── call, one at a time ───► unpickle, extract, reward(task, answer)
    RewardPool.poll  ◄── outcome ──── retry or settle ◄── outcome ────  (one process each, forked by the server)
                                      past its time limit: SIGKILL ───► replaced by a fresh one

The server is started before MPI is and never loads it, nor torch, nor the user's code: so it can fork at any time, and
nothing can hold it up. It is one thread around `select`. A call is settled once: scored, or failed after
`1 + retries` attempts. When the rank's end of the socket closes, for whatever reason, the server kills its workers and
ends; when the server dies, the kernel kills the workers.

What rewards print goes where the rank's own output goes when its pool is made, which is its log. So the first byte from
the rank brings its stdout and stderr along.

Frames on all sockets: 8 bytes length (little endian), then the bytes. A call is 8 bytes number + pickled (task, text),
made by the rank and unpickled only in a worker; everything that comes back is msgpack. What a worker does is in
`reward_worker.py`.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

from headrace.rollout.reward_worker import NO_CALL, Outcome, Setup, become_worker, own_group

START_LIMIT_S = 120.0
"""Longest time a worker may take to import the reward function."""
STARTS = 3
"""How often in a row a worker may die before it has imported the reward function."""
LIFE_CHECK_S = 0.5


class Stream:
    """Frames over a socket, in both directions, without ever waiting."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.socket = sock
        self.ended = False
        """The other side has closed, or died."""
        self._unsent = bytearray()
        self._received = bytearray()

    @property
    def sending(self) -> bool:
        return bool(self._unsent) and not self.ended

    def give_outputs(self) -> None:
        """Hand stdout and stderr of this process to the other side, before anything else is sent."""
        try:
            socket.send_fds(self.socket, [b"\0"], [1, 2])
        except OSError:
            self.ended = True

    def take_outputs(self) -> None:
        """Make the other side's stdout and stderr those of this process. They have to be there."""
        try:
            _, outputs, _, _ = socket.recv_fds(self.socket, 1, 2)
        except OSError:
            outputs = []
        self.ended = not outputs
        for number, output in enumerate(outputs, 1):
            os.dup2(output, number)
            os.close(output)

    def send(self, *parts: bytes) -> None:
        """Queue one frame and send what the socket takes."""
        self._unsent += sum(map(len, parts)).to_bytes(8, "little")
        for part in parts:
            self._unsent += part
        self.flush()

    def flush(self) -> None:
        """Send what the socket takes."""
        try:
            while self._unsent and not self.ended:
                del self._unsent[: self.socket.send(self._unsent)]
        except BlockingIOError:
            return
        except OSError:
            self.ended = True

    def receive(self) -> list[bytes]:
        """All frames that are there."""
        try:
            while not self.ended:
                data = self.socket.recv(1 << 20)
                self._received += data
                self.ended = not data
        except BlockingIOError:
            pass
        except OSError:
            self.ended = True
        return list(self._frames())

    def _frames(self) -> Iterator[bytes]:
        while len(self._received) >= 8:
            end = 8 + int.from_bytes(self._received[:8], "little")
            if len(self._received) < end:
                return
            yield bytes(self._received[8:end])
            del self._received[:end]

    def close(self) -> None:
        self.ended = True
        self.socket.close()


@dataclass(slots=True)
class Call:
    """One reward to compute."""

    number: int
    frame: bytes
    attempts: int = 0


@dataclass(slots=True, eq=False)
class Worker:
    """A process that computes rewards, one call at a time."""

    pid: int
    stream: Stream
    deadline: float
    """On the monotonic clock: for being ready, then for the call in hand."""
    ready: bool = False
    call: Call | None = None

    @property
    def idle(self) -> bool:
        return self.ready and self.call is None


@dataclass(slots=True)
class Server:
    """Hands calls to workers, watches them, retries, settles."""

    rank: Stream
    setup: Setup
    queue: deque[Call] = field(default_factory=deque)
    workers: list[Worker] = field(default_factory=list)
    dying: set[int] = field(default_factory=set)
    """Processes that were sent SIGKILL and not yet collected."""
    failed_starts: int = 0

    def run(self) -> None:
        """Work until the rank closes its end."""
        try:
            while not self.rank.ended:
                self.dying = {pid for pid in self.dying if exit_status(pid) is None}
                self.take_calls()
                for worker in list(self.workers):
                    self.look_after(worker)
                while len(self.workers) < self.setup.workers and self.failed_starts < STARTS:
                    self.workers.append(self.start_worker())
                self.dispatch()
                self.wait()
        finally:
            for worker in self.workers:
                kill(worker.pid)

    def wait(self) -> None:
        """Sleep until a frame comes, a frame can go out, or a running worker has to be looked at."""
        streams = [self.rank, *(worker.stream for worker in self.workers)]
        sending = [stream.socket for stream in streams if stream.sending]
        now = time.monotonic()
        limits = [worker.deadline - now for worker in self.workers if not worker.idle]
        limit = max(0.0, min([LIFE_CHECK_S, *limits])) if limits or self.dying else None
        select.select([stream.socket for stream in streams], sending, [], limit)
        for stream in streams:
            stream.flush()

    def take_calls(self) -> None:
        for frame in self.rank.receive():
            self.queue.append(Call(int.from_bytes(frame[:8], "little"), frame))

    def dispatch(self) -> None:
        for worker in self.workers:
            if self.queue and worker.idle:
                worker.call = self.queue.popleft()
                worker.call.attempts += 1
                worker.deadline = time.monotonic() + self.setup.timeout_s
                worker.stream.send(worker.call.frame)

    def look_after(self, worker: Worker) -> None:
        """Take its outcomes; replace it when it is dead or late."""
        for frame in worker.stream.receive():
            self.take_outcome(worker, msgspec.msgpack.decode(frame, type=Outcome))
        status = soon(worker.pid) if worker.stream.ended else exit_status(worker.pid)
        if status is not None or worker.stream.ended:
            self.remove(worker, "reward_process_died", f"the reward process {worker.pid} {told(status)}")
        elif not worker.idle and time.monotonic() >= worker.deadline:
            limit = self.setup.timeout_s if worker.ready else START_LIMIT_S
            self.remove(worker, "reward_timeout", f"no answer within {limit:g} s; process {worker.pid} was ended")

    def take_outcome(self, worker: Worker, outcome: Outcome) -> None:
        if worker.call is None:
            self.take_start(worker, outcome)
            return
        call, worker.call = worker.call, None
        self.settle(call, outcome)

    def take_start(self, worker: Worker, outcome: Outcome) -> None:
        """The first outcome of a worker says whether it could import the reward function."""
        if outcome.reason is None:
            worker.ready, self.failed_starts = True, 0
        else:
            self.failed_starts = STARTS
            self.rank.send(msgspec.msgpack.encode(outcome))

    def remove(self, worker: Worker, reason: str, error: str) -> None:
        """End a worker and settle what it was doing; `run` starts another in its place."""
        self.workers.remove(worker)
        worker.stream.close()
        kill(worker.pid)
        self.dying.add(worker.pid)
        if worker.call is not None:
            self.settle(worker.call, Outcome(worker.call.number, reason=reason, error=error))
        elif not worker.ready:
            self.failed_starts += 1
            if self.failed_starts == STARTS:
                text = f"its process couldn't be started {STARTS} times; the last time: {error}"
                self.rank.send(msgspec.msgpack.encode(Outcome(NO_CALL, reason=reason, error=text)))

    def settle(self, call: Call, outcome: Outcome) -> None:
        """Report the outcome of an attempt, or put the call at the end of the queue for another."""
        if outcome.reason is not None and call.attempts <= self.setup.retries:
            self.queue.append(call)
            return
        outcome.attempts = call.attempts
        self.rank.send(msgspec.msgpack.encode(outcome))

    def start_worker(self) -> Worker:
        ours, theirs = socket.socketpair()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            for stream in [self.rank, *(worker.stream for worker in self.workers)]:
                stream.socket.close()
            ours.close()
            become_worker(theirs, self.setup, parent)
        theirs.close()
        own_group(pid)
        return Worker(pid, Stream(ours), time.monotonic() + START_LIMIT_S)


def kill(pid: int) -> None:
    """End a worker and the processes it has started; it may be gone already."""
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def exit_status(pid: int) -> int | None:
    """The wait status of a child that has ended, -1 if it was collected before, None while it lives."""
    try:
        ended, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return -1
    return status if ended else None


def soon(pid: int) -> int | None:
    """`exit_status` of a process whose connection has closed, which happens a moment before it has ended."""
    for _ in range(20):
        status = exit_status(pid)
        if status is not None:
            return status
        time.sleep(0.005)
    return None


def told(status: int | None) -> str:
    """How a process ended, in words."""
    if status is None or status < 0:
        return "closed its connection"
    code = os.waitstatus_to_exitcode(status)
    return f"exited with status {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"


def ignore_signals() -> None:
    """The rank answers these; here they mean nothing. They were blocked before this process began, so none is early.

    Empty handlers rather than SIG_IGN, which the programs that a reward starts would inherit.
    """
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)
    for number in signals:
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)


def main() -> None:
    """Started by `headrace.rollout.rewards.start_reward_server` with the number of an open socket."""
    ignore_signals()
    rank = Stream(socket.socket(fileno=int(sys.argv[1])))
    select.select([rank.socket], [], [])
    rank.take_outputs()
    frames: list[bytes] = []
    while not frames and not rank.ended:
        select.select([rank.socket], [], [])
        frames = rank.receive()
    if not frames:
        return
    server = Server(rank, msgspec.msgpack.decode(frames[0], type=Setup))
    server.queue.extend(Call(int.from_bytes(frame[:8], "little"), frame) for frame in frames[1:])
    server.run()


if __name__ == "__main__":
    main()
