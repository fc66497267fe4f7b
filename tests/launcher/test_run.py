"""The launcher under both MPIs, with fake ranks: statuses, signals, deaths, environment, nothing left behind."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from headrace.launcher.processes import processes_of
from headrace.launcher.run import STOPPED
from headrace.ranks.failure import JOB_MARK
from headrace.train.checkpoint import CheckpointStore

from .conftest import Launch, is_alive

both = pytest.mark.parametrize("mpi", ["mpich", "openmpi"])


@both
def test_a_job_that_ends_well_has_status_0_and_passes_lines_on(launch: Launch, mpi: str) -> None:
    job = launch(mpi, "ok")
    assert job.wait() == 0
    assert "everybody is up" in job.output.read_text()
    assert job.errors.read_text() == ""
    assert (job.run / "latest").resolve() == (job.run / "attempt_01").resolve()
    log = (job.run / "latest" / "rank_002.log").read_text()
    assert "rank 2 of 3" in log
    assert "['--attempt', '1', '--ranks', '3']" in log


@both
@pytest.mark.parametrize(("mode", "number", "name"), [("kill", 9, "SIGKILL"), ("segfault", 11, "SIGSEGV")])
def test_a_rank_ended_by_a_signal_is_named(launch: Launch, mpi: str, mode: str, number: int, name: str) -> None:
    job = launch(mpi, mode, ranks=4)
    assert job.wait() == 128 + number
    errors = job.errors.read_text()
    assert f"Rank 1 was ended by signal {number} ({name})" in errors
    if mode == "kill":
        assert "the last thing that rank 1 did" in errors
    assert "Traceback" not in errors
    assert not any(map(is_alive, job.pids()))


@both
def test_the_paragraph_of_the_first_failing_rank_is_quoted(launch: Launch, mpi: str) -> None:
    job = launch(mpi, "error")
    assert job.wait() == 7
    errors = job.errors.read_text()
    paragraph = "Rank 1 failed: The tokenizer has no end of text. Choose another model."
    assert errors == f"headrace: {paragraph}\nMore is in runs/fake/latest/rank_001.log.\n"
    output = job.output.read_text()
    assert not any(word in output for word in ("Abort", "ABORT", "tokenizer", "rank 1", "Traceback")), output


@both
def test_a_job_that_hangs_after_an_error_is_killed(launch: Launch, mpi: str) -> None:
    job = launch(mpi, "hung_error", overrides=("launch.kill_after_s=1",))
    assert job.wait() == 1
    assert "Rank 1 failed: The tokenizer has no end of text." in job.errors.read_text()
    assert not any(map(is_alive, job.pids()))


def test_ranks_that_dont_come_are_named_when_the_limit_strikes(launch: Launch) -> None:
    job = launch("mpich", "late", overrides=("run.wait_limit_s=4",))
    assert job.wait() == 1
    assert "Ranks [1] of 3 haven't started MPI within 4 s (run.wait_limit_s)" in job.errors.read_text()
    assert not any(map(is_alive, job.pids()))


@both
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_mpirun_is_named_when_a_signal_ended_mpirun_itself(launch: Launch, mpi: str, number: signal.Signals) -> None:
    job = launch(mpi, "sleep")
    job.until_up()
    (mpirun,) = Path(f"/proc/{job.process.pid}/task/{job.process.pid}/children").read_text().split()
    os.kill(int(mpirun), number)
    assert job.wait() == 128 + number
    errors = job.errors.read_text()
    assert (
        f"headrace: mpirun itself was ended by signal {number.value} ({number.name}), and the ranks with it." in errors
    )
    assert "Rank " not in errors
    assert not any(map(is_alive, job.pids()))


@both
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_signal_lets_every_rank_end_cleanly(launch: Launch, mpi: str, number: signal.Signals) -> None:
    job = launch(mpi, "sleep")
    job.until_up()
    job.process.send_signal(number)
    assert job.wait() == STOPPED
    assert "--resume" in job.errors.read_text()
    assert not any(map(is_alive, job.pids()))


@both
@pytest.mark.parametrize(
    ("mode", "status", "cause"),
    [
        ("late_error", 7, "Rank 1 failed: The tokenizer has no end of text. Choose another model."),
        ("late_kill", 128 + signal.SIGKILL, "was ended by signal 9 (SIGKILL)"),
    ],
)
def test_a_rank_that_fails_while_the_job_is_stopping_is_quoted(
    launch: Launch, mpi: str, mode: str, status: int, cause: str
) -> None:
    job = launch(mpi, mode)
    job.until_up()
    job.process.send_signal(signal.SIGINT)
    assert job.wait() == status
    errors = job.errors.read_text()
    assert cause in errors
    assert "headrace: stopped" not in errors


@pytest.mark.parametrize("mode", ["sleep", "deaf"])
@pytest.mark.parametrize("step", [0, 20])
def test_what_resume_will_do_follows_from_the_checkpoints_that_are_there(launch: Launch, mode: str, step: int) -> None:
    job = launch("mpich", mode, overrides=(f"launch.stop_within_s={1 if mode == 'deaf' else 60}",))
    job.until_up()
    if step:
        store = CheckpointStore(job.run / "checkpoints", keep=2)
        store.begin(step)
        store.commit(step, {"step": step})
    job.process.send_signal(signal.SIGTERM)
    assert job.wait() == (STOPPED if mode == "sleep" else 128 + signal.SIGTERM)
    expected = f"of step {step}" if step else "before the first checkpoint; --resume begins the run again"
    assert expected in job.errors.read_text()


@both
def test_a_second_ctrl_c_kills_ranks_that_ignore_the_first(launch: Launch, mpi: str) -> None:
    job = launch(mpi, "deaf")
    job.until_up()
    job.process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert job.process.poll() is None
    job.process.send_signal(signal.SIGINT)
    assert job.wait(10) == 128 + signal.SIGINT
    assert not any(map(is_alive, job.pids()))


@both
def test_ranks_that_ignore_a_stop_are_killed_after_the_limit(launch: Launch, mpi: str) -> None:
    job = launch(mpi, "deaf", overrides=("launch.stop_within_s=1",))
    job.until_up()
    job.process.send_signal(signal.SIGTERM)
    assert job.wait(10) == 128 + signal.SIGTERM
    assert "within 1 s (launch.stop_within_s) and are killed" in job.output.read_text()
    assert not any(map(is_alive, job.pids()))


@both
def test_children_of_ranks_end_with_the_job(launch: Launch, mpi: str) -> None:
    job = launch(mpi, "child")
    job.until_up()
    rank = job.pids()[0]
    environ = Path(f"/proc/{rank}/environ").read_bytes().split(b"\0")
    mark = next(entry for entry in environ if entry.startswith(JOB_MARK.encode())).decode().partition("=")[2]
    end = time.monotonic() + 10
    while len(processes_of(mark)) < 5 and time.monotonic() < end:
        time.sleep(0.05)
    assert len(processes_of(mark)) >= 5, "mpirun, three ranks, one child"
    job.process.send_signal(signal.SIGTERM)
    job.wait()
    assert processes_of(mark) == []


@both
def test_ranks_end_when_the_launcher_is_killed(launch: Launch, mpi: str) -> None:
    job = launch(mpi, "sleep")
    job.until_up()
    job.process.kill()
    end = time.monotonic() + 20
    while any(map(is_alive, job.pids())) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(map(is_alive, job.pids()))


@both
def test_what_other_launchers_left_in_the_environment_does_no_harm(
    launch: Launch, mpi: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stale = {
        "SLURM_JOB_ID": "17",
        "SLURM_JOB_NODELIST": "gone[1-4]",
        "SLURM_NTASKS": "64",
        "SLURM_NNODES": "4",
        "SLURM_TASKS_PER_NODE": "16(x4)",
        "PMI_RANK": "3",
        "PMI_SIZE": "64",
        "OMPI_COMM_WORLD_RANK": "3",
        "MASTER_ADDR": "gone1",
        "MASTER_PORT": "29500",
        "RANK": "3",
        "WORLD_SIZE": "64",
        "LOCAL_RANK": "3",
    }
    for name, value in stale.items():
        monkeypatch.setenv(name, value)
    job = launch(mpi, "environment", overrides=("launch.env.MY_OWN=yes", "ranks.threads=1"))
    assert job.wait() == 0
    line = next(line for line in job.output.read_text().splitlines() if line.startswith("environment "))
    seen = json.loads(line.removeprefix("environment "))
    assert not any(name.startswith("SLURM_") or name.startswith("MASTER_") for name in seen)
    assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK"} & set(seen)
    assert seen["OMP_NUM_THREADS"] == seen["MKL_NUM_THREADS"] == "1"
    assert seen["HF_HUB_OFFLINE"] == "1"
    assert seen["TOKENIZERS_PARALLELISM"] == "false"
    assert seen["MY_OWN"] == "yes"


@both
def test_more_ranks_than_cores_start(launch: Launch, mpi: str) -> None:
    ranks = len(os.sched_getaffinity(0)) + 4
    job = launch(mpi, "ok", ranks=ranks)
    assert job.wait() == 0
    assert len(job.pids()) == ranks


def test_steps_appear_as_plain_lines_and_a_picture_ends_the_run(launch: Launch) -> None:
    job = launch("mpich", "metrics")
    assert job.wait() == 0
    output = job.output.read_text()
    assert "step 2/60, version 2, reward 0.200, step s 0.10" in output
    assert (job.run / "learning_curve.png").stat().st_size > 10_000


def test_a_resumed_run_goes_on_in_a_new_attempt(launch: Launch) -> None:
    first = launch("mpich", "ok")
    assert first.wait() == 0
    store = CheckpointStore(first.run / "checkpoints", keep=2)
    store.begin(20)
    store.commit(20, {"step": 20})
    second = launch("mpich", "ok", resume=True, overrides=("run.steps=100",))
    assert second.wait() == 0
    assert "run.steps 60 → 100" in second.output.read_text()
    assert "'--resume'" in (first.run / "latest" / "rank_000.log").read_text()
    assert (first.run / "latest").readlink() == Path("attempt_02")


def test_a_run_resumed_before_its_first_checkpoint_begins_again(launch: Launch) -> None:
    first = launch("mpich", "metrics")
    assert first.wait() == 0
    second = launch("mpich", "metrics", resume=True)
    assert second.wait() == 0
    assert "no checkpoint was written yet" in second.output.read_text()
    assert "--resume" not in (first.run / "latest" / "rank_000.log").read_text()
    assert len((first.run / "metrics.jsonl").read_text().splitlines()) == 3
    assert len((first.run / "attempt_01" / "metrics.jsonl").read_text().splitlines()) == 3


def test_ranks_that_do_not_get_over_a_death_are_ended(launch: Launch) -> None:
    job = launch("openmpi", "kill", overrides=("launch.repair=true", "run.wait_limit_s=4"))
    assert job.wait(60) not in (0, 75)
    assert "Rank 1 died, and the others haven't gone on without it within 4 s" in job.errors.read_text()
    assert not any(map(is_alive, job.pids()))
