"""What `headrace status` makes of the files of a run and of what Slurm says."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from headrace.comm.errors import HeadraceError
from headrace.launcher.cli import app
from headrace.launcher.metrics import last_rows
from headrace.launcher.queue import QueuedJob, queued, seconds
from headrace.launcher.record import Ended, Launcher, record_end, record_job, record_launcher
from headrace.launcher.status import RunStatus, all_runs, find_run, read_status, show, show_one


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of 40 steps of which 10 are done, each in 2 s, in its second attempt."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    folder = Path("runs/sums")
    for attempt in ("attempt_01", "attempt_02"):
        (folder / attempt).mkdir(parents=True)
    (folder / "config.yaml").write_text("run: {name: sums, steps: 40}\n")
    rows = [{"step": step, "reward/mean": 0.25, "time/step": 2.0} for step in range(1, 11)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def slurm(tmp_path: Path, says: str) -> None:
    """A squeue that gives this answer."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "squeue"
    program.write_text(f"#!/bin/sh\n{says}\n")
    program.chmod(0o755)


def silent_for(run: Path, age_s: float) -> None:
    then = time.time() - age_s
    for file in run.rglob("*"):
        os.utime(file, (then, then))


def test_a_run_whose_launcher_lives_is_running(run: Path) -> None:
    record_launcher(run / "attempt_02")
    status = read_status(run)
    assert (status.state, status.step, status.steps, status.restarts) == ("running", 10, 40, 1)
    assert (status.reward, status.per_minute, status.left_s) == (0.25, 30.0, 60.0)


def test_a_process_that_got_the_pid_of_the_launcher_later_is_not_taken_for_it(run: Path) -> None:
    record_launcher(run / "attempt_02")
    file = run / "attempt_02" / "launcher.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "began": 1}))
    status = read_status(run)
    assert status.state == "failed"
    assert "was killed" in status.detail


@pytest.mark.parametrize(
    ("ended", "state"),
    [
        (Ended(0, None), "ended"),
        (Ended(75, None), "stopped"),
        (Ended(143, None), "stopped"),
        (Ended(137, "Rank 1 was ended by signal 9."), "failed"),
    ],
)
def test_the_recorded_end_of_the_newest_attempt_gives_the_state(run: Path, ended: Ended, state: str) -> None:
    record_end(run / "attempt_02", ended)
    assert read_status(run).state == state


def test_a_launcher_that_outlives_a_failure_starts_the_ranks_again(run: Path) -> None:
    record_launcher(run / "attempt_02")
    record_end(run / "attempt_02", Ended(137, "Rank 1 was ended by signal 9."))
    status = read_status(run)
    assert (status.state, status.error) == ("running", "Rank 1 was ended by signal 9.")


def test_the_error_itself_is_shown_not_its_traceback_and_one_of_an_earlier_attempt_too(run: Path) -> None:
    record_end(run / "attempt_01", Ended(1, "Traceback:\n  File x\nValueError: no tokens\n"))
    record_launcher(run / "attempt_02")
    assert read_status(run).error == "ValueError: no tokens"
    record_end(run / "attempt_02", Ended(0, None))
    assert read_status(run).error is None


def test_ranks_started_by_hand_are_judged_by_what_they_write(run: Path) -> None:
    assert read_status(run).state == "running"
    (run / "attempt_02" / "rank_000.log").write_text("")
    silent_for(run, 3600)
    status = read_status(run)
    assert status.state == "failed"
    assert "nothing for 1:00:00" in status.detail
    (run / "attempt_02" / "error_001.txt").write_text("The disk is full.\n")
    assert read_status(run).error == "The disk is full."


def test_a_launcher_on_another_host_cannot_be_asked_whether_it_lives(run: Path) -> None:
    far = Launcher("far", os.getpid(), 1, None)
    (run / "attempt_02" / "launcher.json").write_text(
        json.dumps({"host": far.host, "pid": far.pid, "began": far.began, "slurm_job": None})
    )
    assert far.host != socket.gethostname()
    assert read_status(run).detail.startswith("started on far; it wrote something 0:0")


def test_a_job_in_the_queue_waits_and_says_why(run: Path, tmp_path: Path) -> None:
    slurm(tmp_path, "echo '7|PENDING|Priority|1:00:00'")
    record_job(run, 7)
    status = read_status(run)
    assert (status.state, status.detail) == ("waiting", "job 7 is PENDING (Priority)")


def test_the_time_limit_of_the_job_stands_beside_the_time_left(run: Path, tmp_path: Path) -> None:
    slurm(tmp_path, "echo '7|RUNNING|None|2:00:30'")
    record_job(run, 7)
    assert read_status(run).time_left() == "1:00, limit in 2:00:30"


