"""The first exchange of a job: who is there, and does everybody mean the same job?

    every rank ── Hello(host, facts, …) ▶ rank 0     waits at most wait_limit_s, names who is missing
    rank 0     ── Welcome(hosts, …, error) ────────▶ every rank the role map follows from the hosts

Runs on the main thread, before the courier exists; messages of faster ranks that come in meanwhile are kept for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from headrace.comm.errors import HeadraceError, WaitLimitError
from headrace.comm.messages import Hello, Welcome
from headrace.comm.transport import Received, Transport

POLL_S = 0.002


def meet(
    transport: Transport, hello: Hello, start_step: int, launch: int, limit_s: float
) -> tuple[Welcome, list[Received]]:
    """Introduce this rank and wait for rank 0's answer. `start_step` and `launch` count on rank 0.

    Returns:
        the answer, and messages that came in early and belong to the courier.

    Raises:
        WaitLimitError: a rank hasn't arrived within the limit; rank 0 names it.
        HeadraceError: the ranks don't agree on config, data or software.
    """
    early: list[Received] = []
    if transport.rank == 0:
        welcome = _gather(transport, hello, start_step, launch, limit_s)
        for rank in range(1, transport.size):
            transport.send(rank, welcome)
        _await(transport, early, lambda: transport.pending == 0, limit_s, "Rank 0 couldn't answer the other ranks")
    else:
        transport.send(0, hello)
        welcome = _await_welcome(transport, early, limit_s)
    if welcome.error is not None:
        raise HeadraceError(welcome.error)
    return welcome, early


def _gather(transport: Transport, own: Hello, start_step: int, launch: int, limit_s: float) -> Welcome:
    hellos = {0: own}
    deadline = time.monotonic() + limit_s
    while len(hellos) < transport.size:
        for received in transport.poll():
            assert isinstance(received.message, Hello)
            hellos[received.source] = received.message
        if time.monotonic() > deadline:
            missing = sorted(set(range(transport.size)) - set(hellos))
            raise WaitLimitError(
                f"Ranks {missing} of {transport.size} haven't arrived within {limit_s:.0f} s (run.wait_limit_s); "
                f"arrived are {[f'{rank} on {hello.host}' for rank, hello in sorted(hellos.items())]}. "
                "Look into their logs in the run folder, or at the hosts they should run on."
            )
        time.sleep(POLL_S)
    ordered = [hellos[rank] for rank in range(transport.size)]
    hosts, cores = [hello.host for hello in ordered], [hello.cores for hello in ordered]
    return Welcome(hosts, start_step, disagreement(ordered), launch, cores)


def disagreement(hellos: list[Hello]) -> str | None:
    """What isn't the same on every rank, as one paragraph; None when all agree."""
    for name in hellos[0].facts:
        values: dict[str | None, list[int]] = {}
        for rank, hello in enumerate(hellos):
            values.setdefault(hello.facts.get(name), []).append(rank)
        if len(values) > 1:
            told = "; ".join(f"ranks {ranks}: {value}" for value, ranks in values.items())
            return f"The ranks don't agree on '{name}': {told}. All ranks must see the same files and software."
    return None


def _await_welcome(transport: Transport, early: list[Received], limit_s: float) -> Welcome:
    found: list[Welcome] = []

    def arrived() -> bool:
        for received in list(early):
            if isinstance(received.message, Welcome):
                found.append(received.message)
                early.remove(received)
        return bool(found)

    _await(transport, early, arrived, 2 * limit_s, "Rank 0 hasn't answered")
    return found[0]


def _await(
    transport: Transport, early: list[Received], done: Callable[[], bool], limit_s: float, complaint: str
) -> None:
    deadline = time.monotonic() + limit_s
    while not done():
        early.extend(transport.poll())
        if time.monotonic() > deadline:
            raise WaitLimitError(f"{complaint} within {limit_s:.0f} s while the job was starting (run.wait_limit_s).")
        time.sleep(POLL_S)
