"""A worker of the reward server (see `reward_server` for the picture): runs the user's reward function, call by call.

forked ──▶ imports the function ── Outcome(NO_CALL) ──▶ call ── attempt ──▶ Outcome ──▶ call … until told to end
"""

from __future__ import annotations

import ctypes
import math
import os
import pickle
import signal
import socket
import sys
import traceback
from contextlib import suppress
from typing import Any

import msgspec

from headrace.comm.imports import error_in_short
from headrace.rollout.answers import extract
from headrace.rollout.config import AnswerConfig

LINE_CHARACTERS = 500
ERROR_CHARACTERS = 2000
NO_CALL = -1
"""The call number of an outcome that is about the reward function itself: it can't be used at all."""


class Setup(msgspec.Struct, array_like=True):
    """The first frame from the rank: what the workers run, and under which limits."""

    sys_path: list[str]
    reward: bytes
    """Pickled."""
    answer: bytes
    """An `AnswerConfig` as JSON."""
    timeout_s: float
    retries: int
    workers: int


class Outcome(msgspec.Struct, array_like=True):
    """What became of a call."""

    call: int
    reward: float | None = None
    attempts: int = 1
    reason: str | None = None
    error: str | None = None
    """What went wrong, in one line; a traceback may follow."""


def own_group(pid: int) -> None:
    """Give a worker a process group of its own, so that what a reward starts ends with it. Called on both sides, since
    either may be first; the later call may find the process gone."""
    with suppress(OSError):
        os.setpgid(pid, pid)


def become_worker(sock: socket.socket, setup: Setup, parent: int) -> None:
    """Never returns. `os._exit`: a forked child must not run the clean-up of the server."""
    try:
        die_with_parent(parent)
        own_group(os.getpid())
        sys.path[:] = setup.sys_path
        for output in (sys.stdout, sys.stderr):
            output.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        sock.setblocking(True)
        work(sock, setup)
    finally:
        os._exit(0)


def die_with_parent(parent: int) -> None:
    """Ask the kernel for SIGKILL when the parent ends (Linux)."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


def work(sock: socket.socket, setup: Setup) -> None:
    """Import the reward function, then answer calls until the server closes.

    A process that the user's code has forked comes back here too, with the same socket: it leaves without a word, since
    its parent answers.
    """
    worker = os.getpid()
    try:
        reward = pickle.loads(setup.reward)
        answer = AnswerConfig.model_validate_json(setup.answer)
        started = Outcome(NO_CALL)
    except BaseException as error:
        started = Outcome(NO_CALL, reason="reward_raised", error=told_whole(error))
    if os.getpid() != worker:
        return
    send(sock, started)
    while started.reason is None and (frame := read_frame(sock)):
        outcome = attempt(reward, answer, frame)
        if os.getpid() != worker:
            return
        send(sock, outcome)


def attempt(reward: Any, answer: AnswerConfig, frame: bytes) -> Outcome:
    """One attempt. Whatever the user's code raises, SystemExit included, is an outcome."""
    number = int.from_bytes(frame[:8], "little")
    try:
        task, text = pickle.loads(memoryview(frame)[8:])
        value = reward(task, extract(answer, text))
    except BaseException as error:
        return Outcome(number, reason="reward_raised", error=told_whole(error))
    checked = finite(value)
    if checked is None:
        return Outcome(
            number, reason="reward_invalid", error=f"the reward returned {shown(value)}, not a finite number"
        )
    return Outcome(number, checked)


def finite(value: Any) -> float | None:
    """`value` as a float, if it is a finite number of any kind (numpy's and tensors included), but no text."""
    try:
        number = float(value) if hasattr(value, "__float__") else math.nan
    except Exception:
        return None
    return number if math.isfinite(number) else None


def shown(value: Any) -> str:
    try:
        text = repr(value).encode(errors="backslashreplace").decode()
    except Exception:
        text = f"a {type(value).__name__}"
    return text if len(text) <= 200 else f"{text[:200]}… ({len(text)} characters)"


def told_whole(error: BaseException) -> str:
    """One line that says it all, then the end of the traceback, where the error is."""
    whole = "".join(traceback.format_exception(error)).strip()
    trace = whole.encode(errors="backslashreplace").decode()  # half characters can't be sent
    return f"{error_in_short(error)[:LINE_CHARACTERS]}\n{trace[-ERROR_CHARACTERS:]}"


def send(sock: socket.socket, outcome: Outcome) -> None:
    data = msgspec.msgpack.encode(outcome)
    sock.sendall(len(data).to_bytes(8, "little") + data)


def read_frame(sock: socket.socket) -> bytes:
    """The next frame; empty at the end."""
    size = read_exactly(sock, 8)
    return read_exactly(sock, int.from_bytes(size, "little")) if size else b""


def read_exactly(sock: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = sock.recv(min(size - len(data), 1 << 20))
        if not part:
            return b""
        data += part
    return bytes(data)
