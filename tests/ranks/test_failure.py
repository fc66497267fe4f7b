"""What a failed rank leaves, and to whom it tells it."""

from __future__ import annotations

import os
import tempfile

import pytest

from headrace.comm.errors import DataError
from headrace.ranks.failure import FAILED, Failure, announce, arrive


class JobAbortedError(Exception):
    pass


def fail(folder, error, quoted):
    """What the terminal shows when a rank fails."""

    def abort(status):
        assert status == FAILED
        raise JobAbortedError

    failure = Failure(folder, 1, abort)
    failure.quoted = quoted
    with tempfile.TemporaryFile("w+") as failure.terminal:
        with pytest.raises(JobAbortedError):
            failure(error)
        failure.terminal.seek(0)
        return failure.terminal.read()


def test_a_mistake_is_left_as_its_paragraph_and_a_defect_with_its_traceback(tmp_path, capsys):
    fail(tmp_path, DataError("Mend the file."), quoted=True)
    assert (tmp_path / "error_001.txt").read_text() == capsys.readouterr().err == "Mend the file.\n"
    fail(tmp_path, ZeroDivisionError("a defect"), quoted=True)
    assert (tmp_path / "error_001.txt").read_text().endswith("ZeroDivisionError: a defect\n")


def test_the_terminal_is_told_unless_a_launcher_does_it(tmp_path):
    assert fail(tmp_path, DataError("Mend the file."), quoted=True) == ""
    assert fail(tmp_path, DataError("Mend the file."), quoted=False) == "Mend the file.\n"
    assert fail(tmp_path / "gone", DataError("Mend the file."), quoted=True) == "Mend the file.\n"


def test_a_launcher_is_known_by_its_mark_and_not_by_what_an_earlier_one_left(tmp_path):
    os.mkfifo(tmp_path / "rank_001.alive")
    (tmp_path / "launcher.json").touch()
    assert not announce(tmp_path, 1, {})
    assert (tmp_path / "rank_001.pid").read_text() == f"{os.getpid()}\n"
    assert announce(tmp_path, 1, {"HEADRACE_JOB": "x"})


def test_a_rank_leaves_a_sign_by_the_number_that_its_starter_gave_it(tmp_path):
    arrive(tmp_path, {"SLURM_PROCID": "2", "PMI_RANK": "5"})
    arrive(tmp_path, {})
    arrive(tmp_path / "gone", {"PMI_RANK": "5"})
    assert [file.name for file in tmp_path.iterdir()] == ["rank_005.here"]


def test_a_collective_that_broke_off_is_blamed_on_the_others_in_one_paragraph(tmp_path):
    words = "[/pytorch/gloo/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:1: Connection reset by peer"
    shown = fail(tmp_path, RuntimeError(f"{words}\nException raised from ..."), quoted=False)
    assert shown == (tmp_path / "error_001.txt").read_text()
    assert "Traceback" not in shown
    assert shown.startswith("A collective of the trainers broke off: one of them has died")
    assert words in shown
    assert (tmp_path / "lost_001").exists()
