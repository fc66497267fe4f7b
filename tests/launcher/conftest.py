"""Runs the launcher in a process of its own, with fake ranks under a real mpirun."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

FAKE = Path(__file__).with_name("fake_rank.py")

DRIVER = """
import sys
from pathlib import Path
from headrace.comm.errors import HeadraceError
from headrace.launcher.config import load
from headrace.launcher.crew import with_ranks
from headrace.launcher.start import run_job
config, fake, ranks, resume, *overrides = sys.argv[1:]
loaded = with_ranks(load(Path(config), overrides), int(ranks))
sys.exit(run_job(loaded, resume == "resume", False, (fake,)))
"""


class Launched:
    """A launcher at work in `folder`."""

    def __init__(self, folder: Path, mpi: str, mode: str, ranks: int, resume: bool, overrides: tuple[str, ...]) -> None:
        config = folder / "config.yaml"
        config.write_text("run: {name: fake}\nrollout: {engine: latency}\n")
        self.run = folder / "runs" / "fake"
        settings = [f"launch.mpi={mpi}", f"launch.env.FAKE_MODE={mode}", *overrides]
        command = [sys.executable, "-c", DRIVER, str(config), str(FAKE), str(ranks), "resume" if resume else "new"]
        self.output = folder / "output.txt"
        self.errors = folder / "errors.txt"
        with open(self.output, "w") as out, open(self.errors, "w") as err:
            self.process = subprocess.Popen([*command, *settings], cwd=folder, stdout=out, stderr=err)
        self.began = time.monotonic()

    def wait(self, limit_s: float = 30.0) -> int:
        return self.process.wait(limit_s)

    def until_up(self) -> None:
        """Wait until all ranks run."""
        end = time.monotonic() + 30
        while "everybody is up" not in self.output.read_text():
            assert time.monotonic() < end, self.output.read_text() + self.errors.read_text()
            assert self.process.poll() is None, self.errors.read_text()
            time.sleep(0.05)

    def pids(self) -> list[int]:
        return [int(file.read_text()) for file in sorted(self.run.glob("attempt_*/rank_*.pid"))]


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie doesn't."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


Launch = Callable[..., Launched]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    started: list[Launched] = []

    def start(mpi: str, mode: str, ranks: int = 3, resume: bool = False, overrides: tuple[str, ...] = ()) -> Launched:
        started.append(Launched(tmp_path, mpi, mode, ranks, resume, overrides))
        return started[-1]

    yield start
    for launched in started:
        if launched.process.poll() is None:
            launched.process.kill()
            launched.process.wait()
        for pid in launched.pids():
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)
