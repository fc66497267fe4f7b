"""From what is on disk to where a resumed run goes on. Before the couriers start:

    every generator ── Salvaged(groups) ──▶ trainer 0      what it has read of the archive, and holds now
    trainer 0:  checkpoint + journal + salvaged groups → plan
              ── Resumption(plan) ──▶ trainers
              ── Dropped(groups) ───▶ generators           those that don't count any more

Weights and optimizer are those of the checkpoint. The steps since, which the journal names, are trained again with the
same groups, as far as these are there; the ledgers stand where they stood after the last of them. What else is in the
archive and not settled by then is outstanding again, under its old deadline, and isn't generated again. Tokens of
versions that never were, since their steps were undone, don't count.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import msgspec
import numpy as np

from headrace.comm.messages import Dropped, HeldGroup, Message, Resumption, Salvaged, SampleMeta
from headrace.comm.trajectory import Trajectory
from headrace.comm.transport import Received, Transport
from headrace.ranks import forming
from headrace.ranks.journal import Journal
from headrace.ranks.segments import Archived
from headrace.ranks.shutdown import until
from headrace.ranks.tickets import NO_VARIANCE, FormedStep, LedgerSpec, LedgerState, SavedGroup, SavedWork, add_counts
from headrace.ranks.topology import RoleMap

POLL_S = 0.002

M = TypeVar("M", bound=Message)

Key = tuple[int, int]
"""(ticket, attempt)."""

Held = Mapping[int, Sequence[HeldGroup]]
"""By world rank of the generator."""


class Plan(msgspec.Struct, frozen=True):
    """How a run goes on."""

    ledger: LedgerState
    """Where the ledgers go on: of the whole run, with all groups that are outstanding again."""
    replay: list[FormedStep]
    """The steps to be trained again before, from the checkpoint on."""
    dropped: dict[int, list[Key]]
    """By generator: what it holds and doesn't count any more."""

    def describe(self, held: Held) -> str:
        """One line for people."""
        replayed = {(g.ticket, g.attempt) for step in self.replay for g in step.groups}
        finished = {(g.ticket, g.samples[0].attempt) for g in self.ledger.finished}
        working = {(g.ticket, g.attempt) for g in self.ledger.working}
        tokens = {(g.ticket, g.attempt, g.finished): g.tokens for groups in held.values() for g in groups}
        kept = sum(tokens[ticket, attempt, True] for ticket, attempt in finished)
        going_on = sum(tokens[ticket, attempt, False] for ticket, attempt in working)
        text = f"archive: {len(finished)} finished groups ({kept:,} tokens)"
        text += f" and {len(working)} unfinished ones ({going_on:,}) go on"
        if self.replay:
            first, last = self.replay[0].step + 1, self.replay[-1].step + 1
            text += f"; steps {first} to {last} are trained again with their {len(replayed)} groups"
        return text


# What was read


def held_group(group: Archived) -> HeldGroup:
    """What trainer 0 needs to know of a group from the archive."""
    sampled = np.concatenate([t.versions[t.versions >= 0] for t in group.trajectories])
    return HeldGroup(
        *group.key,
        launch=group.launch,
        finished=group.finished,
        born=int(sampled.min(initial=np.iinfo(np.int32).max)),
        newest=int(sampled.max(initial=-1)),
        tokens=len(sampled),
        samples=[meta_of(trajectory) for trajectory in group.trajectories] if group.finished else [],
    )


def meta_of(trajectory: Trajectory) -> SampleMeta:
    """What a ledger knows of a sample."""
    spans, length = trajectory.spans, trajectory.response_length
    return SampleMeta(
        *trajectory.unit,
        born=trajectory.born,
        prompt_tokens=len(trajectory.versions) - length,
        response_tokens=length,
        reward=trajectory.reward,
        spans=tuple(spans) if len(spans) > 1 else (),
    )


# The plan


