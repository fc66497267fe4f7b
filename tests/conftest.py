"""Tests run on two cores at once; those that share something costly stay together on one."""

from __future__ import annotations

from pathlib import Path

import pytest

TESTS = Path(__file__).parent
TOGETHER = ("slurm",)
"""Folders of tests that share a session's worth of set-up: one cluster."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        folder = item.path.relative_to(TESTS).parts[0]
        item.add_marker(pytest.mark.xdist_group(folder if folder in TOGETHER else str(item.path)))
