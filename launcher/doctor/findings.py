"""What checks return, and how it is shown."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from headrace.comm.errors import HeadraceError

Level = Literal["OK", "WARN", "FAIL"]
STYLES: dict[Level, str] = {"OK": "green", "WARN": "yellow", "FAIL": "bold red"}


class Finding(msgspec.Struct, frozen=True):
    """What one check found."""

    check: str
    level: Level
    text: str
    remedy: str = ""
    """What to do; empty only where nothing is to be done, or where the text says it."""


Check = Callable[[], Finding]


def ok(check: str, text: str) -> Finding:
    return Finding(check, "OK", text)


def warn(check: str, text: str, remedy: str) -> Finding:
    return Finding(check, "WARN", text, remedy)


def fail(check: str, text: str, remedy: str = "") -> Finding:
    return Finding(check, "FAIL", text, remedy)


def worst(check: str, complaints: Sequence[Finding], text: str) -> Finding:
    """One finding for all complaints of a check, at the level of the worst; OK with this text if there are none."""
    if not complaints:
        return ok(check, text)
    level: Level = "FAIL" if any(complaint.level == "FAIL" for complaint in complaints) else "WARN"
    remedies = dict.fromkeys(complaint.remedy for complaint in complaints if complaint.remedy)
    return Finding(check, level, "; ".join(complaint.text for complaint in complaints), " ".join(remedies))


def examine(name: str, check: Check, limit_s: float) -> Finding:
    """Run a check in a thread, within a limit: a file system that hangs can't be interrupted, but it can be left."""
    found: list[Finding] = []
    thread = threading.Thread(target=lambda: found.append(guarded(name, check)), name=name, daemon=True)
    thread.start()
    thread.join(limit_s)
    if found:
        return found[0]
    return fail(name, f"there was no answer within {limit_s:.0f} s", "Look for a file system or a service that hangs.")


def guarded(name: str, check: Check, beyond: tuple[type[Exception], ...] = ()) -> Finding:
    """Run a check; what it raises is a FAIL, unless it is one of the errors `beyond` a single check."""
    try:
        return check()
    except beyond:
        raise
    except HeadraceError as error:
        return fail(name, str(error))
    except Exception as error:
        return fail(name, f"the check itself failed: {type(error).__name__}: {error}", "Report this, with the message.")


def show(findings: Sequence[Finding], console: Console) -> None:
    """Print a table, remedies below what they mend, and a last line with the sum of it."""
    table = Table("check", "", "found", header_style="bold", border_style="dim")
    for finding in findings:
        text = Text(finding.text)
        if finding.remedy:
            text.append(f"\n→ {finding.remedy}", "italic")
        table.add_row(Text(finding.check), Text(finding.level, STYLES[finding.level]), text)
    console.print(table)
    console.print(Text(summary(findings)))


def summary(findings: Sequence[Finding]) -> str:
    """For instance `12 OK, 1 WARN, 0 FAIL`."""
    levels = [finding.level for finding in findings]
    return ", ".join(f"{levels.count(level)} {level}" for level in STYLES)


def failed(findings: Sequence[Finding]) -> bool:
    return any(finding.level == "FAIL" for finding in findings)