def test_a_job_that_slurm_has_forgotten_is_as_none(run: Path, tmp_path: Path) -> None:
    slurm(tmp_path, "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    record_job(run, 7)
    record_end(run / "attempt_02", Ended(75, None))
    assert read_status(run).state == "stopped"


def test_a_slurm_that_fails_is_an_error_of_one_paragraph(run: Path, tmp_path: Path) -> None:
    slurm(tmp_path, "echo 'Unable to contact slurm controller' >&2; exit 1")
    with pytest.raises(HeadraceError, match="squeue failed: Unable to contact"):
        queued([7])


@pytest.mark.parametrize(
    ("file", "text", "why"),
    [
        ("attempt_02/outcome.json", "{broken", "attempt_02/outcome.json isn't what was written"),
        ("attempt_02/launcher.json", '{"host": 3}', "attempt_02/launcher.json isn't what was written"),
        ("slurm_job", "none", "slurm_job holds no number"),
        ("config.yaml", "{{", "config.yaml, line 1"),
        ("config.yaml", "run: 3", "AttributeError"),
        ("metrics.jsonl", '{"reward/mean": 1}\n', "KeyError"),
    ],
)
def test_a_file_that_cannot_be_read_does_not_hide_the_other_runs(run: Path, file: str, text: str, why: str) -> None:
    (run / file).write_text(text)
    status = read_status(run)
    assert status.state == "unreadable"
    assert why in status.detail


def test_a_run_without_an_attempt_is_new(run: Path) -> None:
    for attempt in run.glob("attempt_*"):
        attempt.rmdir()
    assert read_status(run).state == "new"


def test_only_whole_rows_at_the_end_of_a_big_file_are_read(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(f'{{"step": {step}}}\n' for step in range(100_000)) + '{"step": 10')
    rows = last_rows(file, most_bytes=200)
    assert rows[-1] == {"step": 99_999}
    assert 5 < len(rows) < 20
    assert [row["step"] for row in rows] == list(range(100_000 - len(rows), 100_000))
    assert last_rows(tmp_path / "none") == []


@pytest.mark.parametrize(
    ("text", "value"),
    [("03:04", 184), ("2:03:04", 7384), ("1-02:03:04", 93784), ("UNLIMITED", None), ("INVALID", None)],
)
def test_times_of_slurm_are_read(text: str, value: float | None) -> None:
    assert seconds(text) == value


def test_runs_are_found_by_name_and_by_path_and_listed_by_their_last_word(run: Path) -> None:
    assert find_run(Path("sums")) == find_run(run) == run
    other = Path("runs/other")
    other.mkdir()
    (other / "config.yaml").write_text("run: {}\n")
    silent_for(other, 100)
    assert all_runs() == [other, run]
    with pytest.raises(HeadraceError, match=r"no run nix.*\(other, sums\)"):
        find_run(Path("nix"))


def test_the_tables_show_the_figures(run: Path) -> None:
    record_launcher(run / "attempt_02")
    console = Console(width=120, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    show([read_status(run)], console)
    show_one(read_status(run), console)
    text = console.export_text()
    assert text.count("10/40") == 2
    for words in ("running", "0.250", "1:00", "restarts"):
        assert words in text


def test_a_long_error_leaves_room_for_names_and_figures(tmp_path: Path) -> None:
    error = "Rank 0 failed: " + "no reward could be computed " * 10
    found = [RunStatus(tmp_path / "sums", "failed", step=10, steps=40, reward=0.25, per_minute=12, error=error)]
    found.append(RunStatus(tmp_path / "worn", "unreadable", "config.yaml is empty"))
    console = Console(width=80, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    show(found, console)
    text = console.export_text()
    for words in ("│ sums ", "failed", "10/40", "0.250", "steps/min", "restarts", "worn: config.yaml is empty", error):
        assert words in text


def test_the_command_shows_all_runs_or_one(run: Path) -> None:
    assert "sums" in CliRunner().invoke(app, ["status"]).stdout
    assert "state       running" in CliRunner().invoke(app, ["status", "sums"]).stdout
    refused = CliRunner().invoke(app, ["status", "nix"])
    assert refused.exit_code == 2
    assert "There is no run nix" in refused.stderr


def test_a_job_knows_whether_it_waits_or_runs() -> None:
    assert QueuedJob(1, "PENDING", "Priority", None).waits
    assert QueuedJob(1, "RUNNING", "None", 5.0).runs
