"""Rewards that hang, raise, crash or return nonsense are settled, and leave no process behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headrace.comm.errors import ConfigError, DataError, PeerLostError
from headrace.rollout.config import DataConfig
from headrace.rollout.environments import NamedReward, exact_match
from headrace.rollout.reward_server import Server, Stream
from headrace.rollout.reward_worker import Setup
from headrace.rollout.rewards import RewardPool, Scored, environment_without_mpi, start_reward_server
from headrace.rollout.task import Reward, Task

LIMIT_S = 60.0
BEHAVIOURS = '''
import os, signal, subprocess, sys, time
from pathlib import Path

MPI = ("PMI", "OMPI_", "MPI_", "PRTE_", "HYDI_")

def reward(task, text):
    """Do what the text says."""
    match text.split(":")[0]:
        case "hang": time.sleep(1000)
        case "raise": raise ValueError("no verdict on this")
        case "half": raise ValueError("half a character, " + chr(0xd800))
        case "mute": raise Mute
        case "exit": sys.exit(3)
        case "none": return None
        case "nan": return float("nan")
        case "inf": return float("inf")
        case "text": return "1.0"
        case "big": return "x" * 10_000_000
        case "die": os.kill(os.getpid(), signal.SIGKILL)
        case "leave": os._exit(7)
        case "count":
            file = Path(text.split(":", 1)[1])
            file.write_text(file.read_text() + "." if file.exists() else ".")
            return float("nan") if len(file.read_text()) < 3 else 1
        case "pid": return os.getpid()
        case "mpi": return [name for name in os.environ if name.startswith(MPI)] == [] and "mpi4py" not in sys.modules
        case "signals":
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2): os.kill(os.getpid(), number)
            return 5
        case "fork": return float(os.fork() > 0)
        case "fork and raise":
            if not os.fork(): raise ValueError("in the child")
            return 1
        case "print":
            print("by print")
            subprocess.run(["echo", "by a program"])
        case "child":
            child = subprocess.Popen(["sleep", "1000"])
            Path(text.split(":", 1)[1]).write_text(f"{os.getpid()} {child.pid}")
            time.sleep(1000)
    return len(text)

class Mute(Exception):
    def __str__(self):
        raise RuntimeError("nothing to say")
'''


@pytest.fixture(scope="module")
def behaviours(tmp_path_factory: pytest.TempPathFactory) -> NamedReward:
    file = tmp_path_factory.mktemp("rewards") / "behaviours.py"
    file.write_text(BEHAVIOURS)
    return NamedReward(f"{file}:reward")


def config(**settings: object) -> DataConfig:
    return DataConfig.model_validate({"environment": "a:b", "reward_timeout_s": 5.0, **settings})


@pytest.fixture
def make_pool() -> Iterator[Callable[..., RewardPool]]:
    pools: list[RewardPool] = []

    def make(reward: Reward, **settings: object) -> RewardPool:
        pools.append(RewardPool(reward, config(**settings)))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def settle(pool: RewardPool) -> dict[object, Scored]:
    """Poll until nothing is pending; every key comes once."""
    scored: dict[object, Scored] = {}
    limit = time.monotonic() + LIMIT_S
    while pool.pending:
        assert time.monotonic() < limit, f"{pool.pending} rewards were never settled"
        for one in pool.poll():
            assert one.key not in scored
            scored[one.key] = one
        time.sleep(0.002)
    return scored


def alive(pid: int) -> bool:
    """Whether a process exists and isn't a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.01)


def test_many_answers_are_scored_once_each_after_extraction(make_pool: Callable[..., RewardPool]) -> None:
    pool = make_pool(exact_match, answer={"extract": "first_number"}, reward_workers=2)
    for number in range(500):
        pool.submit(("ticket", number), Task("2+3", "5"), "it is 5." if number % 3 else "2 + 3 = 5")
    scored = settle(pool)
    assert [scored[("ticket", n)].reward for n in range(500)] == [float(n % 3 > 0) for n in range(500)]
    assert {one.attempts for one in scored.values()} == {1}


