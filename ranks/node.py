"""What runs beside a trainer replica's first rank: its ledger, and its share of what all ledgers decide together.

    generator ── Ask ───────────────────────────▶ receive      granted at once from free credits, otherwise parked
    generator ◀─ Grants, Redirect ─────────────── grants, results of rounds
    generator ── Started, Finished, Failed, Returned ▶ receive
    generator ◀─ Dropped, Cut, Late, Forgotten ── what was settled without it, is overdue, or was taken for lost
    anyone    ── Silence ───────────────────────▶ lost, back   a generator is taken for lost, or is heard again
    ledger    ◀─ RoundPart ─────────────────────▶ ledger       rounds: every ledger learns every ledger's contribution
    ledger    ── Progress ──────────────────────▶ watcher      begins the next round when it has a result: `watch.py`
    trainer   ◀─ take_formed ──────────────────── then it pulls the data of its groups
    trainer   ── pulled, or unform ─────────────▶ when all have pulled: `may_train`
    trainer   ── end_step ──────────────────────▶

Each step passes the phases FORMING, SHARING, PULLING, TRAINING (`contribution.py`). They are changed by results of
rounds, so by all ledgers at the same round, but for the end of TRAINING. When the next round begins: `pace.py`.

Single-threaded: the courier calls everything here. The main thread's `end_step` goes to the courier by a queue, and
what `take_formed` returns comes back by one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import ClassVar

import msgspec

from headrace.comm.errors import DataError
from headrace.comm.messages import (
    Ask,
    Cut,
    Dropped,
    Failed,
    Finished,
    Forgotten,
    GeneratorCounters,
    Grants,
    Late,
    Message,
    Progress,
    Redirect,
    Returned,
    RoundPart,
    Silence,
    Started,
)
from headrace.comm.transport import Received
from headrace.ranks import forming
from headrace.ranks.contribution import Contribution, Phase
from headrace.ranks.forming import Choice, Decision, Standing
from headrace.ranks.ledger import Ledger
from headrace.ranks.pace import Pace
from headrace.ranks.rounds import Rounds
from headrace.ranks.tickets import (
    FormedGroup,
    FormedStep,
    LedgerRuleError,
    LedgerSpec,
    LedgerState,
    TicketCounts,
    require,
)

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Contribution)


class LedgerNode:
    """One ledger among all; a `comm.service.Service`."""

    handles: ClassVar[tuple[type[Message], ...]] = (
        Ask,
        Started,
        Finished,
        Failed,
        Returned,
        Silence,
        RoundPart,
        Progress,
    )
    ledger_type: ClassVar[type[Ledger]] = Ledger

    def __init__(
        self,
        spec: LedgerSpec,
        index: int,
        ledgers: Sequence[int],
        generators: Sequence[int],
        send: Callable[[int, Message], None],
        state: LedgerState | None = None,
    ) -> None:
        """`ledgers`: world ranks by index. `generators`: world ranks. `state`: that of the whole run that goes on
        (`LedgerState.merge`), saved with any number of ledgers, S and B."""
        self._dead: set[int] = set()
        """Generators that don't come back."""
        self.counters: dict[int, GeneratorCounters] = {}
        """The latest totals of each generator that has reported here."""
        self.spec, self.index = spec, index
        self.ledger = self.ledger_type(spec, index, len(ledgers), state)
        self.phase = Phase.FORMING
        self._counts = [self.ledger.counts()]
        self._ranks, self._generators, self._send = list(ledgers), set(generators), send
        self._index_of = {rank: index for index, rank in enumerate(ledgers)}
        self._rounds = Rounds(index, len(ledgers), lambda target, part: send(self._ranks[target], part))
        self._formation = 0
        self._batch_size = 0
        self._formed: FormedStep | None = None
        self._chosen: list[FormedGroup] = []
        self._pulled = False
        self._undo: set[int] = set()
        self._failures: list[Failed] = []
        self._contributed = Phase.FORMING
        self._wanted = False
        self._asked_to_end = False
        """Here, by `end_run`."""
        self._ending = False
        """Known to all ledgers by the same round."""
        self._pace = Pace(self.ledger, self._rounds, lambda target, word: send(self._ranks[target], word))

    # What the courier brings

    def receive(self, received: Received, now: float) -> None:
        """Take one message. Raises `LedgerRuleError` when a rank breaks the protocol."""
        message, source = received.message, received.source
        if source not in self._generators or isinstance(message, Silence):
            self._hear_others(source, message)
            return
        match message:
            case Finished():
                self.counters[source] = message.counters
                self.ledger.finished(source, *message.samples)
                for ticket, index, attempt in message.left_out:
                    self.ledger.left_out(source, ticket, index, attempt)
            case Started():
                for ticket, attempt, born in message.starts:
                    self.ledger.started(source, ticket, attempt, born)
            case Ask():
                self.ledger.ask(source, message.room)
            case Failed():
                self.ledger.failed(message.ticket, message.attempt, message.reason)
                self._failures.append(message)
            case Returned():
                for ticket, attempt in message.tickets:
                    self.ledger.returned(source, ticket, attempt)
        self._send_news()

    def _hear_others(self, source: int, message: Message) -> None:
        """What ledgers say, and whoever watches a generator."""
        match message:
            case RoundPart():
                self._deliver(self._rounds.receive(message))
            case Progress():
                self._pace.hear(self._index_of[source], message)
            case Silence():
                self.back(message.rank) if message.over else self.lost(message.rank)
            case _:
                raise LedgerRuleError(f"rank {source}, no generator, sent {type(message).__name__}")

    def tick(self, now: float) -> None:
        """Begin the next round when it is time; tell the watcher what has changed here."""
        self._pace.tick(now)
        self._pace.watch_here(self.phase)
        while (due := self.next_tick()) is not None and due <= now:
            self._pace.round_begins(now)
            self._begin_round()
            self._pace.watch_here(self.phase)
        self._pace.tell(self.phase)

    def next_tick(self) -> float | None:
        """When `tick` will begin a round, unless a message comes before; None: not without one."""
        return self._pace.next_round(self.phase, self._pulled)

    # What the trainer says and asks

    def end_step(self, step: int, published: bool) -> None:
        """This replica has ended optimizer step `step`: weights of version step + 1 exist and, if `published`, have
        been handed to the weight channel. The groups of this ledger are settled as trained."""
        require(self.phase is Phase.TRAINING and step == self.ledger.step, f"end of step {step} in {self.describe()}")
        self.phase, self._formation = Phase.FORMING, 0
        self._pace.step_ended()
        self.ledger.end_step(self._batch_size, published)
        self._send_news()

    def take_formed(self) -> FormedStep | None:
        """The batch of the next step, once, and once more each time that it was undone and formed again: then the batch
        taken before is void. The same on all ledgers. Its data are to be pulled now."""
        formed, self._formed = self._formed, None
        return formed

    def pulled(self, formation: int) -> None:
        """This replica has the data of its groups of the batch; nothing changes if that batch is void."""
        if self.phase is Phase.PULLING and formation == self._formation:
            self._pulled = self._pace.urgent = True

    @property
    def may_train(self) -> bool:
        """All replicas have their data of the batch: it can't be undone any more, and every replica trains it."""
        return self.phase is Phase.TRAINING

    def take_failures(self) -> list[Failed]:
        """The groups given up since the last call, each with its error as it was."""
        failures, self._failures = self._failures, []
        return failures

    def lost(self, generator: int) -> None:
        """The generator is gone, or taken for it, with all that it held. Groups of the batch in training whose data
        weren't pulled yet are named by `unform`."""
        forgotten = self.ledger.lost(generator)
        if forgotten:
            self._send(generator, Forgotten(forgotten))
        self._send_news()

    def died(self, generator: int) -> None:
        """The generator is gone for good: whoever still says that it is heard again speaks of before."""
        self._dead.add(generator)
        self.lost(generator)

    def back(self, generator: int) -> None:
        """A generator that was taken for lost is heard again."""
        if generator not in self._dead:
            self.ledger.asks.back(generator)
            self._send_news()

    @property
    def absent(self) -> Collection[int]:
        """Generators that are taken for lost."""
        return self.ledger.asks.absent.keys()

    def unform(self, tickets: Iterable[int]) -> None:
        """The data of these groups of the batch can't be had: undo the batch. Only before this replica has `pulled`.
        Other replicas learn it by the next round, from `take_formed`."""
        self._undo.update(tickets)
        self._pace.urgent = True

    def end_run(self) -> None:
        """Form no further step: all ledgers then give an empty, finished one once the present step has ended."""
        self._asked_to_end = self._pace.urgent = True

    def counts(self) -> TicketCounts:
        """Running totals of this ledger."""
        return self.ledger.counts()

    @property
    def totals(self) -> TicketCounts:
        """Running totals over all ledgers, as of the last round."""
        return sum(self._counts[1:], self._counts[0])

    def state(self) -> LedgerState:
        """What is to be saved of this ledger, as of its last `end_step` (or the start)."""
        return self.ledger.state()

    def describe(self) -> str:
        """One line: what is waited for."""
        line = f"ledger {self.index}, step {self.ledger.step}, {self.phase.value}: "
        line += "; ".join(f"tickets {numbers} at rank {rank}" for rank, numbers in self.ledger.waiting().items())
        peer = self._rounds.waits_for
        if peer is not None:
            line += f"; round {self._rounds.round} waits for ledger {peer} at rank {self._ranks[peer]}"
        return line

    def check(self) -> None:
        """Raise `LedgerRuleError` unless this ledger's invariants hold."""
        self.ledger.check()

    # Rounds

    def _begin_round(self) -> None:
        self._contributed = self.phase
        chosen = self._chosen if self.phase is Phase.SHARING else []
        standing = self.ledger.contribute(escrow=self._wanted)
        contribution = Contribution(
            phase=self.phase,
            standing=standing,
            chosen=chosen,
            pulled=self._pulled,
            undo=sorted(self._undo),
            counts=self.ledger.counts(),
            ending=self._asked_to_end,
        )
        self._undo = set()
        self._deliver(self._rounds.begin(_encoder.encode(contribution)))

    def _deliver(self, result: list[bytes] | None) -> None:
        if result is None:
            return
        contributions = self._read(result)
        standings = [c.standing for c in contributions]
        self._check_credits(standings)
        self._counts = [c.counts for c in contributions]
        self._ending = any(c.ending for c in contributions)
        lost = {ticket for c in contributions for ticket in c.undo}
        taken, struck = Decision(None) if lost else self._decide(standings)
        moves = self._moves(standings)
        mine = None if taken is None else taken[self.index]
        chosen = self.ledger.deliver(moves[self.index], mine, None if struck is None else struck[self.index])
        self._wanted = any(s.wants for s in standings)
        if lost:
            self._undo_step(standings, lost)
        elif self._contributed is Phase.SHARING:
            self._share(contributions)
        elif self._contributed is Phase.PULLING and all(c.pulled for c in contributions):
            self.phase = Phase.TRAINING
        elif taken is not None:
            self._take(taken, chosen)
            self.ledger.adapt(sum(sum(s.finished.values()) for s in standings) - self._batch_size)
        self._send_news()
        self._redirect(standings)
        still_forming = self._contributed is Phase.FORMING and self.phase is Phase.FORMING
        self._pace.watch_from(standings, moves, still_forming, self._ending)

    def _read(self, result: Sequence[bytes]) -> list[Contribution]:
        return [_decoder.decode(part) for part in result]

    def _decide(self, standings: Sequence[Standing]) -> Decision:
        """The batch that this round's snapshot allows; an empty one when the run is over."""
        if self._contributed is not Phase.FORMING or not forming.same_step(standings):
            return Decision(None)
        if self.ledger.step >= self.spec.steps or self._ending:
            return Decision([{} for _ in standings])
        return forming.decide(standings, self.spec)

    def _moves(self, standings: Sequence[Standing]) -> list[int]:
        """By ledger: credits gained by this round."""
        return forming.credit_moves(standings, self._rounds.round)

    def _take(self, choice: Choice, chosen: list[FormedGroup]) -> None:
        """The batch of the step is chosen; next round its metadata are shared. An empty one ends the run."""
        self._batch_size = sum(sum(taken.values()) for taken in choice)
        self._chosen = chosen
        self._undo.update(self.ledger.lost_chosen)
        self.phase = Phase.SHARING
        if not self._batch_size:
            self._check_over()
            self.phase = Phase.OVER
            self._formed = FormedStep(self.ledger.step, self._formation, [], finished=True)

    def _check_over(self) -> None:
        """With `in_order`, a step whose groups have all failed looks like the end of the data."""
        step, size = self.ledger.step, self.spec.groups_per_step
        end = self.spec.end_of_numbers(step)
        if self.spec.in_order and not self._ending and step < self.spec.steps and end == (step + 1) * size:
            raise DataError(
                f"All {size} groups of step {step} have failed, so there is nothing to train on; the trainers' logs "
                "tell why. A deterministic run doesn't replace failed groups by later ones."
            )

    def _share(self, contributions: Sequence[Contribution]) -> None:
        """The metadata of the whole batch are here: divide it over the replicas."""
        require(all(c.phase is Phase.SHARING for c in contributions), f"not all share in {self.describe()}")
        self.phase, self._pulled = Phase.PULLING, False
        self._formed = FormedStep(self.ledger.step, self._formation, self._place(contributions), finished=False)

    def _place(self, contributions: Sequence[Contribution]) -> list[FormedGroup]:
        groups = sorted((group for c in contributions for group in c.chosen), key=lambda group: group.ticket)
        replicas = forming.partition([group.cost for group in groups], len(self._ranks))
        return [msgspec.structs.replace(g, replica=r) for g, r in zip(groups, replicas, strict=True)]

    def _undo_step(self, standings: Sequence[Standing], lost: set[int]) -> None:
        """Data of the batch are lost: form it anew without them. (Loss noticed after the batch was undone only sends
        tickets back.)"""
        text = f"tickets {sorted(lost)} of a step that all had pulled are said to be lost: {self.describe()}"
        require({s.step for s in standings} == {self.ledger.step}, text)
        self.ledger.undo(lost)
        self._formed = None
        self._formation += self._contributed is not Phase.FORMING
        self.phase, self._pace.urgent = Phase.FORMING, True

    def _check_credits(self, standings: Sequence[Standing]) -> None:
        """The law of rule 1, seen by every ledger in every round at which all are at the same step."""
        if not forming.same_step(standings):
            return
        found = sum(s.credits + s.chosen + sum(s.finished.values()) + sum(s.unfinished.values()) for s in standings)
        expected = self.spec.credits_at(standings[0].step)
        if found + standings[0].undealt != expected:
            text = f"{found} credits and outstanding tickets, {standings[0].undealt} undealt, instead of {expected}"
            raise LedgerRuleError(f"{text}: {standings}")

    def _redirect(self, standings: Sequence[Standing]) -> None:
        margin = max(self.spec.credits, len(standings))
        target, room = forming.redirection(standings, self.index, self.ledger.next_number, margin)
        for generator, asks in self.ledger.asks.unpark(room).items():
            self._send(generator, Redirect(target, asks))

    def _send_news(self) -> None:
        """Tell the generators what has changed for them, its own order kept: what is dropped first."""
        if self.ledger.notices.any:
            self._send_notices()
        for generator, grants in self.ledger.grant().items():
            self._send(generator, Grants(grants))

    def _send_notices(self) -> None:
        for generator, keys in self.ledger.notices.take_dropped().items():
            self._send(generator, Dropped(keys))
        for generator, keys in self.ledger.notices.take_overdue().items():
            cut = self.spec.overdue == "cut" or self.spec.by_sample
            self._send(generator, Cut(keys, keep=not self.spec.by_sample) if cut else Late(keys))
