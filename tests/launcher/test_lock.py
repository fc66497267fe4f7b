"""One job at a time in a run folder, until the last of its processes has ended."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headrace.comm.errors import ConfigError
from headrace.launcher.lock import held

from .conftest import Launch

KILLED_LAUNCHER = """
import os, subprocess, sys
from pathlib import Path
from headrace.launcher.lock import held
with held(Path(sys.argv[1]), 1) as lock:
    subprocess.Popen(["sleep", sys.argv[2]], pass_fds=[lock], stdout=subprocess.DEVNULL)
    os._exit(0)
"""


def launcher_dies(run: Path, ranks_live_s: float) -> None:
    subprocess.run([sys.executable, "-c", KILLED_LAUNCHER, str(run), str(ranks_live_s)], check=True)


def test_ranks_whose_launcher_was_killed_are_waited_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    launcher_dies(tmp_path, 2)
    began = time.monotonic()
    with (
        pytest.raises(ConfigError, match=r"haven't ended within 0 s .*their launcher \(process \d+\)"),
        held(tmp_path, 0),
    ):
        pass
    with held(tmp_path, 60):
        assert time.monotonic() - began > 0.5
    assert "was killed" in capsys.readouterr().out


def test_mpirun_holds_the_folder_after_its_launcher(launch: Launch) -> None:
    first = launch("mpich", "deaf")
    first.until_up()
    first.process.kill()
    first.process.wait()
    second = launch("mpich", "ok", resume=True, overrides=("launch.stop_within_s=1",))
    assert second.wait() != 0
    assert "The ranks of the last job in runs/fake haven't ended within 1 s" in second.errors.read_text()
    assert not (first.run / "attempt_02").exists()


def test_a_file_system_without_locks_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with held(tmp_path, 1):
        pass
    assert "can't be locked (Function not implemented)" in capsys.readouterr().err
