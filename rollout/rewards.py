"""The rank's end of the reward server (see `reward_server` for the picture): submit answers, poll for rewards.

Neither call ever waits, so the generator's main thread uses them between two engine steps.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Hashable
from dataclasses import dataclass

import msgspec

from headrace.comm.errors import ConfigError, DataError, PeerLostError
from headrace.rollout.config import DataConfig
from headrace.rollout.reward_server import Stream
from headrace.rollout.reward_worker import NO_CALL, Outcome, Setup
from headrace.rollout.task import Reward, Task

MPI_VARIABLES = ("OMPI_", "OPAL_", "PMI", "PRTE_", "HYDI_", "HYDRA_", "MPI_", "MPIR_", "MPICH_", "MPIEXEC_")
"""A process with these in its environment is taken for a rank by MPI."""

CLOSE_LIMIT_S = 5.0


@dataclass(frozen=True, slots=True)
class Scored:
    """What became of one answer: a reward, or the reason and the error of the last attempt."""

    key: Hashable
    reward: float | None
    attempts: int
    reason: str | None = None
    """`reward_raised`, `reward_timeout`, `reward_invalid` (no finite number) or `reward_process_died`."""
    error: str | None = None
    """In one line; a traceback may follow."""


@dataclass(frozen=True, slots=True)
class RewardServer:
    """A running server that has no reward function yet."""

    process: subprocess.Popen[bytes]
    stream: Stream


_started: list[RewardServer] = []
"""Servers that wait for their pool."""


def start_reward_server() -> None:
    """Start the server process of this rank, for the next `RewardPool`. Returns at once.

    Call it before MPI is initialised: starting processes from a rank is unsafe on some networks.
    """
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-P", "-m", "headrace.rollout.reward_server", str(theirs.fileno())]
    held = signal.pthread_sigmask(
        signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)
    )  # until the server ignores them; a signal to this process comes after the line below
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env=environment_without_mpi()
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)
    theirs.close()
    _started.append(RewardServer(process, Stream(ours)))


def environment_without_mpi() -> dict[str, str]:
    """This process's environment, without what makes a child look like a rank."""
    return {name: value for name, value in os.environ.items() if not name.startswith(MPI_VARIABLES)}


class RewardPool:
    """Computes rewards in processes of their own.

    Every call is settled exactly once, in `poll`: with a finite reward, or after `1 + data.reward_retries` attempts
    with the reason. A call past `data.reward_timeout_s` has its process ended; a process that dies is replaced.
    The answer is extracted from the text (`data.answer`) in the process too, under the same limit.

    Raises:
        ConfigError: the reward function can't be sent to another process.
    """

    def __init__(self, reward: Reward, data: DataConfig) -> None:
        setup = Setup(
            sys_path=[os.path.abspath(entry) for entry in sys.path],
            reward=pickled_reward(reward),
            answer=data.answer.model_dump_json().encode(),
            timeout_s=data.reward_timeout_s,
            retries=data.reward_retries,
            workers=data.reward_workers,
        )
        if not _started:
            start_reward_server()
        self._server = _started.pop()
        self._server.stream.give_outputs()
        self._server.stream.send(msgspec.msgpack.encode(setup))
        self._keys: dict[int, Hashable] = {}
        self._next = 0

    @property
    def pending(self) -> int:
        """Calls submitted and not yet settled."""
        return len(self._keys)

    def submit(self, key: Hashable, task: Task, text: str) -> None:
        """Ask for the reward of a response. `key` comes back with it.

        Raises:
            DataError: the task holds what can't be sent to another process.
        """
        try:
            payload = pickle.dumps((task, text))
        except Exception as error:
            raise DataError(f"the fields of a task can't be sent to the reward process: {error}") from error
        self._keys[self._next] = key
        self._server.stream.send(self._next.to_bytes(8, "little"), payload)
        self._next += 1

    def poll(self) -> list[Scored]:
        """What was settled since the last poll.

        Raises:
            ConfigError: the reward function can't be imported in its process.
            PeerLostError: the reward server has died.
        """
        self._server.stream.flush()
        outcomes = [msgspec.msgpack.decode(frame, type=Outcome) for frame in self._server.stream.receive()]
        if self._server.stream.ended:
            raise PeerLostError(
                f"the reward server of this rank (process {self._server.process.pid}) has ended, "
                f"with {len(self._keys)} rewards outstanding. If memory is short, it may have been killed for that."
            )
        return [self._scored(outcome) for outcome in outcomes]

    def _scored(self, outcome: Outcome) -> Scored:
        if outcome.call == NO_CALL:
            print(outcome.error, file=sys.stderr, flush=True)
            raise ConfigError(f"the reward function can't be used: {str(outcome.error).partition(chr(10))[0]}")
        key = self._keys.pop(outcome.call)
        return Scored(key, outcome.reward, outcome.attempts, outcome.reason, outcome.error)

    def close(self) -> None:
        """End the server, which ends its workers; outstanding calls are forgotten. Takes at most some seconds."""
        self._server.stream.close()
        try:
            self._server.process.wait(CLOSE_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._server.process.kill()
            self._server.process.wait(CLOSE_LIMIT_S)


def pickled_reward(reward: Reward) -> bytes:
    advice = "Put it into a module, at top level, and name it in data.reward."
    if getattr(reward, "__module__", None) == "__main__":
        raise ConfigError(f"the reward function {reward!r} is defined in the main script. {advice}")
    try:
        return pickle.dumps(reward)
    except Exception as error:
        raise ConfigError(f"the reward function {reward!r} can't be sent to its process: {error}. {advice}") from error
