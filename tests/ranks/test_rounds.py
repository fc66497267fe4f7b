"""The all-gather among ledgers, with messages delivered in every order that the network may choose."""

from __future__ import annotations

import random
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.comm.messages import RoundPart
from headrace.ranks.rounds import Rounds
from headrace.ranks.tickets import LedgerRuleError


class Ring:
    """L ends of the rounds; messages of one pair keep their order, nothing else does."""

    def __init__(self, ledgers: int) -> None:
        self.channels: dict[tuple[int, int], deque[RoundPart]] = {}
        self.sent = [0] * ledgers
        self.results: list[list[list[bytes]]] = [[] for _ in range(ledgers)]
        self.ends = [Rounds(i, ledgers, lambda target, part, i=i: self._send(i, target, part)) for i in range(ledgers)]

    def _send(self, source: int, target: int, part: RoundPart) -> None:
        self.sent[source] += 1
        self.channels.setdefault((source, target), deque()).append(part)

    def begin(self, index: int) -> None:
        self._keep(index, self.ends[index].begin(b"%d of %d" % (self.ends[index].round, index)))

    def deliver(self, pair: tuple[int, int]) -> None:
        self._keep(pair[1], self.ends[pair[1]].receive(self.channels[pair].popleft()))

    def _keep(self, index: int, result: list[bytes] | None) -> None:
        if result is not None:
            self.results[index].append(result)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 17), st.integers(0, 2**32))
def test_every_ledger_gets_every_contribution_of_every_round(ledgers: int, seed: int) -> None:
    rng, ring, rounds = random.Random(seed), Ring(ledgers), 4
    while any(len(found) < rounds for found in ring.results):
        ready = [i for i, end in enumerate(ring.ends) if end.idle and end.round < rounds]
        arriving = [pair for pair, queue in ring.channels.items() if queue]
        pick = rng.randrange(len(ready) + len(arriving))
        if pick < len(ready):
            ring.begin(ready[pick])
        else:
            ring.deliver(arriving[pick - len(ready)])
    expected = [[b"%d of %d" % (n, i) for i in range(ledgers)] for n in range(rounds)]
    assert all(found == expected for found in ring.results)
    assert ring.sent == [rounds * (ledgers - 1).bit_length()] * ledgers


def test_alone_a_round_is_complete_at_once() -> None:
    ring = Ring(1)
    ring.begin(0)
    assert ring.results == [[[b"0 of 0"]]]
    assert ring.sent == [0]


def test_a_waiting_peer_is_seen_and_named() -> None:
    ring = Ring(2)
    ring.begin(1)
    assert ring.ends[1].waits_for == 0
    assert not ring.ends[0].peer_began
    ring.deliver((1, 0))
    assert ring.ends[0].peer_began


def test_a_repeated_or_misplaced_hop_is_a_defect() -> None:
    end = Rounds(0, 4, lambda target, part: None)
    end.receive(RoundPart(0, 1, [(2, b""), (3, b"")]))
    for wrong in (RoundPart(0, 1, []), RoundPart(0, 2, []), RoundPart(2, 0, [])):
        with pytest.raises(LedgerRuleError):
            end.receive(wrong)


def test_one_round_at_a_time() -> None:
    end = Rounds(0, 2, lambda target, part: None)
    end.begin(b"")
    with pytest.raises(LedgerRuleError, match="inside round 0"):
        end.begin(b"")
