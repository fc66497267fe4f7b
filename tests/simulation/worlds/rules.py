"""What must hold after every event, from what the generators and trainers of the world really did.

- Every ledger's own invariants (`LedgerNode.check`).
- Every ticket has one end; none is granted after it, none twice as the same attempt.
- Outstanding tickets are within C; between rounds, credits and outstanding tickets add up to what they should.
- What a generator has asked for is parked somewhere, or under way, to the last ask.
- Grants go to nobody who is taken for lost, and no ledger's grants go back to older versions.
- A group is told to end once, and only if it holds up a step.
- A batch has the right size, of groups that are whole and are trained once; the versions of all tokens in the loss are
  within the bound; each was finished at most D steps ago.
"""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from math import ceil, floor
from typing import TYPE_CHECKING

from headrace.comm.messages import Ask, Cut, Forgotten, Grants, Message, Redirect
from headrace.ranks.contribution import Phase
from headrace.ranks.node import LedgerNode
from headrace.ranks.tickets import NO_VARIANCE, OVERDUE, FormedGroup, FormedStep
from worlds.generators import PROMPT_TOKENS, Group
from worlds.setup import expect

if TYPE_CHECKING:
    from worlds.trainers import Data
    from worlds.world import World


class Rules:
    """The rules of one world, and what they have to remember of it."""

    def __init__(self, world: World, ends: set[int]) -> None:
        """`ends`: tickets that had failed or been dropped before."""
        self._world = world
        self.given_up: list[set[int]] = [set() for _ in world.nodes]
        """Failed and dropped tickets by ledger."""
        self.given_up[0] |= ends
        self.ages: list[int] = []
        """Of the oldest token in the loss of each trained group, in steps."""
        self.left_out = 0
        """Samples of trained groups that had been cut without keeping them."""
        self.masked = 0
        """Tokens that were left out of the loss for their age."""
        spec = world.spec
        periods = 1 + Fraction(str(spec.max_staleness))
        self._credits = floor(periods * spec.publish_every * spec.groups_per_step)
        self._oldest = ceil(periods * spec.publish_every) - 1
        self._done = {ticket for step in world.trained for ticket in step} | ends
        self._attempts: dict[int, int] = {}
        self._finished_at: dict[int, int] = {}
        self._outstanding: list[set[int]] = [set(node.ledger._tickets) for node in world.nodes]
        self._filtered: Counter[int] = Counter()
        self._told: list[Counter[str]] = [Counter(node.counts().dropped_reasons) for node in world.nodes]
        self._given = [node.counts().failed + node.counts().dropped for node in world.nodes]
        self._cut: set[tuple[int, int]] = set()
        self._newest_granted = [0] * len(world.nodes)
        for i in range(len(world.nodes)):
            self._follow(i)
        self._check_outstanding()

    def check(self) -> None:
        """After an event that touched a ledger."""
        if self._world.touched is not None:
            self._world.nodes[self._world.touched].check()
            self._follow(self._world.touched)
            self._check_outstanding()
            self._check_credits()
            self._check_asks()

    # Ends of tickets

    def _follow(self, i: int) -> None:
        """What has become of the tickets of ledger `i`."""
        ledger = self._world.nodes[i].ledger
        for ticket in ledger._tickets.values():
            last = self._attempts.get(ticket.number, -1)
            if ticket.attempt != last:
                expect(ticket.attempt > last, f"ticket {ticket.number} is granted as attempt {ticket.attempt} again")
                expect(ticket.number not in self._done, f"ticket {ticket.number} is granted after its end")
                self._attempts[ticket.number] = ticket.attempt
            if ticket.open:
                self._finished_at.pop(ticket.number, None)
            else:
                self._finished_at.setdefault(ticket.number, self._world.step)
        before, self._outstanding[i] = self._outstanding[i], set(ledger._tickets)
        gone = before - self._outstanding[i]
        if gone:
            self._end(i, gone - {number for number, _ in ledger._numbers.returned})

    def _end(self, i: int, gone: set[int]) -> None:
        trained = {ticket for ticket in gone if ticket in self._done}
        given_up = gone - trained
        expect(given_up.isdisjoint(self.given_up[i]), f"tickets {sorted(given_up)} have two ends")
        self.given_up[i] |= given_up
        self._done |= given_up
        counts = self._world.nodes[i].counts()
        before, self._given[i] = self._given[i], counts.failed + counts.dropped
        expect(self._given[i] - before == len(given_up), f"{sorted(given_up)} left, {counts}")
        self._check_reasons(i, Counter(counts.dropped_reasons))

    def _check_reasons(self, i: int, reasons: Counter[str]) -> None:
        spec, new = self._world.spec, reasons - self._told[i]
        self._told[i] = reasons
        expect(set(new) <= {OVERDUE, NO_VARIANCE}, f"dropped for {set(new)}")
        expect(not new[OVERDUE] or spec.overdue == "drop", f"dropped as overdue with {spec.overdue}")
        node = self._world.nodes[i]
        goes_on = node.phase is not Phase.FORMING or node.ledger.next_number is None
        expect(not new[OVERDUE] or spec.by_sample or goes_on, "dropped as overdue though the step doesn't go on")
        step = node.ledger.step
        self._filtered[step] += new[NO_VARIANCE]
        expect(self._filtered[step] <= spec.filtered_per_step, f"{self._filtered[step]} filtered in step {step}")

    # Credits and asks

    def _check_outstanding(self) -> None:
        world = self._world
        held = sum(node.counts().outstanding - world.trainers.settled(i) for i, node in enumerate(world.nodes))
        expect(held <= self._credits, f"{held} outstanding with C = {self._credits}")

    def _check_credits(self) -> None:
        """The law of credits, at the moments when no round is half delivered and all ledgers are at one step."""
        ledgers = [node.ledger for node in self._world.nodes]
        rounds = {(node._rounds.round, node._rounds.idle) for node in self._world.nodes}
        if len({ledger.step for ledger in ledgers}) > 1 or len(rounds) > 1 or not rounds.pop()[1]:
            return
        found = sum(ledger.credits + ledger._credits.escrow + len(ledger._tickets) for ledger in ledgers)
        spec, step = self._world.spec, ledgers[0].step
        expected = max(0, min(self._credits, (spec.steps - step) * spec.groups_per_step))
        expect(found + ledgers[0].standing().undealt == expected, f"{found} credits and outstanding, not {expected}")

    def _check_asks(self) -> None:
        asked: Counter[int] = Counter()
        for node in self._world.nodes:
            asked.update(node.ledger.asks.parked)
            asked.update(node.ledger.asks.absent)
        for pair, queue in self._world.channels.items():
            for message in queue:
                if type(message) in ASKS:
                    asked[max(pair)] += _asks(message)
        for rank, generator in self._world.alive.items():
            expect(generator.asked == asked[rank], f"rank {rank} asked for {generator.asked}, {asked[rank]} are known")

    # Grants and batches

    def check_sent(self, source: int, target: int, message: Message) -> None:
        """What a ledger sends."""
        if isinstance(message, Grants):
            expect(target not in self._world.nodes[source].absent, f"rank {target} is absent and gets a grant")
            for grant in message.grants:
                version = grant.min_version
                expect(version >= self._newest_granted[source], f"ledger {source} goes back to version {version}")
                self._newest_granted[source] = version
        elif isinstance(message, Cut):
            for key in message.tickets:
                expect(key not in self._cut, f"ticket {key[0]} is told to end twice")
                self._cut.add(key)
                node = self._world.nodes[source]
                deadline = next(d for d, told in node.ledger._told_open.items() if key in told)
                expect(self._holds_up(node, deadline), f"ticket {key[0]} is told to end and holds nothing up")

    def _holds_up(self, node: LedgerNode, deadline: int) -> bool:
        """Whether a ticket of this deadline held up the step in the last round: it is due by this step, which would be
        whole with all that are due; or, once the step has taken its groups, all finished, too many others are due by
        some deadline not before that."""
        size, standings = node.spec.groups_per_step, node._pace.standings
        step = standings[0].step
        finished = sorted(d for s in standings for d, n in s.finished.items() for _ in range(n))
        unfinished = [d for s in standings for d, n in s.unfinished.items() for _ in range(n)]
        if len(finished) < size:
            due = [d for d in unfinished if d <= step]
            alone = due == unfinished and not any(s.numbers for s in standings)
            return deadline <= step and (len(finished) + len(due) >= size or alone)
        others = finished[size:] + unfinished
        return any(sum(other <= d for other in others) > (d - step) * size for d in others if d >= deadline)

    def check_batch(self, formed: FormedStep, data: Data) -> None:
        """What the replicas are about to train, against the data that they have pulled."""
        world = self._world
        expect(all(t.formed == formed for t in world.trainers.taken.values()), "the ledgers formed different batches")
        expect(formed.step == world.step, f"formed step {formed.step} after {world.step} steps")
        tickets = [group.ticket for group in formed.groups]
        expect(tickets == sorted(set(tickets)), f"a ticket twice: {tickets}")
        expect(self._done.isdisjoint(tickets), f"one of {tickets} has had its end")
        full = len(tickets) == world.spec.groups_per_step
        expect(full or len(self._done) + len(tickets) == world.spec.tickets, "a short batch before the end of the data")
        replicas = {group.replica for group in formed.groups}
        expect(len(replicas) == min(len(world.nodes), len(tickets)), "a replica goes without")
        for group in formed.groups:
            self._check_group(group, data[group.ticket])
        self._done.update(tickets)

    def _check_group(self, group: FormedGroup, data: Group) -> None:
        step, spec, name = self._world.step, self._world.spec, f"ticket {group.ticket}"
        oldest = step - self._oldest
        samples = list(data.values())
        in_loss = [[(v, n) for v, n in spans if v >= oldest or spec.overdue != "mask"] for spans in samples]
        versions = [version for spans in in_loss for version, _ in spans]
        expect(all(version >= oldest for version in versions), f"{name} has age {step - min(versions, default=0)}")
        expect(group.born == min(versions, default=oldest), f"{name}: born isn't the oldest version in the loss")
        expect(group.loss_tokens == sum(n for spans in in_loss for _, n in spans), f"{name}: tokens in the loss")
        expect(group.sequences == sum(bool(spans) for spans in in_loss), f"{name}: sequences in the loss")
        lengths = [sum(n for _, n in spans) for spans in samples]
        expect(group.response_tokens == sum(lengths) and group.longest == max(lengths), f"{name}: lengths")
        expect(group.tokens == sum(lengths) + PROMPT_TOKENS * len(samples), f"{name}: tokens")
        expect(group.samples == len(samples) > 0, f"{name}: samples")
        expect(spec.by_sample or spec.overdue == "cut" or len(samples) == spec.group_size, f"{name}: samples missing")
        expect(group.deadline >= step, f"{name} was due at {group.deadline}")
        waited = step - self._finished_at[group.ticket]
        expect(waited <= self._oldest, f"{name} was finished {waited} steps ago")
        self.ages.append(step - group.born)
        self.left_out += spec.group_size - len(samples)
        self.masked += sum(lengths) - group.loss_tokens

    def check_end(self) -> None:
        """When the run is over."""
        world = self._world
        trained = [ticket for step in world.trained for ticket in step]
        total = sum((node.counts() for node in world.nodes[1:]), world.nodes[0].counts())
        given_up = set().union(*self.given_up)
        expect(total.trained == len(trained) and total.failed + total.dropped == len(given_up), f"{total} isn't true")
        if world.stopped:
            return
        expect(total.outstanding == 0, "work is left over")
        if world.step < world.spec.steps:
            expect(sorted([*trained, *given_up]) == list(range(world.spec.tickets or 0)), "not every ticket had an end")
            expect(total.returned == 0, "a ticket was left")


ASKS = frozenset([Ask, Redirect, Forgotten, Grants])


def _asks(message: Message) -> int:
    """How many asks are under way with this message, or answered by it."""
    match message:
        case Ask(room) | Redirect(_, room) | Forgotten(room):
            return room
        case Grants(grants):
            return len(grants)
    return 0
