"""A generator put together from its parts: its services, its main loop from the first weights to the end of the run.

first weights ──▶ evaluation before ──▶ what was at work resumed ──▶ GeneratorLoop until Stop ──▶ evaluation after
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from headrace.comm.exchange import ExchangeOwner
from headrace.comm.messages import EvalResult, Evaluating
from headrace.comm.service import Service
from headrace.comm.trajectories import TrajectoryStore, make_group
from headrace.comm.weights import Subscriber
from headrace.ranks.archive import ArchiveWriter
from headrace.ranks.config import JobConfig
from headrace.ranks.evaluation import Share, evaluate_share
from headrace.ranks.generator import GeneratorDesk, GeneratorLoop
from headrace.ranks.groups import Group
from headrace.ranks.memory import MemoryBound
from headrace.ranks.run import IDLE_S, Rank, ledger_spec
from headrace.ranks.segments import Archived
from headrace.ranks.shutdown import await_stop, end_generator, until
from headrace.ranks.tasks import Scorer, TaskSource
from headrace.rollout.engine import Engine, SamplingParams

PROGRESS_S = 5.0
"""How often an evaluation says that it goes on, in seconds."""

MIB = 1 << 20

SOON_S = 0.005
"""Longest sleep of the main thread while it waits for something that the courier doesn't announce."""


class GeneratorRank:
    """A generator: its services first, its engine (slow to make) when the courier runs already."""

    def __init__(
        self,
        rank: Rank,
        subscriber: Subscriber,
        store: TrajectoryStore,
        unfinished: Iterable[Archived],
        archive: ArchiveWriter | None,
    ) -> None:
        """`store`: with what it has of earlier launches; `unfinished`: what they were at work on. `archive`: takes what
        is put into the store from now on, and what the store spills."""
        self._rank = rank
        self._subscriber = subscriber
        self._store = store
        self._unfinished = unfinished
        self._archive = archive
        self._nap_s = IDLE_S
        self._said_at = 0.0
        self._desk = GeneratorDesk(rank.transport, rank.roles)
        services: list[Service] = [self._desk, ExchangeOwner(rank.transport, self._store), subscriber]
        self.courier = rank.courier(services + ([archive] if archive else []))
        rank.living.under_way = True  # whether the run has begun is for the trainers to say
        if archive is not None:
            archive.keep_for(store)

    def main(self, engine: Engine, tasks: TaskSource, scorer: Scorer) -> Iterator[None]:
        """The main loop, from the first weights to the end of the run."""
        rank, limit = self._rank, self._rank.config.run.wait_limit_s
        loop = self._make_loop(engine, tasks, scorer)

        def evaluate(sharers: Sequence[int]) -> Share:
            share, shares = sharers.index(rank.rank), len(sharers)
            say = partial(self._say_progress, loop)
            return evaluate_share(engine, tasks, scorer, loop.params, share, shares, limit, say)

        evaluates = len(tasks.held_out) > 0
        rank.main.set("waiting for the first weights")
        yield from until(
            lambda: loop.reached(rank.start_step), 2 * limit, lambda: "the first weights from the trainers"
        )
        leader = rank.roles.trainers[0]
        if evaluates and rank.start_step == 0:
            loop.post(leader, EvalResult("before", engine.version, *evaluate(rank.roles.generators)))
        for group in self._unfinished:
            loop.resume(group.key, group.trajectories)
        while self._desk.stop is None:
            if not loop.step():
                self._nap_s = SOON_S if loop.waits else IDLE_S
                yield
        yield from end_generator(loop, self._desk, leader, evaluate if evaluates else None, self._keep, limit)
        if (archive := self._archive) is not None:
            archive.close()
            yield from until(lambda: archive.closed, limit, lambda: "the disk to take the archive")
        yield from await_stop(self._desk, 2 * limit)

    def _make_loop(self, engine: Engine, tasks: TaskSource, scorer: Scorer) -> GeneratorLoop:
        rank, config = self._rank, self._rank.config
        return GeneratorLoop(
            rank.rank,
            rank.roles,
            self.courier,
            self._desk,
            engine,
            self._subscriber,
            self._store,
            tasks,
            scorer,
            sampling_params(config, tasks),
            config.rollout.group_size,
            MemoryBound(config.rollout.memory_mb * MIB, config.ledger.groups_per_step),
            config.rollout.partial,
            ledger_spec(config, None).oldest,
            config.run.seed,
            rank.main,
        )

    def _say_progress(self, loop: GeneratorLoop, scored: int, total: int) -> None:
        """An evaluation goes on: so that nobody takes its silence for a fault."""
        self._rank.main.set(f"evaluating, {scored} of {total} tasks")
        if time.monotonic() - self._said_at > PROGRESS_S:
            self._said_at = time.monotonic()
            for trainer in self._rank.roles.trainers:
                loop.post(trainer, Evaluating(scored, total))

    def _keep(self, groups: list[Group]) -> None:
        """Archive what was at work when the run was stopped."""
        if self._archive is not None and self._rank.config.goes_on_within_groups:
            for group in groups:
                self._archive.put(make_group(*group.key, group.trajectories()), finished=False)

    def wait(self) -> None:
        self.courier.news.wait(self._nap_s)
        self.courier.news.clear()


def sampling_params(config: JobConfig, tasks: TaskSource) -> SamplingParams:
    rollout = config.rollout
    return SamplingParams(rollout.max_tokens, rollout.temperature, rollout.top_p, rollout.top_k, tasks.stop_token_ids)
