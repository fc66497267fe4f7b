"""The end of a run, as a cascade. Every step has a limit, and the message of a limit names who is waited for.

1. Trainers: the last step is trained, its weights are published, the last checkpoint is whole.
2. Trainer 0 sends Stop(1): each generator gives up what runs (if the run is to go on later, what there is of it goes
   into the archive), takes in the last version, evaluates it unless the run is to go on later, and says Bye.
3. Trainer 0 has every Bye and every line of metrics: it sends Stop(2) to all ranks.
4. Every rank: its heartbeat says that it leaves, its courier sends what is left and ends, its reward processes end.
5. All ranks meet in a last barrier and leave MPI.

Main loops are Python generators that yield whenever there is nothing to do: a rank waits then, and `headrace debug`
runs the other role. This module holds what the two roles yield through at the end (1 to 3); `ranks.start` does 4 and 5.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from headrace.comm.courier import Courier
from headrace.comm.errors import WaitLimitError
from headrace.comm.messages import Bye, EvalResult, Stop
from headrace.ranks.evaluation import Share
from headrace.ranks.generator import GeneratorDesk, GeneratorLoop
from headrace.ranks.groups import Group
from headrace.ranks.living import Living
from headrace.ranks.topology import RoleMap
from headrace.ranks.trainer import LeaderDesk, TrainerDesk

Evaluate = Callable[[Sequence[int]], Share]
"""From the world ranks that share an evaluation to this one's part of it."""


def until(
    done: Callable[[], bool], limit_s: float, what: Callable[[], str], progress: Callable[[], float] = lambda: 0.0
) -> Iterator[None]:
    """Yield until done. `progress` is the monotonic time of the last sign that it goes on: the limit counts from there.

    Raises:
        WaitLimitError: not within the limit; the message says what was waited for.
    """
    began = time.monotonic()
    while not done():
        if time.monotonic() > max(began, progress()) + limit_s:
            raise WaitLimitError(f"Waited {limit_s:.0f} s (run.wait_limit_s) for {what()}.")
        yield


def lead_end(
    leader: LeaderDesk,
    desk: TrainerDesk,
    courier: Courier,
    roles: RoleMap,
    living: Living,
    version: int,
    complete: bool,
    limit_s: float,
) -> Iterator[None]:
    """Steps 2 and 3, on trainer 0; `complete` unless the run was asked to stop and will go on later."""

    def send(targets: tuple[int, ...], stage: int) -> None:
        stop = Stop(stage, complete, version, list(living.generators))
        for rank in targets:
            courier.submit(lambda rank=rank: courier.transport.send(rank, stop))  # type: ignore[misc]

    def missing() -> str:
        absent = [roles.name(rank) for rank in living.generators if rank not in leader.gone]
        return f"the end of {', '.join(absent) or 'the metrics of the last step'}"

    def over() -> bool:
        return leader.gone.issuperset(living.generators) and leader.metrics.written >= version - 1

    send(living.generators, 1)
    yield from until(over, limit_s, missing, lambda: desk.evaluated_at)
    send(tuple(range(len(roles.hosts))), 2)


def await_stop(
    desk: TrainerDesk | GeneratorDesk, limit_s: float, progress: Callable[[], float] = lambda: 0.0
) -> Iterator[None]:
    """Wait for Stop(2)."""
    yield from until(
        lambda: desk.stop is not None and desk.stop.stage == 2, limit_s, lambda: "trainer 0 to end the run", progress
    )


def end_generator(
    loop: GeneratorLoop,
    desk: GeneratorDesk,
    leader: int,
    evaluate: Evaluate | None,
    keep: Callable[[list[Group]], None],
    limit_s: float,
) -> Iterator[None]:
    """Step 2, on a generator that was told to stop; `keep` takes what was at work if the run will go on later."""
    stop = desk.stop
    assert stop is not None
    groups = loop.drop_all()
    if not stop.complete:
        keep(groups)
    yield from until(lambda: loop.reached(stop.version), limit_s, lambda: f"version {stop.version} of the weights")
    if evaluate is not None and stop.complete:
        loop.post(leader, EvalResult("after", loop.engine.version, *evaluate(stop.generators)))
    loop.post(leader, Bye(1))
