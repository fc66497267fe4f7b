"""Ranks that loaded the library of another MPI than their launcher's."""

from __future__ import annotations

from launch import run_ranks


def test_worlds_of_one_under_a_foreign_launcher_are_detected_without_being_told_the_number() -> None:
    ended = run_ranks("mpich", 2, "world_size", library="openmpi")
    assert ended.status == 3
    assert ended.stdout.count("refused: 2 ranks were started, but each of them is a world of its own") == 2
    assert "Open MPI" in ended.stdout
