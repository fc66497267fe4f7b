"""Puts a generator and a trainer together from their parts, and holds their main loops.

A main loop is a Python generator that yields whenever it has nothing to do. `ranks.start` runs one per process over
MPI, `ranks.debug` runs both by turns in one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.comm.columns import make_group
from headrace.comm.exchange import ExchangeConsumer, ExchangeOwner, SampleStore
from headrace.comm.messages import EvalResult, Evaluating, StepReport
from headrace.comm.service import Service
from headrace.comm.transport import Received, Transport
from headrace.comm.weights import Publisher, Subscriber
from headrace.ranks.archive import Archived, ArchiveWriter
from headrace.ranks.config import JobConfig
from headrace.ranks.courier import Courier
from headrace.ranks.evaluation import EvaluationFile, Share, evaluate_share, summed_up
from headrace.ranks.failed_groups import FailedGroups, failure_limit
from headrace.ranks.generator import GeneratorDesk, GeneratorLoop
from headrace.ranks.groups import Group
from headrace.ranks.heartbeat import Heartbeats, MainState
from headrace.ranks.journal import JournalWriter, state_of
from headrace.ranks.learner import Learner
from headrace.ranks.living import Living
from headrace.ranks.metrics import MetricsFile, MetricsGatherer
from headrace.ranks.node import LedgerNode
from headrace.ranks.recovery import Checkpoints, Restored, covered_by
from headrace.ranks.replay import Replay
from headrace.ranks.samples import SampleLog
from headrace.ranks.shutdown import await_stop, end_generator, lead_end, until
from headrace.ranks.tasks import Scorer, TaskSource
from headrace.ranks.tickets import FormedGroup, LedgerSpec, LedgerState
from headrace.ranks.topology import RoleMap
from headrace.ranks.trainer import LeaderDesk, StepBatch, TrainerDesk, TrainerLoop
from headrace.rollout.engine import Engine, SamplingParams
from headrace.train.checkpoint import CheckpointStore

PROGRESS_S = 5.0
"""How often an evaluation says that it goes on, in seconds."""

ARCHIVE = "archive"
"""Folder in the run folder."""

IDLE_S = 0.25
"""Longest sleep of a main thread with nothing to do; the courier's news end it."""

SOON_S = 0.005
"""The same while a generator waits for something that the courier doesn't announce."""


@dataclass(slots=True)
class Rank:
    """What both roles have."""

    config: JobConfig
    folder: Path
    transport: Transport
    roles: RoleMap
    main: MainState
    start_step: int
    """Optimizer steps in the checkpoint that the run goes on from; 0 at the beginning."""
    launch: int
    """How often the run was started before."""
    on_error: Callable[[BaseException], None]
    say: Callable[[str], None]
    """Shows a line on the terminal; only rank 0 uses it."""
    early: list[Received] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)
    """Set by a signal: end the run after the present step, with a checkpoint."""
    heartbeats: bool = True
    repairs: bool = False
    """The run goes on without a generator that has died."""
    record_loss: Callable[[str], None] = lambda line: None
    """On trainer 0: leaves the line about a generator that has died where the launcher finds it."""
    living: Living = field(init=False)

    def __post_init__(self) -> None:
        self.living = Living(self.roles)

    @property
    def rank(self) -> int:
        return self.transport.rank

    @property
    def index(self) -> int:
        return self.roles.index(self.rank)

    @property
    def archive(self) -> Path:
        """The folder of the archive."""
        return self.folder / ARCHIVE

    def courier(self, services: list[Service]) -> Courier:
        run = self.config.run
        if self.heartbeats and self.transport.size > 1:
            beats = Heartbeats(
                self.transport,
                self.roles,
                self.living,
                self.main,
                every_s=run.heartbeat_s,
                reissue_s=self.config.ledger.reissue_after_s,
                silence_s=run.silence_limit_s,
                wait_limit_s=run.wait_limit_s,
            )
            services = [*services, beats]
        return Courier(self.transport, services, self.on_error, self.early)


