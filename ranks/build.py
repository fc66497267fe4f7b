"""Makes what a role needs from the config: data, engines, weight channel, process groups.

torch is imported only below this module, and only by ranks that train or generate for real.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from headrace.comm.courier import Courier
from headrace.comm.delta import Cheaper
from headrace.comm.weights import Publisher, Subscriber
from headrace.comm.weights_mpi import MpiPublisher
from headrace.comm.weights_node import NodeSubscriber
from headrace.comm.weights_pull import LASTING, STAGING, MpiSubscriber
from headrace.ranks.config import JobConfig
from headrace.ranks.failure import complain
from headrace.ranks.generator_rank import GeneratorRank
from headrace.ranks.journal import JOURNAL, JournalWriter, read_journal
from headrace.ranks.learner import LatencyLearner, Learner, PolicyLearner
from headrace.ranks.recovery import Restored, read_ledgers
from headrace.ranks.resume import await_plan, gather_salvaged, make_plan, tell_plan
from headrace.ranks.run import ARCHIVE, Rank, ledger_spec
from headrace.ranks.salvage import open_archive
from headrace.ranks.segments import launches_in
from headrace.ranks.tasks import (
    data_facts,
    environment_of,
    make_encoder,
    make_scorer,
    make_task_source,
    ticket_order,
    warm_examples,
)
from headrace.ranks.tickets import LedgerSpec, LedgerState
from headrace.ranks.trainer_rank import TrainerRank
from headrace.rollout.architecture import read_architecture
from headrace.rollout.engines import make_engine
from headrace.rollout.prompts import PromptEncoder
from headrace.rollout.task import Environment
from headrace.train.checkpoint import CheckpointStore

if TYPE_CHECKING:
    from mpi4py import MPI

    from headrace.comm.devices import Device
    from headrace.comm.groups import DeviceGroup
    from headrace.comm.weights_collective import Broadcaster
    from headrace.train.scoring import ReferenceModel
    from headrace.train.torch_engine import TorchTrainEngine

MIB = 1 << 20

REFERENCE = "reference"
"""Folder in the run folder: the model after the warm start, for the KL penalty."""


@dataclass(slots=True)
class Parts:
    """A rank, ready to go: start the courier, then drive the main loop, waiting when it has nothing to do."""

    courier: Courier
    wait: Callable[[], None]
    main: Callable[[], Iterator[None]]


@dataclass(frozen=True, slots=True)
class Data:
    """The tasks, and how they become tokens; both None for the latency engine."""

    environment: Environment | None
    encoder: PromptEncoder | None
    facts: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Links:
    """The process groups of a rank; none for the latency engine and under `headrace debug`."""

    device: Device | None = None
    trainers: Any = None
    """torch's default group over the trainers, when there are several."""
    everyone: DeviceGroup | None = None
    """Trainers and generators, for collective weights."""


def load_data(config: JobConfig) -> Data:
    """Environment and tokenizer of the config."""
    if config.rollout.engine == "latency":
        return Data(None, None)
    environment = environment_of(config)
    encoder = make_encoder(config)
    return Data(environment, encoder, data_facts(environment, encoder))


def uses_collective(config: JobConfig, device: Device | None) -> bool:
    """Which weight transport `auto` stands for."""
    if config.weights.transport == "auto" and config.weights.encoding == "full" and not config.weights.node_shared:
        return device is not None and device.kind != "cpu"
    return config.weights.transport == "collective"


def link(rank: Rank, comm: MPI.Comm) -> Links:
    """Make the process groups that this job needs. Collective over all ranks; main thread, before the courier."""
    config, roles = rank.config, rank.roles
    if config.rollout.engine == "latency" and config.weights.transport != "collective":
        return Links()
    import torch.distributed

    from headrace.comm.devices import detect
    from headrace.comm.groups import init_replica_group, make_group, share_store

    limit_threads(rank)
    device = detect()
    local = roles.local_index(rank.rank)
    device.set_in_thread(local)
    collective = uses_collective(config, device) and not rank.repairs  # a dead generator can't come to a broadcast
    several = len(roles.trainers) > 1 and config.rollout.engine != "latency"
    links = Links(device)
    if not collective and not several:
        return links
    limit = config.run.wait_limit_s
    store = share_store(comm, roles.hosts, limit)
    if several and roles.role(rank.rank) == "trainer":
        init_replica_group(store, device.backend, rank.index, len(roles.trainers), limit, "trainers")
        links.trainers = torch.distributed.group.WORLD
    if collective:
        members = [*roles.trainers, *roles.generators]
        links.everyone = make_group(device.backend, store, "weights", members, rank.rank, limit)
    return links


