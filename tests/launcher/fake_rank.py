"""Stands in for `headrace.ranks` in the tests of the launcher: FAKE_MODE says how the ranks behave.

It does what the contract asks of a rank: log, pid file, error file, exit status 75 after a stop signal. A mode `late_…`
fails after that signal.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

STOPPED = 75


def main() -> None:
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    rank, mode = comm.rank, os.environ["FAKE_MODE"]
    folder = Path(sys.argv[1]).parent
    terminal = os.dup(1)
    log = os.open(folder / f"rank_{rank:03d}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    stopped: list[int] = []
    if mode != "deaf":
        for number in (signal.SIGTERM, signal.SIGUSR2):
            signal.signal(number, lambda received, _: stopped.append(received))
    else:
        for number in (signal.SIGTERM, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)
    if mode == "late" and rank == 1:
        time.sleep(100)
    (folder / f"rank_{rank:03d}.pid").write_text(str(os.getpid()))
    os.open(folder / f"rank_{rank:03d}.alive", os.O_RDWR)
    print(f"rank {rank} of {comm.size} is up, arguments {sys.argv[2:]}")
    comm.Barrier()
    if rank == 0:
        os.write(terminal, b"everybody is up\n")
    if mode == "environment" and rank == 0:
        os.write(terminal, ("environment " + json.dumps(dict(os.environ)) + "\n").encode())
    if mode == "metrics" and rank == 0:
        with open(folder.parent / "metrics.jsonl", "a") as file:
            for step in range(1, 4):
                row = {"step": step, "version": step, "reward/mean": step / 10, "time/step": 0.1}
                file.write(json.dumps(row) + "\n")
    if rank == 1:
        time.sleep(1.0)  # by then the launcher watches every rank, also on a busy machine
        fail(mode, folder, comm)
    waits = mode in ("sleep", "deaf", "child") or mode.startswith("late_")
    if waits or (mode not in ("ok", "environment", "metrics") and rank != 1):
        end = time.monotonic() + 100
        while time.monotonic() < end and not stopped:
            time.sleep(0.02)
    if rank == 1 and stopped:
        fail(mode.removeprefix("late_"), folder, comm)
    comm.Barrier()
    sys.exit(STOPPED if stopped else 0)


def fail(mode: str, folder: Path, comm: object) -> None:
    match mode:
        case "kill":
            print("the last thing that rank 1 did")
            sys.stdout.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        case "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "error" | "hung_error":
            print("the last thing that rank 1 did")
            sys.stdout.flush()
            (folder / "error_001.txt").write_text("The tokenizer has no end of text. Choose another model.\n")
            if mode == "hung_error":
                time.sleep(100)
            comm.Abort(7)  # type: ignore[attr-defined]
        case "child":
            subprocess.Popen(["sleep", "100"], start_new_session=True)


main()
