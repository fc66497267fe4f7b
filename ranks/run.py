"""What both roles have, and how their main loops are driven.

    Rank ──▶ GeneratorRank (generator_rank.py)   courier with its services, main loop: engine, ledger's tickets
         └─▶ TrainerRank (trainer_rank.py)       courier with its services, main loop: ledger, learner, publisher

A main loop is a Python generator that yields whenever it has nothing to do. `ranks.start` runs one per process over
MPI, `ranks.debug` runs both by turns in one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from headrace.comm.courier import Courier
from headrace.comm.service import Service
from headrace.comm.transport import Received, Transport
from headrace.ranks.config import JobConfig
from headrace.ranks.heartbeat import Heartbeats, MainState
from headrace.ranks.living import Living
from headrace.ranks.tickets import LedgerSpec
from headrace.ranks.topology import RoleMap

ARCHIVE = "archive"
"""Folder in the run folder."""

IDLE_S = 0.25
"""Longest sleep of a main thread with nothing to do; the courier's news end it."""


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


def ledger_spec(config: JobConfig, tickets: int | None, attention_length: int | None = None) -> LedgerSpec:
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
        attention_length=attention_length,
        filtered_per_step=config.ledger.filtered_per_step,
    )


def run_main(loop: Iterator[None], wait: Callable[[], None]) -> None:
    """Drive one main loop to its end, waiting whenever it has nothing to do."""
    for _ in loop:
        wait()