class GeneratorRank:
    """A generator: its services first, its engine (slow to make) when the courier runs already."""

    def __init__(
        self,
        rank: Rank,
        subscriber: Subscriber,
        store: SampleStore,
        unfinished: Iterable[Archived],
        archive: ArchiveWriter | None,
    ) -> None:
        """`store`: with what it has of earlier launches; `unfinished`: what they were at work on. `archive`: takes what
        is put into the store from now on."""
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
            self._store.on_put = archive.put

    def main(self, engine: Engine, tasks: TaskSource, scorer: Scorer) -> Iterator[None]:
        """The main loop, from the first weights to the end of the run."""
        rank, config = self._rank, self._rank.config
        limit = config.run.wait_limit_s
        params = sampling_params(config, tasks)
        loop = GeneratorLoop(
            rank.rank,
            rank.roles,
            self.courier,
            self._desk,
            engine,
            self._subscriber,
            self._store,
            tasks,
            scorer,
            params,
            config.rollout.group_size,
            config.rollout.partial,
            ledger_spec(config, None).oldest,
            config.run.seed,
            rank.main,
        )

        def say_progress(scored: int, total: int) -> None:
            rank.main.set(f"evaluating, {scored} of {total} tasks")
            if time.monotonic() - self._said_at > PROGRESS_S:
                self._said_at = time.monotonic()
                for trainer in rank.roles.trainers:
                    loop.post(trainer, Evaluating(scored, total))

        def evaluate(sharers: Sequence[int]) -> Share:
            share, shares = sharers.index(rank.rank), len(sharers)
            return evaluate_share(engine, tasks, scorer, params, share, shares, limit, say_progress)

        evaluates = len(tasks.held_out) > 0
        rank.main.set("waiting for the first weights")
        yield from until(
            lambda: loop.reached(rank.start_step), 2 * limit, lambda: "the first weights from the trainers"
        )
        if evaluates and rank.start_step == 0:
            loop.post(rank.roles.trainers[0], EvalResult("before", engine.version, *evaluate(rank.roles.generators)))
        for group in self._unfinished:
            loop.resume(group.key, group.trajectories)
        while self._desk.stop is None:
            if not loop.step():
                self._nap_s = SOON_S if loop.waits else IDLE_S
                yield
        leader = rank.roles.trainers[0]
        yield from end_generator(loop, self._desk, leader, evaluate if evaluates else None, self._keep, limit)
        if (archive := self._archive) is not None:
            archive.close()
            yield from until(lambda: archive.closed, limit, lambda: "the disk to take the archive")
        yield from await_stop(self._desk, 2 * limit)

    def _keep(self, groups: list[Group]) -> None:
        """Archive what was at work when the run was stopped."""
        if self._archive is not None and self._rank.config.goes_on_within_groups:
            for group in groups:
                self._archive.put(make_group(*group.key, group.trajectories()), finished=False)

    def wait(self) -> None:
        self.courier.news.wait(self._nap_s)
        self.courier.news.clear()


class TrainerRank:
    """A trainer, with its ledger; trainer 0 leads: it writes metrics and checkpoints, and ends the run."""

    def __init__(
        self,
        rank: Rank,
        publisher: Publisher,
        spec: LedgerSpec,
        restored: Restored,
        journal: JournalWriter | None,
    ) -> None:
        """`journal`: trainer 0 has one, if the run keeps an archive."""
        self._rank = rank
        self._publisher = publisher
        self._restored = restored
        self._journal = journal
        self._has_checkpoint = rank.start_step > 0
        """Whether there is one to go on from."""
        transport, roles = rank.transport, rank.roles
        generators = list(roles.generators)
        self._node = LedgerNode(spec, rank.index, list(roles.trainers), generators, transport.send, restored.ledger)
        failed = FailedGroups(self._node, failure_limit(spec, len(roles.trainers)))
        self._consumer = consumer = ExchangeConsumer(transport)
        self._desk = TrainerDesk(transport, self._node, consumer, failed, rank.index)
        self._leader = self._make_leader() if rank.index == 0 else None
        services: list[Service] = [failed, self._node, consumer, self._desk, publisher]
        self.courier = rank.courier(services + ([self._leader] if self._leader else []))
        rank.living.on_loss.append(self._node.died)
        if self._leader is not None:
            rank.living.on_loss += [self._leader.do_without, self._tell_loss]

    def _make_leader(self) -> LeaderDesk:
        rank, step = self._rank, self._restored.step
        leader = LeaderDesk(MetricsGatherer(MetricsFile(rank.folder, step), len(rank.roles.trainers), step))
        if self._journal is not None:
            leader.metrics.on_written = self._settle
        evaluations = EvaluationFile(rank.folder, step)
        leader.on_evaluation = lambda label: _write_evaluation(rank, leader, evaluations, label)
        return leader

    def main(self, learner: Learner, checkpoint_store: CheckpointStore) -> Iterator[None]:
        """The main loop, from the first publication to the end of the run."""
        rank, config, leader = self._rank, self._rank.config, self._leader
        limit, start_step = config.run.wait_limit_s, self._restored.step
        mask_age = self._node.spec.oldest if config.ledger.overdue == "mask" else None
        checkpoints = Checkpoints(
            checkpoint_store,
            rank.roles,
            self.courier,
            self._desk,
            leader,
            self._node,
            learner,
            rank.main,
            limit,
            rank.start_step,
            self._cover,
        )
        samples = SampleLog(rank.folder, start_step, config.run.keep_samples) if leader else None

        def on_step(batch: StepBatch, step: int) -> None:
            if samples is not None:
                samples.write(step + 1, batch.groups)
            every = config.checkpoint.every
            if every and (step + 1) % every == 0 and step + 1 < config.run.steps:
                checkpoints.write(step + 1)

        def on_end(step: int) -> None:
            if checkpoints.written != step:
                checkpoints.write(step)

        loop = TrainerLoop(
            roles=rank.roles,
            rank=rank.rank,
            courier=self.courier,
            desk=self._desk,
            node=self._node,
            learner=learner,
            publisher=self._publisher,
            main=rank.main,
            steps=config.run.steps,
            start_step=start_step,
            publish_every=config.weights.publish_every,
            mask_age=mask_age,
            wait_limit_s=limit,
            on_step=on_step,
            on_end=on_end,
            record=self._record if leader else None,
            journals=config.checkpoint.archive,
        )
        if self._restored.replay:
            self._publisher.publish(rank.start_step, learner.export(rank.start_step))
            replay = Replay(rank.index, self.courier, self._consumer, learner, rank.main, mask_age, limit)
            yield from replay.run(self._restored.replay)
        loop.start()
        if self._restored.replay:
            checkpoints.write(start_step)
        self.courier.submit(self._begin)
        stopping = False
        while not loop.done:
            if rank.stop.is_set() and not stopping:
                stopping = True
                self.courier.submit(self._node.end_run)
            if not loop.step():
                yield
        rank.main.set("ending the run")
        if leader is not None:
            complete = not rank.stop.is_set()
            yield from lead_end(
                leader, self._desk, self.courier, rank.roles, rank.living, loop.version, complete, limit
            )
        yield from await_stop(self._desk, 2 * limit, lambda: self._desk.evaluated_at)
        if leader is not None:
            self.courier.call(leader.metrics.close, limit)
        if self._journal is not None:
            self._journal.close()

    def wait(self) -> None:
        self.courier.news.wait(IDLE_S)
        self.courier.news.clear()

    def _begin(self) -> None:
        """In the courier: from here on this trainer can do without a generator."""
        self._rank.living.under_way = True

    def _tell_loss(self, generator: int) -> None:
        """On the terminal, and for the launcher, which tells it once more at the end."""
        left, step = len(self._rank.living.generators), self._node.ledger.step + 1
        name, at = self._rank.roles.name(generator), time.strftime("%H:%M:%S")
        line = f"{name} died at {at}, in step {step}; {left} left to generate"
        self._rank.say(line)
        self._rank.record_loss(line)

    def _record(self, step: int, line: dict[str, Any], groups: Sequence[FormedGroup]) -> None:
        assert self._leader is not None
        metrics = self._leader.metrics
        self.courier.submit(lambda: metrics.record(step, line, groups))

    def _settle(self, step: int, groups: Sequence[FormedGroup], reports: Sequence[StepReport]) -> None:
        """In the courier of trainer 0: a step has ended on all ledgers. Until there is a checkpoint nobody can train it
        again, so that its groups needn't be kept."""
        assert self._journal is not None
        if self._has_checkpoint:
            self._journal.trained(step, groups, reports)
        else:
            self._release([state_of(report) for report in reports])

    def _cover(self, step: int, states: list[LedgerState]) -> None:
        """A checkpoint is durable: journal and archive needn't hold what it has settled."""
        if self._journal is not None:
            self._has_checkpoint = True
            self._journal.covered(step)
            self._release(states)

    def _release(self, states: list[LedgerState]) -> None:
        """Tell the generators that what is settled here isn't needed any more."""
        covered = covered_by(states)
        for generator in self._rank.roles.generators:
            self.courier.submit(lambda target=generator: self.courier.transport.send(target, covered))  # type: ignore[misc]


