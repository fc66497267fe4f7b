"""What a world is made of."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.ranks.tickets import LedgerSpec

SLOWNESS = 100
"""How much slower a slow generator or a long sample is."""


class BrokenError(AssertionError):
    """A rule was broken."""


class StuckError(AssertionError):
    """Nothing can happen any more and the run isn't over."""


def expect(condition: bool, text: str) -> None:
    """Raise `BrokenError` unless the condition holds."""
    if not condition:
        raise BrokenError(text)


@dataclass(frozen=True)
class Setup:
    """One world. Faults are numbers: how often each may happen."""

    spec: LedgerSpec
    ledgers: int = 1
    generators: int = 1
    room: int = 2
    """Groups that a generator runs or waits to run at once."""
    little: bool = False
    """Generators have so little memory that they keep no more groups, at work and finished, than they must."""
    homes: tuple[int, ...] | None = None
    """Index of the home ledger of each generator; None spreads them."""
    follow: bool = True
    """A redirected generator makes the other ledger its home."""
    together: bool = True
    """A generator reports a group when all of it has ended; otherwise sample by sample."""
    rewards: tuple[float, ...] = (0.5,)
    """A sample's reward is one of these."""
    failures: int = 0
    """Groups whose reward raises."""
    hangs: int = 0
    """Groups whose reward never comes, until its limit strikes."""
    silences: int = 0
    """A generator is taken for lost though it goes on; some time later it is heard again."""
    deaths: int = 0
    """Generators die; at least one lives on."""
    noise: int = 0
    """Senseless reports: repeated, unknown tickets, sample numbers out of range."""
    skips: int = 0
    """Versions that never arrive at one generator; it takes the next."""
    stops: int = 0
    """The run is asked to stop; at most once."""
    long: int = 0
    """Every so manyth ticket takes 100× as long as the others; 0: none."""
    endless: int = 0
    """Every so manyth ticket never ends by itself; 0: none."""
    slow: int = 0
    """So many generators, the last ones, are 100× slower than the others."""
    deaf: int = 0
    """So many generators, the first ones, get no other version than their first."""
