"""Ranks on several hosts hold connections to the launcher, which learns from them who died first."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from headrace.launcher import lifelines
from headrace.launcher.lifelines import Connections
from headrace.ranks.lifeline import OFFER, Offer

RANK = """
import sys, time
from pathlib import Path
from headrace.ranks.lifeline import Lifeline
lifeline = Lifeline(Path(sys.argv[1]), int(sys.argv[2]))
sys.stdin.readline()
lifeline.let_go()
time.sleep(60)
"""


@pytest.fixture
def watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Connections:
    monkeypatch.setattr(lifelines, "outer_addresses", lambda: ["127.0.0.1"])
    return Connections(tmp_path, 3)


def start(folder: Path, rank: int) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", RANK, str(folder), str(rank)]
    return subprocess.Popen(words, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def all_there(watch: Connections) -> bool:
    return sorted(line.rank for line in watch._lines.values() if line.rank is not None) == [0, 1, 2]


def until(watch: Connections, done: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not done():
        assert time.monotonic() < end
        watch.poll()
        time.sleep(0.01)


def test_the_order_of_deaths_is_told_though_nobody_looked_meanwhile(watch: Connections, tmp_path: Path) -> None:
    ranks = [start(tmp_path, rank) for rank in range(3)]
    until(watch, lambda: all_there(watch))
    for rank in (2, 0, 1):
        os.kill(ranks[rank].pid, signal.SIGKILL)
        ranks[rank].wait()
    until(watch, lambda: len(watch.deaths) == 3)
    watch.close()
    assert watch.deaths == [2, 0, 1]


def test_a_rank_that_fails_counts_before_those_that_it_has_ended(watch: Connections, tmp_path: Path) -> None:
    ranks = [start(tmp_path, rank) for rank in range(3)]
    until(watch, lambda: all_there(watch))
    assert ranks[2].stdin is not None
    print("fail", file=ranks[2].stdin, flush=True)
    until(watch, lambda: len(watch.deaths) == 1)
    for rank in (0, 2, 1):
        ranks[rank].kill()
        ranks[rank].wait()
    until(watch, lambda: len(watch.deaths) == 3)
    watch.close()
    assert watch.deaths == [2, 0, 1]


@pytest.mark.parametrize("greeting", [b"a stranger\n", b"\n", b"x" * 1000, b""])
def test_strangers_are_no_ranks(watch: Connections, tmp_path: Path, greeting: bytes) -> None:
    offer = msgspec.json.decode((tmp_path / OFFER).read_bytes(), type=Offer)
    with socket.create_connection(("127.0.0.1", offer.port)) as stranger:
        stranger.sendall(greeting)
        until(watch, lambda: len(watch._lines) == 1)
    until(watch, lambda: not watch._lines)
    assert watch.deaths == []
    watch.close()


def test_a_rank_that_cant_reach_the_launcher_says_so_and_goes_on(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        offer = Offer(("127.0.0.1",), closed.getsockname()[1], "token")
    (tmp_path / OFFER).write_bytes(msgspec.json.encode(offer))
    rank = start(tmp_path, 1)
    assert rank.stderr is not None
    said = rank.stderr.readline()
    assert rank.poll() is None
    rank.kill()
    assert "The launcher can't be reached (127.0.0.1: [Errno 111] Connection refused)" in said
