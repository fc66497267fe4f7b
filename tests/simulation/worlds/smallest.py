"""Small worlds for `search`, each with something of its own."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec

from headrace.ranks.tickets import LedgerSpec
from worlds.setup import Setup

COINS = (0.0, 1.0)


def small(groups: int = 1, staleness: float = 1, every: int = 1, size: int = 1, steps: int = 3, **more: Any) -> Setup:
    """`more` are fields of `LedgerSpec` and `Setup`."""
    of_spec = {name: more.pop(name) for name in list(more) if name in LedgerSpec.__struct_fields__}
    return Setup(LedgerSpec(groups, staleness, every, size, steps, **of_spec), **more)


def name(setup: Setup) -> str:
    """In what it differs from `small()`."""
    here, usual = _fields(setup), _fields(small())
    return ", ".join(f"{field} {value}" for field, value in here.items() if value != usual[field]) or "small"


def _fields(setup: Setup) -> dict[str, Any]:
    fields = {f.name: getattr(setup, f.name) for f in dataclasses.fields(setup)}
    return {**msgspec.structs.asdict(fields.pop("spec")), **fields}


QUICK = [
    small(),
    small(groups=2),
    small(staleness=0, failures=1),
    small(staleness=0.5, groups=2),
    small(staleness=0.5, every=2, steps=4),
    small(staleness=1.5, every=2, steps=4),
    small(groups=2, tickets=3),
    small(staleness=0, steps=2, silences=1),
    small(steps=2, room=1, silences=2),
    small(steps=2, generators=2, room=1, deaths=1),
    small(stops=1),
    small(overdue="drop"),
    small(overdue="mask"),
    small(steps=2, size=2, overdue="cut"),
    small(steps=2, size=2, overdue="drop", by_sample=True),
    small(steps=2, size=2, filtered_per_step=1, rewards=COINS),
    small(staleness=0, steps=2, tickets=1, ledgers=2, homes=(1,)),
    small(staleness=0, every=2, steps=2, ledgers=2, room=1),
]
"""Seconds."""

ALL = [
    small(groups=2, staleness=2),
    small(groups=3, staleness=2, steps=2, room=3),
    small(failures=1, hangs=1),
    small(steps=2, silences=1),
    small(staleness=0, steps=2, generators=2, room=1, silences=1),
    small(steps=2, generators=2, deaths=1),
    small(steps=2, overdue="cut", silences=1),
    small(steps=2, overdue="mask", silences=1),
    small(steps=2, overdue="drop", silences=1),
    small(groups=2, steps=2, overdue="cut"),
    small(groups=2, steps=2, overdue="mask"),
    small(groups=2, steps=2, overdue="drop", by_sample=True),
    small(staleness=0, steps=2, ledgers=2, homes=(1,)),
    small(staleness=0, steps=2, ledgers=2, room=1, failures=1, tickets=3),
    small(staleness=0, groups=2, steps=2, tickets=3, ledgers=2),
    small(steps=2, ledgers=2, room=1),
    small(steps=2, ledgers=2, room=1, tickets=2),
    small(steps=2, ledgers=2, room=1, overdue="cut"),
    small(steps=2, ledgers=2, room=1, overdue="mask"),
    small(steps=2, ledgers=2, room=1, overdue="drop"),
    small(steps=2, ledgers=2, room=1, overdue="drop", by_sample=True),
    small(staleness=0, steps=1, ledgers=2, room=1, silences=1),
]
"""Three minutes."""

MORE = [
    small(steps=2, generators=2, room=1, silences=1),
    small(staleness=0, steps=2, ledgers=2, room=1, generators=2),
    small(steps=2, ledgers=2, room=1, stops=1),
    small(staleness=0, steps=2, size=2, ledgers=2, room=1, filtered_per_step=1, rewards=COINS),
    small(steps=2, ledgers=2),
    small(staleness=0, steps=1, ledgers=2, room=1, generators=2, deaths=1),
]
"""As long again."""