@pytest.mark.parametrize(
    ("text", "reason", "error"),
    [
        ("raise", "reward_raised", "ValueError: no verdict on this"),
        ("half", "reward_raised", r"ValueError: half a character, \ud800"),
        ("mute", "reward_raised", "Mute: (its own text can't be made: RuntimeError)"),
        ("exit", "reward_raised", "SystemExit: 3"),
        ("none", "reward_invalid", "None"),
        ("nan", "reward_invalid", "nan"),
        ("inf", "reward_invalid", "inf"),
        ("text", "reward_invalid", "'1.0'"),
        ("big", "reward_invalid", "(10000002 characters)"),
        ("die", "reward_process_died", "killed by SIGKILL"),
        ("leave", "reward_process_died", "exited with status 7"),
    ],
)
def test_a_failing_reward_is_retried_then_reported_and_others_go_on(
    make_pool: Callable[..., RewardPool], behaviours: NamedReward, text: str, reason: str, error: str
) -> None:
    pool = make_pool(behaviours, reward_retries=2)
    for key in (text, "fine", "also fine"):
        pool.submit(key, Task("q"), key)
    scored = settle(pool)
    failed = scored[text]
    assert (failed.reward, failed.attempts, failed.reason) == (None, 3, reason)
    assert failed.error is not None
    in_short, *trace = failed.error.splitlines()
    assert error in in_short
    assert bool(trace) == (reason == "reward_raised")
    if text == "raise":
        assert in_short.endswith("behaviours.py, line 11)")
        assert trace[0].startswith("Traceback")
    assert len(failed.error) < 3000
    assert (scored["fine"].reward, scored["also fine"].reward) == (4.0, 9.0)


def test_a_hanging_reward_is_ended_at_its_limit_together_with_what_it_started(
    make_pool: Callable[..., RewardPool], behaviours: NamedReward, tmp_path: Path
) -> None:
    pool = make_pool(behaviours, reward_timeout_s=0.3, reward_retries=0)
    pool.submit("hang", Task("q"), f"child:{tmp_path / 'pids'}")
    pool.submit("fine", Task("q"), "fine")
    scored = settle(pool)
    assert (scored["hang"].reason, scored["hang"].attempts) == ("reward_timeout", 1)
    assert "0.3 s" in str(scored["hang"].error)
    assert scored["fine"].reward == 4.0
    for pid in map(int, (tmp_path / "pids").read_text().split()):
        wait_until(lambda pid=pid: not alive(pid))


def test_of_a_process_that_a_reward_has_forked_only_the_parent_answers(
    make_pool: Callable[..., RewardPool], behaviours: NamedReward
) -> None:
    pool = make_pool(behaviours)
    texts = ["fork", "fork and raise", "fine"] * 5
    for number, text in enumerate(texts):
        pool.submit(number, Task("q"), text)
    scored = settle(pool)
    assert [(scored[number].reward, scored[number].attempts) for number in range(15)] == [(1, 1), (1, 1), (4, 1)] * 5


def test_what_a_reward_prints_goes_where_the_rank_writes_when_its_pool_is_made(
    make_pool: Callable[..., RewardPool], behaviours: NamedReward, tmp_path: Path
) -> None:
    start_reward_server()
    kept = [os.dup(1), os.dup(2)]
    log = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        pool = make_pool(behaviours)
    finally:
        for number, before in enumerate(kept, 1):
            os.dup2(before, number)
            os.close(before)
        os.close(log)
    pool.submit("print", Task("q"), "print")
    settle(pool)
    assert (tmp_path / "log").read_text() == "by print\nby a program\n"


def test_a_reward_that_fails_twice_and_then_works_counts(
    make_pool: Callable[..., RewardPool], behaviours: NamedReward, tmp_path: Path
) -> None:
    pool = make_pool(behaviours, reward_retries=2)
    pool.submit(0, Task("q"), f"count:{tmp_path / 'calls'}")
    assert settle(pool) == {0: Scored(0, 1.0, 3)}


def test_a_worker_killed_from_outside_is_replaced(
    make_pool: Callable[..., RewardPool], behaviours: NamedReward
) -> None:
    pool = make_pool(behaviours)
    for _ in range(3):
        pool.submit("pid", Task("q"), "pid")
        reward = settle(pool)["pid"].reward
        assert reward is not None
        assert alive(int(reward))
        os.kill(int(reward), signal.SIGKILL)
        wait_until(lambda pid=int(reward): not alive(pid))


def test_a_text_of_ten_megabytes_arrives(make_pool: Callable[..., RewardPool], behaviours: NamedReward) -> None:
    pool = make_pool(behaviours)
    pool.submit(0, Task("q"), "y" * 10_000_000)
    assert settle(pool)[0].reward == 1e7


def test_polling_never_waits_while_a_reward_runs(make_pool: Callable[..., RewardPool], behaviours: NamedReward) -> None:
    pool = make_pool(behaviours)
    pool.submit(0, Task("q"), "hang")
    assert [pool.poll() for _ in range(1000)] == [[]] * 1000
    assert pool.pending == 1


def test_workers_ignore_the_signals_that_the_rank_answers(
    make_pool: Callable[..., RewardPool], behaviours: NamedReward
) -> None:
    pool = make_pool(behaviours, reward_retries=0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2):
        os.kill(pool._server.process.pid, number)
    pool.submit(0, Task("q"), "signals")
    assert settle(pool)[0].reward == 5.0