def make_plan(saved: Sequence[LedgerState], journal: Journal, held: Held, spec: LedgerSpec, ledgers: int) -> Plan:
    """`saved`: the ledgers' states of the checkpoint; `ledgers`: how many there are now. A pure function."""
    copies = _copies(held)
    replay: list[FormedStep] = []
    step = saved[0].step
    while step < spec.steps and (line := journal.steps.get(step)) is not None:
        owners = [_holder(copies, (group.ticket, group.attempt)) for group in line.groups]
        if None in owners:
            break
        placed = forming.partition([group.cost for group in line.groups], ledgers)
        groups = [
            msgspec.structs.replace(group, owner=owner, ledger=group.ticket % ledgers, replica=replica)
            for group, owner, replica in zip(line.groups, owners, placed, strict=True)
        ]
        replay.append(FormedStep(step, 0, groups, finished=False))
        saved, step = line.ledgers, step + 1
    state = _with_salvaged(_merged(saved, copies), copies, journal, spec).readmit(spec)
    used = {(g.ticket, g.attempt) for formed in replay for g in formed.groups}
    used |= {(g.ticket, g.samples[0].attempt) for g in state.finished}
    used |= {(g.ticket, g.attempt) for g in state.working}
    return Plan(state, replay, _unused(held, copies, used))


def newer(group: HeldGroup | Archived, other: HeldGroup | Archived | None) -> bool:
    """Of two copies of a group: whether the first has more of it, being finished, or of a later launch."""
    return other is None or (group.finished, group.launch) > (other.finished, other.launch)


def _copies(held: Held) -> dict[Key, tuple[int, HeldGroup]]:
    """By key: which generator's copy counts."""
    found: dict[Key, tuple[int, HeldGroup]] = {}
    for rank in sorted(held):
        for group in held[rank]:
            key = group.ticket, group.attempt
            if newer(group, found[key][1] if key in found else None):
                found[key] = rank, group
    return found


def _holder(copies: Mapping[Key, tuple[int, HeldGroup]], key: Key) -> int | None:
    """Who holds a finished group."""
    return copies[key][0] if key in copies and copies[key][1].finished else None


def _merged(saved: Sequence[LedgerState], copies: Mapping[Key, tuple[int, HeldGroup]]) -> LedgerState:
    """The whole state; groups that it calls finished are so if somebody holds them."""
    keys = [(g.ticket, g.samples[0].attempt) for state in saved for g in state.finished]
    holders = {key[0]: _holder(copies, key) for key in keys}
    return LedgerState.merge(saved, {ticket: rank for ticket, rank in holders.items() if rank is not None})


def _with_salvaged(
    state: LedgerState, copies: Mapping[Key, tuple[int, HeldGroup]], journal: Journal, spec: LedgerSpec
) -> LedgerState:
    """The state with what the archive has of tickets that aren't settled in it. Where a group is void, the ticket is to
    be granted as a new attempt, so that the key stays unique."""
    returned, lowest = dict(state.returned), dict(state.next_numbers)
    there = {group.ticket for group in state.finished}
    found = {
        key: copy
        for key, copy in sorted(copies.items(), key=lambda item: (item[1][1].finished, item[0]))
        if key[0] not in there
        and (key[0] in returned or key[0] >= lowest[key[0] % state.ledgers])
        and (spec.tickets is None or key[0] < spec.tickets)
    }
    _issue(returned, lowest, {ticket for ticket, _ in found}, state.ledgers)
    kept: dict[int, SavedGroup | SavedWork] = {}
    for (ticket, attempt), (rank, group) in found.items():  # the last of a ticket counts: finished, newest attempt
        limits = [state.step, journal.oldest_begin_after(group.launch)]
        returned[ticket] = max(returned[ticket], attempt + 1)
        if all(limit is None or group.newest <= limit for limit in limits):
            kept[ticket] = _saved(group, rank, state.step, spec)
    finished = [group for group in kept.values() if isinstance(group, SavedGroup)]
    filtered = _filtered(finished, spec)
    for ticket in kept:
        del returned[ticket]
    return msgspec.structs.replace(
        state,
        next_numbers=sorted(lowest.items()),
        finished=[*state.finished, *(group for group in finished if group.ticket not in filtered)],
        working=[group for group in kept.values() if isinstance(group, SavedWork)],
        returned=sorted(returned.items()),
        dropped=add_counts([state.dropped, {NO_VARIANCE: len(filtered)} if filtered else {}]),
    )