def make_publisher(rank: Rank, links: Links) -> Publisher:
    """The trainer's end of the weight channel; also a service of its courier."""
    config, roles = rank.config.weights, rank.roles
    bucket, limit = config.bucket_mb * MIB, rank.config.run.wait_limit_s
    if links.everyone is None:
        cheaper = Cheaper() if config.encoding == "delta" else None
        receivers = roles.first_of_nodes(roles.generators) if config.node_shared else roles.generators
        publisher = MpiPublisher(rank.transport, receivers, bucket, config.verify, limit, cheaper)
        rank.living.on_loss.append(publisher.drop)
        if config.node_shared:
            rank.living.on_loss.append(lambda _: _tell_first_of_nodes(rank, publisher))
        return publisher
    from headrace.comm.weights_collective import CollectivePublisher

    return CollectivePublisher(
        rank.transport, _broadcaster(rank, links), roles.trainers, roles.generators, config.verify, limit
    )


def _tell_first_of_nodes(rank: Rank, publisher: MpiPublisher) -> None:
    """Have a generator of every node pull, when the one that did has died."""
    for generator in rank.roles.first_of_nodes(rank.living.generators):
        publisher.add(generator)


def make_subscriber(rank: Rank, links: Links) -> Subscriber:
    """The generator's end of the weight channel; also a service of its courier."""
    config, roles = rank.config.weights, rank.roles
    if links.everyone is None:
        limit, delta = rank.config.run.wait_limit_s, config.encoding == "delta"
        if not config.node_shared:
            buffers = LASTING if used_in_place(rank.config, links) else STAGING
            return MpiSubscriber(rank.transport, roles.trainers, config.verify, limit, delta, buffers)
        mates = roles.node_mates(rank.rank)
        subscriber = NodeSubscriber(rank.transport, roles.trainers, mates, config.verify, limit, delta)
        rank.living.on_loss.append(subscriber.drop)
        return subscriber
    from headrace.comm.weights_collective import CollectiveSubscriber

    return CollectiveSubscriber(rank.transport, _broadcaster(rank, links), roles.trainers, config.verify)


def used_in_place(config: JobConfig, links: Links) -> bool:
    """Whether the engine uses weights where they have arrived. Changes are made in the buffer of the version before."""
    on_cpu = links.device is None or links.device.kind == "cpu"
    same_format = config.weights.dtype in ("model", config.model.dtype)
    return config.rollout.engine == "torch" and on_cpu and same_format and config.weights.encoding == "full"


def _broadcaster(rank: Rank, links: Links) -> Broadcaster:
    from headrace.comm.weights_collective import Broadcaster

    assert links.everyone is not None
    assert links.device is not None
    bucket = rank.config.weights.bucket_mb * MIB
    return Broadcaster(links.everyone, links.device, bucket, rank.roles.local_index(rank.rank))


def start_step_of(config: JobConfig, resume: bool) -> int:
    """Optimizer steps done by the newest whole checkpoint; 0 when the run begins or has none yet."""
    if not resume:
        return 0
    steps = CheckpointStore(config.run.folder / "checkpoints", config.checkpoint.keep).steps()
    return steps[-1] if steps else 0


def launch_of(config: JobConfig, start_step: int) -> int:
    """How often a run that goes on from this step was started before, as far as its archive knows."""
    folder = config.run.folder / ARCHIVE
    if not config.checkpoint.archive or start_step == 0:
        return 0
    return 1 + max({*read_journal(folder / JOURNAL).launches, *launches_in(folder)}, default=-1)


def build_generator(rank: Rank, data: Data, links: Links) -> Parts:
    """A generator; its engine is made when the main loop starts, so that the courier answers meanwhile."""
    config = rank.config
    store, unfinished, archive = open_archive(rank)
    generator = GeneratorRank(rank, make_subscriber(rank, links), store, unfinished, archive)

    def main() -> Iterator[None]:
        rank.main.set("making the engine")
        engine = make_engine(
            config.rollout,
            config.model.path,
            config.model.dtype,
            _torch_device(rank, links),
            seed=config.run.seed + rank.index,
            deterministic=config.run.deterministic,
            max_context=_longest(config, data) if config.run.deterministic else None,
        )
        tasks = make_task_source(config, data.environment, data.encoder)
        scorer = make_scorer(config, data.environment)
        try:
            yield from generator.main(engine, tasks, scorer)
        finally:
            scorer.close()

    return Parts(generator.courier, generator.wait, main)


def _longest(config: JobConfig, data: Data) -> int | None:
    """Longest prompt of all tasks plus longest response: a deterministic engine computes so much for every slot."""
    if data.environment is None or data.encoder is None:
        return None
    tasks = [*data.environment.tasks, *data.environment.held_out]
    return max(len(data.encoder.encode(task)) for task in tasks) + config.rollout.max_tokens


def build_trainer(rank: Rank, data: Data, links: Links) -> Parts:
    """A trainer, from the checkpoint if the run goes on; its engine is made when the main loop starts."""
    config = rank.config
    store = CheckpointStore(config.run.folder / "checkpoints", config.checkpoint.keep)
    tasks = config.data.size if data.environment is None else len(data.environment.tasks)
    spec = ledger_spec(config, ticket_order(config, tasks).tickets, _attention_length(config))
    restored = _restore(rank, store, spec)
    trainer = TrainerRank(rank, make_publisher(rank, links), spec, restored, _open_journal(rank, restored.step))

    def main() -> Iterator[None]:
        rank.main.set("making the training engine")
        learner = _make_learner(rank, data, links, restored)
        yield from trainer.main(learner, store)

    return Parts(trainer.courier, trainer.wait, main)