def test_workers_see_nothing_of_mpi(
    make_pool: Callable[..., RewardPool], behaviours: NamedReward, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (
        "PMI_RANK",
        "PMIX_RANK",
        "OMPI_COMM_WORLD_RANK",
        "MPI_LOCALRANKID",
        "PRTE_LAUNCHED",
        "HYDI_CONTROL_FD",
    ):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("KEPT", "1")
    assert environment_without_mpi()["KEPT"] == "1"
    pool = make_pool(behaviours)
    pool.submit(0, Task("q"), "mpi")
    assert settle(pool)[0].reward == 1.0


def test_a_reward_that_cannot_be_sent_is_refused_at_once(make_pool: Callable[..., RewardPool]) -> None:
    with pytest.raises(ConfigError, match="can't be sent"):
        make_pool(lambda task, text: 1.0)


def test_a_task_that_cannot_be_sent_is_refused(make_pool: Callable[..., RewardPool]) -> None:
    pool = make_pool(exact_match)
    with pytest.raises(DataError, match="can't be sent"):
        pool.submit(0, Task("q", fields={"f": lambda: 0}), "a")
    assert pool.pending == 0


def test_a_reward_that_cannot_be_imported_there_ends_the_job_with_its_error(
    make_pool: Callable[..., RewardPool], tmp_path: Path
) -> None:
    file = tmp_path / "here_only.py"
    here = f"import os\nif os.getpid() != {os.getpid()}: raise RuntimeError('only here')\n"
    file.write_text(here + "def reward(task, text): return 1.0")
    pool = make_pool(NamedReward(f"{file}:reward"))
    pool.submit(0, Task("q"), "a")
    with pytest.raises(ConfigError, match=r"RuntimeError: only here \(.*here_only\.py, line 2\)\.$"):
        settle(pool)


def test_a_dead_server_is_reported(make_pool: Callable[..., RewardPool]) -> None:
    pool = make_pool(exact_match)
    pool.submit(0, Task("q", "a"), "a")
    pool._server.process.kill()
    with pytest.raises(PeerLostError, match="has ended, with 1 rewards outstanding"):
        settle(pool)


def test_the_server_waits_although_only_a_dying_process_is_left_to_look_at() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        began = time.monotonic()
        Server(Stream(ours), Setup([], b"", b"", 1.0, 0, 1), dying={os.getpid()}).wait()
        assert time.monotonic() - began < 10


def test_closing_ends_all_processes_although_a_reward_hangs(
    make_pool: Callable[..., RewardPool], behaviours: NamedReward, tmp_path: Path
) -> None:
    pool = make_pool(behaviours, reward_timeout_s=1000)
    pool.submit(0, Task("q"), f"child:{tmp_path / 'pids'}")
    wait_until(lambda: (tmp_path / "pids").exists() and bool((tmp_path / "pids").read_text()))
    pids = [*map(int, (tmp_path / "pids").read_text().split()), pool._server.process.pid]
    assert all(map(alive, pids))
    pool.close()
    for pid in pids:
        wait_until(lambda pid=pid: not alive(pid))


PARENT = """
import sys, time
assert __name__ == "__main__", "the main script was imported again by a child"
print("started", flush=True)
from headrace.rollout.config import DataConfig
from headrace.rollout.environments import NamedReward
from headrace.rollout.rewards import RewardPool, start_reward_server
from headrace.rollout.task import Task
start_reward_server()
pool = RewardPool(NamedReward(sys.argv[1] + ":reward"), DataConfig(environment="a:b", reward_timeout_s=1000))
pool.submit(0, Task("q"), "child:" + sys.argv[2])
print(pool._server.process.pid, flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("victim", ["rank", "server"])
def test_no_process_outlives_a_killed_rank_or_server(behaviours: NamedReward, tmp_path: Path, victim: str) -> None:
    script, pids_file = tmp_path / "parent.py", tmp_path / "pids"
    script.write_text(PARENT)
    command = [sys.executable, str(script), behaviours.path.removesuffix(":reward"), str(pids_file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "started\n"
        server = int(parent.stdout.readline())
        wait_until(lambda: pids_file.exists() and bool(pids_file.read_text()))
        worker = int(pids_file.read_text().split()[0])
        assert alive(server)
        assert alive(worker)
        os.kill(parent.pid if victim == "rank" else server, signal.SIGKILL)
        wait_until(lambda: not alive(worker))
        wait_until(lambda: not alive(server))
        parent.kill()
    os.kill(int(pids_file.read_text().split()[1]), signal.SIGKILL)  # what a reward started isn't the kernel's to end
