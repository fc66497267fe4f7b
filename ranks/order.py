"""Ticket number → task: a seeded permutation of the dataset per epoch, the same on every rank.

Nothing is stored: the permutation is a small Feistel cipher on the positions of an epoch, walked until it lands inside
the dataset (Black and Rogaway 2002, "Ciphers with arbitrary finite domains"). A ticket number is all that travels.
"""

from __future__ import annotations

from dataclasses import dataclass

_ROUNDS = 8
_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class TicketOrder:
    """In which order the tasks are used. Ticket k is task number k mod `size` of epoch k div `size`."""

    size: int
    """Tasks in the dataset, at least 1."""
    seed: int
    shuffle: bool = True
    """False takes the tasks of every epoch as they come."""
    epochs: int | None = None
    """How often every task is used; None means without end."""

    @property
    def tickets(self) -> int | None:
        """How many ticket numbers there are; None means no end."""
        return None if self.epochs is None else self.epochs * self.size

    def epoch(self, ticket: int) -> int:
        return ticket // self.size

    def task(self, ticket: int) -> int:
        """Index of the ticket's task in the dataset. Raises IndexError for a number that doesn't exist."""
        if ticket < 0 or (self.tickets is not None and ticket >= self.tickets):
            raise IndexError(f"ticket {ticket} of {self.tickets}")
        epoch, position = divmod(ticket, self.size)
        return permute(position, self.size, _mix(_mix(self.seed) ^ epoch)) if self.shuffle else position


def permute(position: int, size: int, key: int) -> int:
    """The place of `position` in a pseudo-random permutation of 0 … size-1 chosen by `key`."""
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    while True:
        position = _feistel(position, half, key)
        if position < size:
            return position


def _feistel(value: int, half: int, key: int) -> int:
    """A permutation of the numbers of 2·half bits."""
    mask = (1 << half) - 1
    left, right = value >> half, value & mask
    for turn in range(_ROUNDS):
        left, right = right, left ^ (_mix(key ^ _mix(turn << 32 ^ right)) & mask)
    return left << half | right


def _mix(value: int) -> int:
    """The finalizer of SplitMix64: 64 bits, each depending on all bits of the input."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & _MASK
    return value ^ value >> 31