def sampling_params(config: JobConfig, tasks: TaskSource) -> SamplingParams:
    rollout = config.rollout
    return SamplingParams(rollout.max_tokens, rollout.temperature, rollout.top_p, rollout.top_k, tasks.stop_token_ids)


def ledger_spec(config: JobConfig, tickets: int | None) -> LedgerSpec:
    return LedgerSpec(
        groups_per_step=config.ledger.groups_per_step,
        max_staleness=config.ledger.max_staleness,
        publish_every=config.weights.publish_every,
        group_size=config.rollout.group_size,
        steps=config.run.steps,
        tickets=tickets,
        in_order=config.in_order,
        overdue=config.ledger.overdue,
        by_sample=config.ledger.settle_by == "sample",
        filtered_per_step=config.ledger.filtered_per_step,
    )


def run_main(loop: Iterator[None], wait: Callable[[], None]) -> None:
    """Drive one main loop to its end, waiting whenever it has nothing to do."""
    for _ in loop:
        wait()


def _write_evaluation(rank: Rank, leader: LeaderDesk, file: EvaluationFile, label: str) -> None:
    """Once every generator has answered its share, or died: one line in evaluations.jsonl and on the terminal."""
    results = leader.evaluations[label]
    if label in leader.evaluated or not results.keys() >= set(rank.living.generators):
        return
    share = summed_up(results.values())
    if not share.total:  # whoever has died had all tasks
        return
    leader.evaluated.add(label)
    accuracy = share.correct / share.total
    version = max(result.version for result in results.values())
    line = {"label": label, "version": version, "accuracy": accuracy, "tasks": share.total, "failed": share.failed}
    file.write(line | {"time": time.time()})
    failed = f"; {share.failed} rewards failed and count as 0, one for {share.error}" if share.failed else ""
    rank.say(
        f"evaluation {label} training (version {version}): accuracy {accuracy:.3f} on {share.total} held-out tasks"
        f"{failed}"
    )