def _attention_length(config: JobConfig) -> int | None:
    """Of the model, by which the cost of long sequences is told; the latency engine has none."""
    if config.rollout.engine == "latency":
        return None
    assert config.model.path is not None
    return read_architecture(config.model.path).attention_length


def _restore(rank: Rank, store: CheckpointStore, spec: LedgerSpec) -> Restored:
    """What the run starts from; trainer 0 finds it out together with the generators and tells the other trainers."""
    if rank.start_step == 0:
        return Restored()
    folder, leads = store.path(rank.start_step), rank.index == 0
    if not rank.config.checkpoint.archive:
        return Restored(folder, LedgerState.merge(read_ledgers(folder)))
    limit = rank.config.run.wait_limit_s
    if not leads:
        plan = await_plan(rank.transport, rank.roles, rank.early, limit)
        return Restored(folder, plan.ledger, plan.replay)
    held = gather_salvaged(rank.transport, rank.roles, rank.early, limit)
    journal = read_journal(rank.archive / JOURNAL)
    plan = make_plan(read_ledgers(folder), journal, held, spec, len(rank.roles.trainers))
    tell_plan(rank.transport, rank.roles, plan)
    rank.say(plan.describe(held))
    return Restored(folder, plan.ledger, plan.replay)


def _open_journal(rank: Rank, step: int) -> JournalWriter | None:
    """Trainer 0's, from here on. Before the first checkpoint, or without an archive, what an earlier launch has left of
    one is void."""
    if rank.index != 0:
        return None
    keeps = rank.config.checkpoint.archive
    if not keeps or rank.start_step == 0:
        shutil.rmtree(rank.archive, ignore_errors=True)
    return JournalWriter(rank.archive / JOURNAL, rank.launch, step, rank.on_error, complain) if keeps else None


def _make_learner(rank: Rank, data: Data, links: Links, restored: Restored) -> Learner:
    """The training engine with what the run starts from: a checkpoint, or the model after its warm start."""
    config = rank.config
    if config.rollout.engine == "latency":
        return LatencyLearner(config, rank.index)
    from headrace.train.torch_engine import TorchTrainEngine

    assert config.model.path is not None
    engine = TorchTrainEngine(
        config.model.path,
        config.train,
        config.model.dtype,
        config.run.steps,
        _torch_device(rank, links),
        links.trainers,
        config.run.seed,
        config.run.deterministic,
        config.rollout.temperature or 1.0,
    )
    if restored.folder is not None:
        engine.load_state(restored.folder)
    elif config.train.warm_start is not None:
        _warm_start(rank, data, engine)
    reference = None if config.train.kl == "none" else _make_reference(rank, links)
    return PolicyLearner(engine, reference, config, rank.index, len(rank.roles.trainers))


def _warm_start(rank: Rank, data: Data, engine: TorchTrainEngine) -> None:
    """Supervised training before the first step; what it leads to is kept if a KL penalty refers to it."""
    from headrace.train.warm_start import warm_start

    config = rank.config
    assert config.train.warm_start is not None
    assert data.environment is not None
    assert data.encoder is not None
    rank.main.set("warm start")
    examples = warm_examples(config, data.environment, data.encoder)
    losses = warm_start(
        engine, examples, config.train.warm_start, config.run.seed, rank.index, len(rank.roles.trainers)
    )
    if rank.index == 0:
        rank.say(f"warm start: {len(losses)} steps, loss {losses[0]:.3f} → {losses[-1]:.3f}")
    if config.train.kl != "none":
        if rank.index == 0:
            shutil.rmtree(rank.folder / REFERENCE, ignore_errors=True)  # of a start before this one
        engine.save_model(rank.folder / REFERENCE)


def _make_reference(rank: Rank, links: Links) -> ReferenceModel:
    """The model that reinforcement learning began with, frozen."""
    from headrace.train.scoring import ReferenceModel

    config = rank.config
    assert config.model.path is not None
    folder = config.model.path if config.train.warm_start is None else rank.folder / REFERENCE
    temperature = config.rollout.temperature or 1.0
    device = _torch_device(rank, links)
    return ReferenceModel(
        folder, config.train.micro_batch_tokens, config.model.dtype, device, links.trainers, temperature
    )


def _torch_device(rank: Rank, links: Links) -> Any:
    return "cpu" if links.device is None else links.device.torch_device(rank.roles.local_index(rank.rank))


def limit_threads(rank: Rank) -> None:
    """Have torch compute with the threads of this rank; sums depend on their number."""
    import torch

    torch.set_num_threads(threads_of(rank))


def threads_of(rank: Rank) -> int:
    """Compute threads of this rank."""
    if rank.config.ranks.threads:
        return rank.config.ranks.threads
    neighbours = rank.roles.hosts.count(rank.roles.hosts[rank.rank])
    return max(1, len(os.sched_getaffinity(0)) // neighbours)