def _issue(returned: dict[int, int], lowest: dict[int, int], tickets: set[int], ledgers: int) -> None:
    """Count these numbers as granted; those below them that never were wait to be granted for the first time."""
    for ticket in sorted(tickets):
        index = ticket % ledgers
        if ticket >= lowest[index]:
            returned |= dict.fromkeys(range(lowest[index], ticket + 1, ledgers), 0)
            lowest[index] = ticket + ledgers


def _saved(group: HeldGroup, owner: int, step: int, spec: LedgerSpec) -> SavedGroup | SavedWork:
    """`mask` may have moved the deadline of an overdue group."""
    reserved = max(group.born, step - spec.oldest) if spec.overdue == "mask" else group.born
    if group.finished:
        return SavedGroup(group.ticket, group.attempt, owner, reserved, group.samples)
    return SavedWork(group.ticket, group.attempt, owner, reserved, group.born)


def _filtered(groups: Iterable[SavedGroup], spec: LedgerSpec) -> set[int]:
    """Tickets that the filter would have dropped had the ledgers lived on."""
    equal = [group.ticket for group in groups if len({sample.reward for sample in group.samples}) == 1]
    return set(equal[: spec.filtered_per_step])


def _unused(held: Held, copies: Mapping[Key, tuple[int, HeldGroup]], used: set[Key]) -> dict[int, list[Key]]:
    unused = {
        rank: [key for key in ((g.ticket, g.attempt) for g in groups) if key not in used or copies[key][0] != rank]
        for rank, groups in held.items()
    }
    return {rank: keys for rank, keys in unused.items() if keys}


# The exchange


def gather_salvaged(transport: Transport, roles: RoleMap, early: list[Received], limit_s: float) -> Held:
    """On trainer 0: what every generator holds. Other messages are added to `early`.

    Raises:
        WaitLimitError: names those that haven't said it within the limit.
    """
    held: dict[int, Sequence[HeldGroup]] = {}

    def complete() -> bool:
        for source, message in _take(transport, early, Salvaged):
            held[source] = message.groups
        return len(held) == len(roles.generators)

    def missing() -> str:
        absent = [roles.name(rank) for rank in roles.generators if rank not in held]
        return f"{', '.join(absent)} to read the archive"

    for _ in until(complete, limit_s, missing):
        time.sleep(POLL_S)
    return held


def tell_plan(transport: Transport, roles: RoleMap, plan: Plan) -> None:
    """On trainer 0: tell the others."""
    for trainer in roles.trainers[1:]:
        transport.send(trainer, Resumption(msgspec.msgpack.encode(plan)))
    for generator, keys in plan.dropped.items():
        transport.send(generator, Dropped(keys))


def await_plan(transport: Transport, roles: RoleMap, early: list[Received], limit_s: float) -> Plan:
    """On the other trainers. Other messages are added to `early`.

    Raises:
        WaitLimitError: trainer 0 hasn't told it within the limit.
    """
    found: list[Resumption] = []

    def arrived() -> bool:
        found.extend(message for _, message in _take(transport, early, Resumption))
        return bool(found)

    for _ in until(arrived, limit_s, lambda: f"{roles.name(roles.trainers[0])} to plan how the run goes on"):
        time.sleep(POLL_S)
    return msgspec.msgpack.decode(found[0].plan, type=Plan)


def _take(transport: Transport, early: list[Received], kind: type[M]) -> list[tuple[int, M]]:
    """(source, message) of this kind that have arrived; the others stay in `early`."""
    early.extend(transport.poll())
    found = [(received.source, received.message) for received in early if isinstance(received.message, kind)]
    early[:] = [received for received in early if not isinstance(received.message, kind)]
    return found
