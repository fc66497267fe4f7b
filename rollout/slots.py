"""Which running sequence occupies which slot of the KV cache, and so which row of a decode step.

add ──▶ waiting ──place──▶ slot ──┬──▶ finished or aborted: release
                                  └─ (compact slots) moved into a hole that another left
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from headrace.rollout.engine import Request


@dataclass(slots=True, eq=False)
class Sequence:
    """A request with the tokens it has so far."""

    request: Request
    tokens: list[int] = field(init=False)
    """The prompt and what was sampled. The newest sampled token isn't cached yet."""
    slot: int = -1

    def __post_init__(self) -> None:
        self.tokens = [*self.request.prompt.tolist(), *self.request.begun]

    @property
    def limit(self) -> int:
        """Tokens it may have at most."""
        return len(self.request.prompt) + self.request.params.max_tokens


class Slots(Protocol):
    """Occupancy of the slots."""

    running: dict[int, Sequence]
    """By slot."""
    size: int

    def place(self, sequence: Sequence) -> bool:
        """Give the sequence a slot, if there is one for it."""
        ...

    def release(self, slot: int) -> int | None:
        """Free a slot. If that moves another sequence into it, return the slot that one comes from."""
        ...

    def decode_width(self) -> int:
        """The next decode step computes the slots 0 to this, exclusive."""
        ...


class CompactSlots:
    """The running sequences occupy slots 0 to n - 1, so that a step computes no more than it has to."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.running: dict[int, Sequence] = {}

    def place(self, sequence: Sequence) -> bool:
        if len(self.running) == self.size:
            return False
        sequence.slot = len(self.running)
        self.running[sequence.slot] = sequence
        return True

    def release(self, slot: int) -> int | None:
        last = len(self.running) - 1
        moved = self.running.pop(last)
        if slot == last:
            return None
        moved.slot = slot
        self.running[slot] = moved
        return last

    def decode_width(self) -> int:
        return len(self.running)


class FixedSlots:
    """A sequence's slot follows from its key alone, and every step computes all slots: what else runs can't change the
    shape of anything, and so no bit of the result. A sequence whose slot is taken waits."""

    def __init__(self, size: int, slot_of: Callable[[Request], int]) -> None:
        self.size = size
        self.slot_of = slot_of
        self.running: dict[int, Sequence] = {}

    def place(self, sequence: Sequence) -> bool:
        slot = self.slot_of(sequence.request) % self.size
        if slot in self.running:
            return False
        sequence.slot = slot
        self.running[slot] = sequence
        return True

    def release(self, slot: int) -> int | None:
        del self.running[slot]
        return None

    def decode_width(self) -> int:
        return self.size if self.running else 0
