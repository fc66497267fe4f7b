"""Start mpirun or srun, watch the job, and tell how it ended.

    headrace run ──start──▶ mpirun ──start──▶ rank 0 … N-1       (or srun, see `headrace.launcher.starter`)
         │ ◀── stdout, stderr, line by line ─────┘ │
         │ ◀── lifelines, error_NNN.txt ───────────┘
         │
         ├── Ctrl-C, SIGTERM, SIGHUP, SIGUSR2: the first asks the ranks (through mpirun) to write a checkpoint and
         │   leave; the second, or `launch.stop_within_s`, kills them
         └── a rank has failed: the others have `launch.kill_after_s` to end, then they are killed

mpirun runs in a session of its own, so that a Ctrl-C of the terminal reaches the launcher only. If the launcher itself
is killed, the kernel sends SIGTERM to mpirun. After mpirun has ended no process of the job is left.
"""

from __future__ import annotations

import ctypes
import math
import os
import re
import selectors
import signal
import subprocess
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO

from headrace.comm.errors import HeadraceError
from headrace.launcher.allocation import place
from headrace.launcher.environment import rank_environment
from headrace.launcher.failure import LAST_LINES, Failure, first_failure, own_errors
from headrace.launcher.lifelines import Connections, Fifos, Lifelines
from headrace.launcher.repair import end_status, lost_ranks
from headrace.launcher.runfolder import Attempt, writing
from headrace.launcher.srun_output import NOISE, Report, in_order, is_garbled, reports, without_followers
from headrace.launcher.starter import Starter
from headrace.launcher.stop import StopRequest

STOPPED = 75
"""Exit status of a job that was asked to stop and left a checkpoint (EX_TEMPFAIL: try again later)."""

KILLED = 1
"""Exit status of a job that failed and whose other ranks then had to be killed."""

PASSED_ON = (signal.SIGTERM, signal.SIGUSR2)
"""What asks the ranks to stop (see `Starter.stop_signal`), and ends one that has no handler for it yet."""

POLL_S = 0.1
TAIL_LINES = 200
PR_SET_PDEATHSIG = 1

BANNER = re.compile(r"^(=   |={20,}$|YOUR APPLICATION TERMINATED|This typically refers to|Please see the FAQ page)")
"""Lines of MPICH's own messages; they are kept in mpirun.log and told in our words at the end."""

EXIT_CODE = re.compile(r"^=   EXIT CODE: (\d+)$")
"""What MPICH's mpirun says of the first rank that ended badly: its status, or the bare number of the signal."""

CRASHES = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL)
"""Numbers that aren't statuses of ours."""

FRAME = re.compile(r"^-{70,}$")
"""Opens and closes a message of Open MPI, of which the same is true."""


@dataclass(frozen=True, slots=True)
class Order:
    """What to start."""

    starter: Starter
    ranks: int
    program: Sequence[str]
    """The command line of one rank."""
    environ: Mapping[str, str]
    """The user's environment."""
    extra: Mapping[str, str]
    """Set for the ranks after cleaning."""
    threads: int
    start_within_s: float
    stop_within_s: float
    kill_after_s: float
    lock: int | None = None
    """A descriptor that mpirun inherits; see `headrace.launcher.lock`."""
    repair_within_s: float | None = None
    """The ranks go on without a generator that has died, and take at most so long to get over it; None: they don't."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job ended."""

    status: int
    """Exit status of the ranks, 128 + signal if one was killed, or if the job was stopped without a checkpoint."""
    failure: Failure | None
    """What failed first; None if nothing did, or if the job ended as asked or was killed after it was asked to stop."""
    failed_at: float | None = None
    """When the launcher saw a failure, by the monotonic clock."""

    @property
    def accident(self) -> bool:
        """Whether a rank or a node died, so that another attempt may succeed."""
        return self.failure is not None and self.failure.accident


