"""What `headrace cancel` does to launchers and to jobs of Slurm."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.comm.errors import HeadraceError
from headrace.launcher import cancel as module
from headrace.launcher.cancel import cancel
from headrace.launcher.record import record_job

LAUNCHER = """
import signal, sys, time
from pathlib import Path
from headrace.launcher.record import Ended, record_end, record_launcher
attempt, mode = Path(sys.argv[1]), sys.argv[2]
count = 0
def asked(*_):
    global count
    count += 1
signal.signal(signal.SIGTERM, asked)
record_launcher(attempt)
end = time.monotonic() + 30
while time.monotonic() < end and count < {"prompt": 1, "slow": 2, "deaf": 99}[mode]:
    time.sleep(0.01)
record_end(attempt, Ended(75 if count == 1 else 143, None))
"""

Start = Callable[[str], subprocess.Popen[bytes]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setattr(module, "MARGIN_S", 0.3)
    monkeypatch.setattr(module, "QUEUE_MARGIN_S", 1.0)
    monkeypatch.setattr(module, "QUEUE_POLL_S", 0.05)
    folder = tmp_path / "sums"
    (folder / "attempt_01").mkdir(parents=True)
    (folder / "config.yaml").write_text("run: {name: sums, steps: 40}\nlaunch: {stop_within_s: 0.2}\n")
    return folder


@pytest.fixture
def start(run: Path) -> object:
    started: list[subprocess.Popen[bytes]] = []

    def launch(mode: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen([sys.executable, "-c", LAUNCHER, str(run / "attempt_01"), mode])
        started.append(process)
        while not (run / "attempt_01" / "launcher.json").exists():
            assert process.poll() is None
        return process

    yield launch
    for process in started:
        process.kill()
        process.wait()


def heard(run: Path, now: bool = False) -> tuple[int, str]:
    lines: list[str] = []
    status = cancel(run, now, lines.append)
    return status, "\n".join(lines)


def test_a_launcher_is_asked_and_waited_for(run: Path, start: Start) -> None:
    process = start("prompt")
    status, said = heard(run)
    assert status == 0
    assert f"asked process {process.pid}" in said
    assert "stopped after the checkpoint of step 0; go on by --resume" in said


def test_a_second_call_kills(run: Path, start: Start) -> None:
    start("slow")
    status, said = heard(run)
    assert status == 1
    assert "still running" in said
    assert "--now` kills it" in said
    status, said = heard(run)
    assert status == 0
    assert "stopped with status 143 before it could leave by itself; it had no checkpoint yet" in said


def test_now_ends_a_launcher_that_does_not_listen(run: Path, start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KILL_S", 0.5)
    process = start("deaf")
    rank = subprocess.Popen(["sleep", "60"], env={**os.environ, "HEADRACE_JOB": f"test-{os.getpid()}"})
    (run / "attempt_01" / "rank_000.pid").write_text(f"{rank.pid}\n")
    try:
        status, said = heard(run, now=True)
        assert status == 0
        assert "killed" in said
        assert process.wait(5) == rank.wait(5) == -signal.SIGKILL
    finally:
        rank.kill()


def test_a_run_that_has_ended_is_left_alone(run: Path, start: Start) -> None:
    start("prompt")
    heard(run)
    assert heard(run) == (0, f"{run} isn't running: stopped (status 75: it was asked to stop and left a checkpoint)")


def test_a_launcher_on_another_host_is_refused(run: Path) -> None:
    (run / "attempt_01" / "launcher.json").write_text(
        json.dumps({"host": "far", "pid": os.getpid(), "began": 1, "slurm_job": None})
    )
    with pytest.raises(HeadraceError, match=r"process \d+ on far: cancel it there"):
        cancel(run, False, print)


def test_ranks_started_by_hand_are_refused(run: Path) -> None:
    with pytest.raises(HeadraceError, match="stop its mpirun"):
        cancel(run, False, print)


@pytest.fixture
def calls(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[str]]:
    """Job 7 of a Slurm in the given state, which any scancel ends; afterwards the commands that were run."""
    folder = tmp_path / "bin"
    folder.mkdir()
    log, state = tmp_path / "calls", tmp_path / "state"
    squeue = f'state=$(cat {state}); [ -n "$state" ] && echo "7|$state|Priority|1:00" || true'
    for name, body in {"squeue": squeue, "scancel": f"echo > {state}", "scontrol": "true"}.items():
        program = folder / name
        program.write_text(f'#!/bin/sh\n[ {name} = squeue ] || echo "{name} $*" >> {log}\n{body}\n')
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    record_job(run, 7)

    def after(now: str) -> list[str]:
        state.write_text(now.split()[0])
        heard(run, now="--now" in now)
        return log.read_text().splitlines()

    return after


def test_a_job_that_runs_is_signalled_and_not_requeued(calls: Callable[[str], list[str]]) -> None:
    assert calls("RUNNING") == ["scontrol update JobId=7 Requeue=0", "scancel --batch --signal=USR2 7"]


@pytest.mark.parametrize("state", ["PENDING", "RUNNING --now"])
def test_a_job_that_waits_or_is_to_be_killed_is_cancelled(calls: Callable[[str], list[str]], state: str) -> None:
    assert calls(state) == ["scancel 7"]
