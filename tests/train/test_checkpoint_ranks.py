"""Several ranks write into one checkpoint at their own pace."""

from __future__ import annotations

from headrace.train.checkpoint import CheckpointStore


def test_a_rank_that_is_done_does_not_trip_over_another_ranks_unfinished_file(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints", keep=2)
    folder = store.begin(5)
    (folder / ".tmpAbC").symlink_to(folder / "renamed away at this very moment")
    with store.writing(5) as mine:
        (mine / "engine_1").write_text("whole")
    assert folder.is_dir()
    (folder / ".tmpAbC").unlink()
    store.commit(5, {})
    assert store.steps() == [5]
