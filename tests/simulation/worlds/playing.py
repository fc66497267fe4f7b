"""A world by drawn events. The seed fixes everything; a failing run is shortened to a story that can be read."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from headrace.ranks.tickets import LedgerState, SavedGroup
from worlds.setup import SLOWNESS, Setup, StuckError
from worlds.world import GENERATOR_EVENTS, ROUND_EVENTS, Event, Start, World

QUIET_EVENTS = 400
"""So many rounds' events in a row, with nothing else possible, are a deadlock."""

Choose = Callable[[int], int]
"""n → one of 0 … n - 1."""


@dataclass
class Choices:
    """Draws from a seed, and remembers; or repeats what was drawn, as far as it goes."""

    seed: int | str
    script: list[int] | None = None
    drawn: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)

    def __call__(self, count: int) -> int:
        if self.script is None:
            pick = self._rng.randrange(1 << 30)
        elif len(self.drawn) < len(self.script):
            pick = self.script[len(self.drawn)]
        else:
            raise EndOfScriptError
        self.drawn.append(pick)
        return pick % count


class EndOfScriptError(Exception):
    """Every remembered choice was made."""


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
        event = _draw(world, possible, choose)
        world.trace.append((event, world.next_message(event)))
        world.do(event)
        quiet = quiet + 1 if all(name in ROUND_EVENTS for name, *_ in possible) else 0
        if quiet > QUIET_EVENTS:
            raise StuckError("; ".join(node.describe() for node in world.nodes))
    return False


def _draw(world: World, possible: list[Event], choose: Choose) -> Event:
    """One of the events; rare ones so much more rarely, unless everybody waits for them."""
    rare = {event for event in possible if _is_rare(world, event)}
    waiting = all(event in rare or event[0] in ROUND_EVENTS for event in possible)
    while True:
        event = possible[choose(len(possible))]
        if event not in rare or not choose(4 if waiting else SLOWNESS):
            return event


def _is_rare(world: World, event: Event) -> bool:
    """What a slow generator does, the end of a long sample, a limit that strikes."""
    name, every = event[0], world.setup.long
    slow = name in GENERATOR_EVENTS and event[1] in world.slow
    return slow or name == "dies_deaf" or (every > 0 and name == "finishes" and event[2] % every == 0)


def resumed(world: World, setup: Setup, choose: Choose, every: int = 1, journal: bool = True) -> World:
    """The world that goes on from the newest checkpoint, the last step divisible by `every` that all ledgers had saved.
    With `journal` some finished groups' data have survived and are found at generators of the new world."""
    whole = [step for step, parts in world.saved.items() if len(parts) == len(world.nodes)]
    step = max([s for s in whole if s % every == 0] or [min(whole)])
    parts = [msgspec.json.decode(text, type=LedgerState) for text, _ in world.saved[step].values()]
    finished = [group for part in parts for group in part.finished]
    owners = {g.ticket: setup.ledgers + choose(setup.generators) for g in finished if journal and choose(3)}
    held = [(owners[g.ticket], *_data(g)) for g in finished if g.ticket in owners]
    ends = {ticket for _, tickets in world.saved[step].values() for ticket in tickets}
    return World(setup, Start(LedgerState.merge(parts, owners), world.trained[:step], ends, held))


def _data(group: SavedGroup) -> tuple[tuple[int, int], dict[int, tuple[tuple[int, int], ...]]]:
    spans = {s.sample: s.spans or ((s.born, s.response_tokens),) for s in group.samples}
    return (group.ticket, group.samples[0].attempt), spans


def story(world: World) -> str:
    """What has happened, one event per line, without the rounds."""
    lines = []
    for event, message in world.trace:
        name, *args = event
        if name not in ROUND_EVENTS:
            lines.append(f"{name} {' '.join(map(str, args))} {message or ''}"[:160].rstrip())
    return "\n".join(lines)


Scenario = Callable[[Choices, list[World]], None]
"""Makes worlds, appends them to the list, and runs them."""


def play(scenario: Scenario, seed: int) -> list[World]:
    """Run a scenario. A failure is raised again with the shortest story found that leads to one."""
    choices, worlds = Choices(seed), list[World]()
    try:
        scenario(choices, worlds)
    except AssertionError as error:
        shortest = shortest_story(scenario, choices.drawn)
        text = f"seed {seed}: {type(error).__name__}: {error}\n{worlds[-1].setup}\n{shortest}"
        raise AssertionError(text) from error
    return worlds


def play_to_the_end(setup: Setup, seed: int) -> World:
    """One world from its beginning to its end."""

    def scenario(choices: Choices, worlds: list[World]) -> None:
        worlds.append(World(setup))
        if not run(worlds[-1], choices):
            raise StuckError("it doesn't end")

    return play(scenario, seed)[0]


def shortest_story(scenario: Scenario, drawn: list[int], tries: int = 300) -> str:
    """The events of a shortened failing run: pieces of its choices are left out as long as it still fails."""
    best, found = drawn, "not reproduced"
    piece = len(drawn)
    while piece and tries:
        start = 0
        while start < len(best) and tries:
            tries -= 1
            script = best[:start] + (best[start + piece :] if piece < len(drawn) else best)
            failure = _failure(scenario, script)
            if failure is None:
                start += piece
            else:
                best, found = failure
                start += piece if piece == len(drawn) else 0
        piece //= 2
    return found


def _failure(scenario: Scenario, script: list[int]) -> tuple[list[int], str] | None:
    choices, worlds = Choices(0, script), list[World]()
    try:
        scenario(choices, worlds)
    except EndOfScriptError:
        return None
    except AssertionError as error:
        return choices.drawn, f"{story(worlds[-1])}\n{type(error).__name__}: {error}"
    return None
