"""What was finished when a run was stopped or killed isn't generated again, and every ticket is accounted for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import pytest
from jobs import archived, check_books, latency_config, metrics_of, run_job, start_job, trained
from tiny import await_steps, kill_after

from headrace.comm.trajectories import COLUMN_DTYPES
from headrace.ranks.journal import read_journal
from headrace.ranks.segments import read_segment, read_share

STOPPED, KILLED = 75, 137
STEPS, GROUPS, EVERY = 24, 4, 8


def config(generators: int, archive: bool = True, token_ms: float = 2, train_s: float = 0.3) -> dict[str, Any]:
    """By default generation is quick and training slow, so that all but the newest groups are in the archive at any
    moment."""
    return latency_config(
        run={"steps": STEPS, "keep_samples": 100},
        ranks={"generators": generators, "trainers": 2},
        ledger={"max_staleness": 2, "groups_per_step": GROUPS},
        rollout={"latency": {"token_ms": token_ms, "train_s": train_s}},
        checkpoint={"every": EVERY, "archive": archive},
    )


def archived_as_is(folder: Path) -> set[tuple[int, int]]:
    """The finished groups that can be read."""
    segments = read_share(folder / "runs/job/archive", 99, 0, 1)
    return {group.key for segment in segments for group in segment.groups if group.finished}


def stop(folder: Path, job: dict[str, Any], steps: int, *options: str) -> None:
    """Run until so many steps are done, then SIGTERM."""
    process = start_job(job, folder, *options)
    await_steps(process, folder, steps)
    process.terminate()
    output, _ = process.communicate(timeout=60)
    assert process.returncode == STOPPED, output


def check_end(folder: Path, metrics: list[dict[str, Any]]) -> None:
    check_books(metrics, 2)
    names = ("issued", "trained", "outstanding", "returned")
    assert [metrics[-1][f"tickets/{name}"] for name in names] == [STEPS * GROUPS, STEPS * GROUPS, 0, 0]
    assert [path.name for path in (folder / "runs/job/archive").iterdir()] == ["journal.jsonl"], "all is covered"


@pytest.mark.parametrize("generators", [pytest.param(3, marks=pytest.mark.slow), 2])
def test_after_a_stop_no_finished_group_is_generated_again(tmp_path, generators):
    stop(tmp_path, config(3), 5)
    first, before = archived(tmp_path), metrics_of(tmp_path)
    assert first, "at S = 2 some groups are finished and not trained"
    stop(tmp_path, config(generators), len(before) + 5, "--resume")
    again = {key[0] for key, group in archived(tmp_path).items() if group.launch == 1}
    assert again
    assert again.isdisjoint(ticket for ticket, _ in first), "the second launch made none of them"
    metrics, output = run_job(config(generators), tmp_path, "--resume")
    assert metrics[: len(before)] == before
    assert "finished groups" in output
    check_end(tmp_path, metrics)


@pytest.mark.parametrize(
    ("victim", "generators"),
    [(3, 3), pytest.param(0, 3, marks=pytest.mark.slow), pytest.param(4, 1, marks=pytest.mark.slow)],
)
def test_after_a_crash_steps_are_repeated_with_their_groups_and_nothing_is_generated_again(
    tmp_path, victim, generators
):
    process = start_job(config(3), tmp_path)
    kill_after(process, tmp_path, 13, victim)
    process.communicate(timeout=60)
    assert process.returncode == KILLED
    made, journal = archived(tmp_path), read_journal(tmp_path / "runs/job/archive/journal.jsonl")
    before, rows = trained(tmp_path), metrics_of(tmp_path)
    done = max(journal.steps) + 1
    assert sorted(journal.steps) == list(range(EVERY, done))
    metrics, output = run_job(config(generators), tmp_path, "--resume")
    check_end(tmp_path, metrics)
    assert f"steps {EVERY + 1} to {done} are trained again" in output
    assert metrics[:done] == rows[:done], "they are repeated, not counted again"
    after = trained(tmp_path)
    assert {step: after[step] for step in range(1, done)} == {step: before[step] for step in range(1, done)}
    attempts = {ticket: attempt for keys in after.values() for ticket, attempt in keys}
    assert {key for key in made if attempts.get(key[0], key[1]) != key[1]} == set(), "trained are those that were made"


def test_groups_at_work_at_a_stop_go_on_from_their_tokens(tmp_path):
    slow = {"token_ms": 15.0, "train_s": 0.01}
    stop(tmp_path, config(3, **slow), 5)
    kept, before = archived(tmp_path, finished=False), metrics_of(tmp_path)
    assert kept
    process = start_job(config(2, **slow), tmp_path, "--resume")
    kill_after(process, tmp_path, len(before) + 2, 3)
    output, _ = process.communicate(timeout=60)
    assert f"and {len(kept)} unfinished ones" in output
    made = {key: group for key, group in archived(tmp_path).items() if group.launch == 1}
    assert {key for key in made if key[0] in {ticket for ticket, _ in kept}} <= kept.keys(), "as no new attempts"
    for key in kept.keys() & made.keys():
        for begun, whole in zip(kept[key].trajectories, made[key].trajectories, strict=True):
            length = len(begun.tokens)
            for name in COLUMN_DTYPES:
                assert (getattr(whole, name)[:length] == getattr(begun, name)).all()
            assert len(whole.tokens) > length or begun.finish
            assert (whole.versions[length:] >= len(before)).all()
    assert kept.keys() & made.keys()
    metrics, _ = run_job(config(2, **slow), tmp_path, "--resume")
    check_end(tmp_path, metrics)


@pytest.mark.slow
def test_a_damaged_group_is_named_and_generated_again(tmp_path):
    stop(tmp_path, config(3), 5)
    folder = tmp_path / "runs/job/archive"
    segment = max(folder.glob("*.h5"), key=lambda path: path.stat().st_size)
    [ticket, attempt] = read_segment(segment).groups[0].key
    with h5py.File(segment) as file:
        place = file[f"{ticket:09d}_{attempt}/logprobs"].id.get_offset()
    whole = bytearray(segment.read_bytes())
    whole[place] ^= 1
    segment.write_bytes(whole)
    made = archived_as_is(tmp_path)
    metrics, _ = run_job(config(3), tmp_path, "--resume")
    check_end(tmp_path, metrics)
    logs = "".join(path.read_text() for path in (tmp_path / "runs/job/latest").glob("rank_*.log"))
    assert f"Ticket {ticket}, attempt {attempt}, in runs/job/archive/{segment.name} is damaged" in logs
    attempts = {number: again for keys in trained(tmp_path).values() for number, again in keys}
    assert {key for key in made if attempts.get(key[0], key[1]) != key[1]} == set(), "all others are trained"


@pytest.mark.slow
def test_without_an_archive_groups_are_generated_anew(tmp_path):
    job = config(3, archive=False)
    stop(tmp_path, job, 5)
    assert not (tmp_path / "runs/job/archive").exists()
    metrics, _ = run_job(job, tmp_path, "--resume")
    check_books(metrics, 2)
    assert metrics[-1]["tickets/trained"] == STEPS * GROUPS


def test_until_there_is_a_checkpoint_trained_groups_are_not_kept(tmp_path):
    job = config(1, train_s=0.1)
    job["checkpoint"]["every"] = 0
    process = start_job(job, tmp_path)
    kill_after(process, tmp_path, 20, 2)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == KILLED, output
    kept = archived(tmp_path)
    assert 0 < len(kept) < 60, "of 80 and more: those that wait, and those of the last moment"
    assert read_journal(tmp_path / "runs/job/archive/journal.jsonl").steps == {}