@dataclass
class Job:
    """A running mpirun. `run` is the whole life of it."""

    order: Order
    attempt: Attempt
    stop: StopRequest
    on_line: Callable[[str], None]
    """Called with every line that mpirun or a rank prints."""
    on_tick: Callable[[], None]
    """Called several times a second."""
    name: str = field(default_factory=lambda: uuid.uuid4().hex)
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=TAIL_LINES))
    stopping: bool = False
    """The ranks have been asked to stop."""
    deadline: float | None = None
    """When the job is killed, by the monotonic clock."""
    killed: bool = False
    failed_at: float | None = None
    """When the first sign of a failure was seen."""
    missing: list[int] = field(default_factory=list)
    """Ranks that hadn't started MPI within the limit."""
    absent: list[int] = field(default_factory=list)
    """Those of them whose process hadn't even come as far as that; the others may just have waited for them."""
    mourned: int | None = None
    """A rank whose death the others didn't get over."""
    _died_at: float | None = None
    """When the first rank died of those that the others haven't got over."""
    _start_limit: float | None = None
    """When all ranks must have started, by the monotonic clock; None once that has been looked at."""
    _rest: bytes = b""
    _framed: bool = False

    def run(self) -> Outcome:
        """Start the ranks and wait for their end."""
        with writing(self.attempt.run):
            watch = (Fifos if self.order.starter.one_host else Connections)(self.attempt.folder, self.order.ranks)
        process = self._start()
        self._start_limit = time.monotonic() + self.order.start_within_s
        assert process.stdout is not None
        try:
            with open(self.attempt.mpirun_log, "ab", buffering=0) as log:
                self._loop(process, process.stdout, log, watch)
        finally:
            self.order.starter.kill(self.name)
            process.wait()
            watch.poll()
            watch.close()
        return self._outcome(process.returncode, watch)

    def _start(self) -> subprocess.Popen[bytes]:
        order = self.order
        environment = rank_environment(order.environ, order.threads, self.name)
        environment |= {**order.starter.environment(self.name), **order.extra}
        command = [*order.starter.command(order.ranks, self.name), *order.program]
        try:
            return subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=() if order.lock is None else (order.lock,),
                preexec_fn=_end_with_parent,
            )
        except OSError as error:
            raise HeadraceError(f"{order.starter.program} can't be started: {error.strerror}.") from error

    def _loop(self, process: subprocess.Popen[bytes], pipe: IO[bytes], log: IO[bytes], watch: Lifelines) -> None:
        os.set_blocking(pipe.fileno(), False)
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            selector.register(watch, selectors.EVENT_READ)
            while process.poll() is None:
                ready = [key.fileobj for key, _ in selector.select(POLL_S)]
                watch.poll()
                if pipe in ready and not self._read(pipe, log):
                    selector.unregister(pipe)
                self._keep_limits(process)
                self._await_repair(watch)
                self.on_tick()
        self._read(pipe, log)
        if rest := self._rest.rstrip(b"\0"):  # Open MPI ends its last message so
            self._line(rest)

    def _read(self, pipe: IO[bytes], log: IO[bytes]) -> bool:
        """Pass on what mpirun has printed; False at the end of it."""
        while chunk := pipe.read(65536):
            with writing(self.attempt.run):
                log.write(chunk)
            *lines, self._rest = (self._rest + chunk).split(b"\n")
            for line in lines:
                self._line(line)
        return chunk is None

    def _line(self, raw: bytes) -> None:
        line = raw.decode(errors="replace").rstrip("\r")
        self.tail.append(line)
        if FRAME.match(line):
            self._framed = not self._framed
        elif not self._framed and not BANNER.match(line) and not NOISE.match(line):
            self.on_line(line)

    def _keep_limits(self, process: subprocess.Popen[bytes]) -> None:
        now = time.monotonic()
        self._await_start(now)
        if self.stop.signum is not None and not self.stopping:
            self.stopping = True
            self.deadline = now + self.order.stop_within_s
            process.send_signal(self.order.starter.stop_signal)
        if self.failed_at is None and self._failing():
            self.failed_at = now
            self.deadline = min(self.deadline or math.inf, now + self.order.kill_after_s)
        late = self.deadline is not None and now >= self.deadline
        if late and self.stopping and self.failed_at is None and not self.killed:
            self.on_line(
                f"The ranks haven't left within {self.order.stop_within_s:g} s (launch.stop_within_s) and are killed: "
                "they finish the step that they train and write a checkpoint. Raise it if a step takes longer."
            )
        if (late or self.stop.at_once) and not self.killed:
            self.killed = True
            self.order.starter.kill(self.name)

    def _await_start(self, now: float) -> None:
        """MPI itself waits for ever for a rank that doesn't come."""
        if self._start_limit is not None and now >= self._start_limit:
            self._start_limit = None
            self.missing = self._without("pid")
            self.absent = [rank for rank in self._without("here") if rank in self.missing]
            self.deadline = now if self.missing else self.deadline

    def _without(self, sign: str) -> list[int]:
        """The ranks that haven't left this file."""
        folder = self.attempt.folder
        return [rank for rank in range(self.order.ranks) if not (folder / f"rank_{rank:03d}.{sign}").exists()]

    def _await_repair(self, watch: Lifelines) -> None:
        """MPI may never tell the others of a death, or they may hang in it."""
        limit = self.order.repair_within_s
        if limit is None or self.failed_at is not None:
            return
        unexplained = [] if end_status(self.attempt) is not None else self._deaths(watch)
        now = time.monotonic()
        if not unexplained:
            self._died_at = None
        elif self._died_at is None:
            self._died_at = now
        elif now >= self._died_at + limit:
            self.mourned, self.failed_at, self.deadline = unexplained[0], now, now

    def _deaths(self, watch: Lifelines) -> list[int]:
        """The ranks that have died, without those that the job goes on without."""
        without = lost_ranks(self.attempt) if watch.deaths else []
        return [rank for rank in watch.deaths if rank not in without]

    def _failing(self) -> bool:
        ended = any("BAD TERMINATION" in line for line in self.tail) or any(self._reports())
        return ended or self._has_errors() or is_garbled(self.tail)

    def _reports(self) -> list[Report]:
        return list(reports(self.tail)) if self.order.starter.is_srun else []

    def _has_errors(self) -> bool:
        return any(self.attempt.folder.glob("error_*.txt"))

    def _outcome(self, returncode: int, watch: Lifelines) -> Outcome:
        if self.order.repair_within_s is not None:
            # What mpirun makes of a rank that was done without isn't the status of the job.
            ended = end_status(self.attempt)
            returncode = ended if ended is not None else returncode or KILLED
        told = self._reports()
        deaths = without_followers(self._deaths(watch), told)
        told = in_order(told, deaths)
        if not deaths and own_errors(self.attempt):  # their ranks end by a status, and others are killed for it
            told = [report for report in told if report.status < 128] or told
        status = exit_status(returncode, self.tail, told)
        if status == 0:
            return Outcome(0, None)
        if self.stop.signum is not None and not self._failed_while_stopping(status):
            return Outcome(STOPPED if status == STOPPED else 128 + self.stop.signum, None)
        status = KILLED if self.killed and not told else status
        # Only a signal to mpirun itself gives a negative code: when one ends a rank, mpirun exits with a status.
        mpirun_signal = -returncode if returncode < 0 and not self.killed else None
        if self.missing and not self._has_errors() and not told:
            return Outcome(status, self._late(), self.failed_at or time.monotonic())
        if self.mourned is not None and not self._has_errors():
            return Outcome(status, self._not_got_over(self.mourned), self.failed_at)
        failure = first_failure(self.attempt, status, deaths, told, list(self.tail), mpirun_signal)
        return Outcome(status, failure, self.failed_at or time.monotonic())

    def _late(self) -> Failure:
        named = self.absent or self.missing
        nodes = self.order.starter.nodes
        hosts = {place(self.order.ranks, nodes)[rank] for rank in named} if nodes else set()
        where = f" (on {', '.join(sorted(hosts))})" if hosts else ""
        cause = (
            f"Ranks {named} of {self.order.ranks}{where} haven't started MPI within {self.order.start_within_s:.0f} s "
            "(run.wait_limit_s): their hosts are slow or out of reach, or launcher and MPI don't understand each other."
        )
        return Failure(None, cause, list(self.tail)[-LAST_LINES:], self.attempt.mpirun_log, accident=True)

    def _not_got_over(self, rank: int) -> Failure:
        cause = (
            f"Rank {rank} died, and the others haven't gone on without it within {self.order.repair_within_s:.0f} s "
            "(run.wait_limit_s, launch.repair)."
        )
        return Failure(rank, cause, (), self.attempt.rank_log(rank), accident=True)

    def _failed_while_stopping(self, status: int) -> bool:
        """Whether the ranks, asked to stop, ended by an error or a crash of their own, for instance on a full disk."""
        crashed = status > 128 and status - 128 not in PASSED_ON
        return not self.killed and (self._has_errors() or crashed)


def exit_status(returncode: int, output: Sequence[str], told: Sequence[Report] = ()) -> int:
    """The status as a shell gives it: 128 + number where a signal ended a rank, or mpirun itself.

    MPICH's mpirun ends with the bare number of the signal and says so in its last lines; over several hosts it ends
    with a status of its own. srun ends with the largest status, perhaps of a rank that it has killed itself; the one
    that it reports first counts.

    Args:
        told: the ends of ranks that srun has reported.
    """
    if returncode < 0:
        return 128 - returncode
    if returncode and told:
        return told[0].status
    if any("EXIT STRING" in line and f"(signal {returncode})" in line for line in output):
        return 128 + returncode
    named = [int(match[1]) for match in map(EXIT_CODE.match, output) if match]
    if not named or returncode in (0, named[0]):
        return returncode
    return 128 + named[0] if named[0] in CRASHES else named[0]


def _end_with_parent() -> None:
    """Runs in the new process: have the kernel end mpirun if the launcher dies without a word."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
