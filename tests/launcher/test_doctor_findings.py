"""Checks that raise or hang are findings, and findings are shown with their remedies."""

from __future__ import annotations

import io
import threading
import time

import pytest
from rich.console import Console

from headrace.comm.errors import HeadraceError, WaitLimitError
from headrace.launcher.doctor.findings import Finding, examine, fail, failed, guarded, ok, show, warn, worst


def raising(error: Exception) -> Finding:
    raise error


def test_a_mistake_is_a_fail_with_its_paragraph() -> None:
    found = examine("disk", lambda: raising(HeadraceError("Nothing is there. Do this.")), 5)
    assert found == Finding("disk", "FAIL", "Nothing is there. Do this.")


def test_a_defect_of_a_check_is_a_fail_with_its_kind_and_no_traceback() -> None:
    found = examine("disk", lambda: raising(ZeroDivisionError("by zero")), 5)
    assert found.level == "FAIL"
    assert found.text == "the check itself failed: ZeroDivisionError: by zero"


def test_a_check_that_hangs_is_left_at_its_limit() -> None:
    release = threading.Event()
    began = time.monotonic()

    def hang() -> Finding:
        release.wait(20)
        return ok("disk", "")

    found = examine("disk", hang, 0.1)
    release.set()
    assert (found.check, found.level) == ("disk", "FAIL")
    assert time.monotonic() - began < 10


def test_what_is_beyond_a_check_goes_on() -> None:
    with pytest.raises(WaitLimitError):
        guarded("x", lambda: raising(WaitLimitError("all is lost")), beyond=(WaitLimitError,))


def test_complaints_become_one_finding_at_the_level_of_the_worst() -> None:
    found = worst("x", [warn("", "a", "Do this."), fail("", "b", "Do that."), warn("", "c", "Do this.")], "fine")
    assert found == Finding("x", "FAIL", "a; b; c", "Do this. Do that.")
    assert worst("x", [warn("", "a", "Do this.")], "fine").level == "WARN"
    assert worst("x", [], "fine") == ok("x", "fine")


def test_the_table_shows_levels_remedies_and_a_sum() -> None:
    output = io.StringIO()
    found = [ok("one", "fine"), warn("two", "hm", "Look [here]."), fail("three", "no", "Mend it.")]
    show(found, Console(file=output, width=80))
    text = output.getvalue()
    for words in ("→ Look [here].", "→ Mend it.", "FAIL", "1 OK, 1 WARN, 1 FAIL"):
        assert words in text
    assert failed(found)
    assert not failed(found[:2])
