"""A trainer put together from its parts: its services, its main loop from the first publication to the end of the run.

steps since the checkpoint trained again ──▶ TrainerLoop until the last step or a stop ──▶ the end, led by trainer 0
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from headrace.comm.exchange import ExchangeConsumer
from headrace.comm.messages import StepReport
from headrace.comm.service import Service
from headrace.comm.trajectories import TRAJECTORY
from headrace.comm.weights import Publisher
from headrace.ranks.evaluation import EvaluationFile, summed_up
from headrace.ranks.failed_groups import FailedGroups, failure_limit
from headrace.ranks.journal import JournalWriter, state_of
from headrace.ranks.learner import Learner
from headrace.ranks.metrics import MetricsFile, MetricsGatherer
from headrace.ranks.node import LedgerNode
from headrace.ranks.recovery import Checkpoints, Restored, covered_by
from headrace.ranks.replay import Replay
from headrace.ranks.run import IDLE_S, Rank
from headrace.ranks.samples import SampleLog
from headrace.ranks.shutdown import await_stop, lead_end
from headrace.ranks.tickets import FormedGroup, LedgerSpec, LedgerState
from headrace.ranks.trainer import LeaderDesk, StepBatch, TrainerDesk, TrainerLoop
from headrace.train.checkpoint import CheckpointStore


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
        self._consumer = consumer = ExchangeConsumer(transport, TRAJECTORY)
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
        rank = self._rank
        checkpoints = self._make_checkpoints(learner, checkpoint_store)
        loop = self._make_loop(learner, checkpoints)
        if self._restored.replay:
            yield from self._train_again(learner)
        loop.start()
        if self._restored.replay:
            checkpoints.write(self._restored.step)
        self.courier.submit(self._begin)
        stopping = False
        while not loop.done:
            if rank.stop.is_set() and not stopping:
                stopping = True
                self.courier.submit(self._node.end_run)
            if not loop.step():
                yield
        rank.main.set("ending the run")
        yield from self._end(loop.version)

    def _make_checkpoints(self, learner: Learner, store: CheckpointStore) -> Checkpoints:
        rank = self._rank
        return Checkpoints(
            store,
            rank.roles,
            self.courier,
            self._desk,
            self._leader,
            self._node,
            learner,
            rank.main,
            rank.config.run.wait_limit_s,
            rank.start_step,
            self._cover,
        )

    def _make_loop(self, learner: Learner, checkpoints: Checkpoints) -> TrainerLoop:
        rank, config, leader = self._rank, self._rank.config, self._leader
        samples = SampleLog(rank.folder, self._restored.step, config.run.keep_samples) if leader else None

        def on_step(batch: StepBatch, step: int) -> None:
            if samples is not None:
                samples.write(step + 1, batch.groups)
            every = config.checkpoint.every
            if every and (step + 1) % every == 0 and step + 1 < config.run.steps:
                checkpoints.write(step + 1)

        def on_end(step: int) -> None:
            if checkpoints.written != step:
                checkpoints.write(step)

        return TrainerLoop(
            roles=rank.roles,
            rank=rank.rank,
            courier=self.courier,
            desk=self._desk,
            node=self._node,
            learner=learner,
            publisher=self._publisher,
            main=rank.main,
            steps=config.run.steps,
            start_step=self._restored.step,
            publish_every=config.weights.publish_every,
            mask_age=self._mask_age,
            wait_limit_s=config.run.wait_limit_s,
            on_step=on_step,
            on_end=on_end,
            record=self._record if leader else None,
            journals=config.checkpoint.archive,
        )

    @property
    def _mask_age(self) -> int | None:
        """Tokens older than so many steps aren't in the loss; None: all are."""
        return self._node.spec.oldest if self._rank.config.ledger.overdue == "mask" else None

    def _train_again(self, learner: Learner) -> Iterator[None]:
        """The steps that were done since the checkpoint."""
        rank, limit = self._rank, self._rank.config.run.wait_limit_s
        self._publisher.publish(rank.start_step, learner.export(rank.start_step))
        replay = Replay(rank.index, self.courier, self._consumer, learner, rank.main, self._mask_age, limit)
        yield from replay.run(self._restored.replay)

    def _end(self, version: int) -> Iterator[None]:
        """Leave together with all others; trainer 0 leads."""
        rank, leader, limit = self._rank, self._leader, self._rank.config.run.wait_limit_s
        if leader is not None:
            complete = not rank.stop.is_set()
            yield from lead_end(leader, self._desk, self.courier, rank.roles, rank.living, version, complete, limit)
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
