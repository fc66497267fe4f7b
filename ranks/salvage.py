"""What a generator finds of earlier launches of the run when it starts: the groups in its share of the archive.

finished ──▶ its store, in memory as far as there is room     unfinished ──▶ its main loop     all ──▶ told to trainer 0
"""

from __future__ import annotations

from headrace.comm.messages import HeldGroup, Salvaged
from headrace.comm.trajectories import TrajectoryStore
from headrace.ranks.archive import ArchiveFiles, ArchiveWriter
from headrace.ranks.failure import complain
from headrace.ranks.resume import held_group, newer
from headrace.ranks.run import Rank
from headrace.ranks.segments import Archived, half_written, read_share

MIB = 1 << 20


def open_archive(rank: Rank) -> tuple[TrajectoryStore, list[Archived], ArchiveWriter | None]:
    """The finished and unfinished groups of this generator's share of the archive, of which it tells trainer 0, and
    what writes its own."""
    config = rank.config
    store = TrajectoryStore(config.rollout.memory_mb * MIB)
    if not config.checkpoint.archive:
        return store, [], None
    files = ArchiveFiles(rank.archive, rank.launch, rank.rank)
    held: dict[tuple[int, int], HeldGroup] = {}
    unfinished: dict[tuple[int, int], Archived] = {}
    share = rank.archive, rank.launch, rank.index, len(rank.roles.generators)
    for path in half_written(*share):
        path.unlink(missing_ok=True)
    for segment in read_share(*share) if rank.start_step else ():
        files.adopt(segment)
        for sentence in segment.damaged:
            complain(sentence)
        for group in segment.groups:
            if newer(group, held.get(group.key)) and (group.finished or config.goes_on_within_groups):
                held[group.key] = held_group(group)
                _take_over(group, store, unfinished)
    if rank.start_step:
        rank.transport.send(rank.roles.trainers[0], Salvaged([*held.values()]))
    return store, [*unfinished.values()], ArchiveWriter(files, rank.on_error, complain)


def _take_over(group: Archived, store: TrajectoryStore, unfinished: dict[tuple[int, int], Archived]) -> None:
    """A group of the archive; an older copy of it doesn't count any more."""
    unfinished.pop(group.key, None)
    store.release([group.key])
    if group.finished:
        store.put(*group.key, group.trajectories)
        store.let_go([group.key], written=True)
    else:
        unfinished[group.key] = group
