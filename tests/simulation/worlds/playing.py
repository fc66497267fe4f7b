"""A world by drawn events: the seed fixes everything. A failing run is shortened to a story that can be read."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence

from headrace.comm.messages import Finished, Grants, Message, RoundPart
from worlds.setup import SLOWNESS, Setup, StuckError
from worlds.world import GENERATOR_EVENTS, ROUND_EVENTS, Event, Happening, World

QUIET_EVENTS = 400
"""So many rounds' events in a row, with nothing else possible, are a deadlock."""

Choose = Callable[[int], int]
"""n → one of 0 … n - 1."""
Scenario = Callable[[Choose, list[World]], None]
"""Makes worlds, appends them to the list, and runs them."""


def choices(seed: int) -> Choose:
    return random.Random(seed).randrange


def run(world: World, choose: Choose, events: int = 200_000) -> bool:
    """Let events happen until the run is over (True) or so many have happened (False).

    Raises:
        BrokenError, LedgerRuleError: a rule was broken.
        StuckError: nothing but rounds happens any more.
    """
    quiet = 0
    for _ in range(events):
        if world.is_over:
            world.rules.check_end()
            return True
        possible = world.events()
        world.do(_draw(world, possible, choose))
        quiet = quiet + 1 if _all_wait(possible) else 0
        if quiet > QUIET_EVENTS:
            raise StuckError("; ".join(node.describe() for node in world.nodes))
    return False


def _draw(world: World, possible: list[Event], choose: Choose) -> Event:
    """One of the events; rare ones so much more rarely, unless everybody waits for them."""
    rare = {event for event in possible if _is_rare(world, event)}
    odds = 4 if _all_wait([event for event in possible if event not in rare]) else SLOWNESS
    while True:
        event = possible[choose(len(possible))]
        if event not in rare or not choose(odds):
            return event


def _is_rare(world: World, event: Event) -> bool:
    """What a slow generator does, the end of a long sample, a limit that strikes."""
    name, every = event[0], world.setup.long
    slow = name in GENERATOR_EVENTS and event[1] in world.slow
    return slow or name == "dies_deaf" or (every > 0 and name == "finishes" and event[2] % every == 0)


def _all_wait(possible: list[Event]) -> bool:
    return all(event[0] in ROUND_EVENTS for event in possible)


def play(scenario: Scenario, seed: int) -> list[World]:
    """Run a scenario. A failure is raised again with the shortest story found that leads to it."""
    worlds: list[World] = []
    try:
        scenario(choices(seed), worlds)
    except AssertionError as error:
        world = worlds[-1]
        head = f"seed {seed}: {_named(error)}\n{world.setup}, from step {world.begin.step}"
        raise AssertionError(f"{head}\n{shortest_story(world, error)}") from error
    return worlds


def play_to_the_end(setup: Setup, seed: int) -> World:
    """One world from its beginning to its end."""

    def scenario(choose: Choose, worlds: list[World]) -> None:
        worlds.append(World(setup))
        if not run(worlds[-1], choose):
            raise StuckError("it doesn't end")

    return play(scenario, seed)[0]


# Stories


def story(world: World) -> str:
    """What has happened, one event per line, without the rounds."""
    told = [(event, message) for event, message in world.trace if event[0] not in ROUND_EVENTS]
    return "\n".join(f"  {' '.join(map(str, event))} {_told(message)}".rstrip() for event, message in told)


def _told(message: Message | None) -> str:
    """A message in short."""
    match message:
        case None | RoundPart():
            return ""
        case Finished(samples, _, left_out):
            ended = [f"{m.ticket}.{m.sample} attempt {m.attempt} {m.spans or m.born}" for m in samples]
            return f"Finished {', '.join(ended)}" + f" left out {left_out}" * bool(left_out)
        case Grants(grants):
            return "Grants " + ", ".join(f"{g.ticket} attempt {g.attempt} from {g.min_version}" for g in grants)
    return str(message)


def shortest_story(world: World, error: AssertionError, limit_s: float = 20.0) -> str:
    """The story of a world like this one that fails in the same way, though as many of its events as possible, pieces
    at first and then one by one, are left out."""
    best, until = world, time.monotonic() + limit_s
    piece = len(world.trace) // 2
    while piece and time.monotonic() < until:
        shorter = _without_pieces(best, piece, error, until)
        if shorter is best or piece > 1:
            piece //= 2
        best = shorter
    return f"{story(best)}\n  {_named(error)}"


def _without_pieces(best: World, piece: int, error: AssertionError, until: float) -> World:
    start = 0
    while start < len(best.trace) and time.monotonic() < until:
        failed = _fails_alike(best, best.trace[:start] + best.trace[start + piece :], error)
        if failed is None:
            start += piece
        else:
            best = failed
    return best


def _fails_alike(world: World, trace: Sequence[Happening], error: AssertionError) -> World | None:
    """Where these events, without those that aren't possible any more, lead to the same kind of failure. An arrival is
    only possible of the same message as before."""
    again = World(world.setup, world.begin)
    try:
        for event, message in trace:
            if event in again.events() and _told(again.next_message(event)) == _told(message):
                again.do(event)
        if isinstance(error, StuckError):
            _wait(again)
    except AssertionError as failure:
        return again if type(failure) is type(error) else None
    return None


def _wait(world: World) -> None:
    """Raise `StuckError` if nothing but rounds can happen however long one waits."""
    for turn in range(QUIET_EVENTS):
        possible = world.events()
        if world.is_over or not _all_wait(possible):
            return
        world.do(possible[turn % len(possible)])
    raise StuckError


def _named(error: AssertionError) -> str:
    return f"{type(error).__name__}: {error}"
