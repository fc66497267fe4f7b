"""The generator: takes tickets, makes groups, hands them over, and switches to new weights on the way.

    courier (GeneratorDesk)                        main thread (GeneratorLoop.step)
    ─────────────────────                          ────────────────────────────────
    Grants, Forgotten ──▶ news ──────────────────▶ Intake: start those whose min_version is here, hold the others, ask
    Cut, Late, Dropped ─▶ news ──────────────────▶ end these groups with what there is, or forget them
                                                   engine.step() → chunks, each token labelled with its version
                                                   finished response → reward process → reward
    Ask, Started, Finished, Failed, Returned ◀ post  report to the ledger of the ticket
    Pull ──▶ TrajectoryStore (comm.exchange) ◀──── put the finished group
    WeightsReady … WeightsPart ──▶ subscriber ───▶ between two engine steps: take() → engine.load_weights
    Stop(1) ─────────────────────────────────────▶ drop what runs, take in the last version, evaluate, say Bye

A group lives here as `Group` from its start until the last of its samples has a reward, or is left out. When a reward
fails for good, the whole group is given up and its ledger issues another ticket.

A ledger cuts a group that holds up a step. With `keep` its unfinished samples end as they are and get their rewards,
without it they are left out, as are those without a token. A group without any token is handed back.

With `rollout.partial: false` a version that waits is taken in when no sample is being generated, and no group is
started until it is in force. Nothing that runs needs anything but time, so this always comes. A version serves at least
one turn's groups before the next is taken in: else none would be started where versions come faster than into force.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import ClassVar

from headrace.comm.courier import Courier
from headrace.comm.messages import (
    Ask,
    Cut,
    Dropped,
    Failed,
    Finished,
    Forgotten,
    Grants,
    Late,
    Message,
    Redirect,
    Returned,
    Started,
    Stop,
    TicketGrant,
)
from headrace.comm.trajectories import TrajectoryStore
from headrace.comm.trajectory import Trajectory, Unit
from headrace.comm.transport import Received, Transport
from headrace.comm.weights import Subscriber
from headrace.ranks.groups import CUT, Group, Sample
from headrace.ranks.heartbeat import MainState
from headrace.ranks.intake import Intake, Key
from headrace.ranks.memory import MemoryBound
from headrace.ranks.tally import Tally
from headrace.ranks.tasks import Scorer, TaskSource
from headrace.ranks.topology import RoleMap
from headrace.rollout.engine import Chunk, Engine, Request, SamplingParams
from headrace.rollout.rewards import Scored


class GeneratorDesk:
    """The courier's side of a generator: brings in what its ledgers say."""

    handles: ClassVar[tuple[type[Message], ...]] = (Grants, Forgotten, Cut, Late, Dropped, Redirect, Stop)

    def __init__(self, transport: Transport, roles: RoleMap) -> None:
        self.news: deque[Grants | Forgotten | Cut | Late | Dropped] = deque()
        """In the order in which they came."""
        self.stop: Stop | None = None
        self._transport = transport
        self._roles = roles

    def receive(self, received: Received, now: float) -> None:
        match received.message:
            case Grants() | Forgotten() | Cut() | Late() | Dropped() as news:
                self.news.append(news)
            case Redirect(ledger, room):
                self._transport.send(self._roles.trainers[ledger], Ask(room))
            case Stop() as stop:
                self.stop = stop

    def tick(self, now: float) -> None:
        """Everything here is done as it comes in."""


class GeneratorLoop:
    """The main thread of a generator."""

    def __init__(
        self,
        rank: int,
        roles: RoleMap,
        courier: Courier,
        desk: GeneratorDesk,
        engine: Engine,
        subscriber: Subscriber,
        store: TrajectoryStore,
        tasks: TaskSource,
        scorer: Scorer,
        params: SamplingParams,
        group_size: int,
        memory: MemoryBound,
        partial: bool,
        oldest: int,
        seed: int,
        main: MainState,
    ) -> None:
        """`partial`: running samples go on when the weights change. `oldest`: the largest age of a trained token, in
        optimizer steps."""
        self.engine = engine
        self._roles = roles
        self._home = roles.home_ledger(roles.index(rank))
        self._courier = courier
        self._desk = desk
        self._subscriber = subscriber
        self._store = store
        self._tasks = tasks
        self._scorer = scorer
        self.params = params
        self._group_size = group_size
        self._partial = partial
        self._oldest = oldest
        self._seed = seed
        self._main = main
        self._memory = memory
        self._intake = Intake(engine.capacity().slots, group_size)
        self._groups: dict[Key, Group] = {}
        self._loaded = -1
        """The newest version from the trainers."""
        self._release_kept: Callable[[], None] = lambda: None
        """Gives back the memory of the version that the engine had before."""
        self._unused = False
        """No group was started since that version was loaded, and one must be before the next; never with `partial`."""
        self._tally = Tally()
        self._worked = False
        """There were samples to generate in the last turn."""

    def step(self) -> bool:
        """One turn of the loop; returns whether anything was done."""
        self._tally.turn(self._worked)
        self._main.set("generating")
        busy = self._take_news()
        if self._unused:
            busy |= self._start_granted()
        busy |= self.switch_version()
        busy |= self._start_granted()
        self._ask_for_more()
        self._take_in(self.engine.step())
        scored = self._scorer.poll()
        self._settle(scored)
        self._worked = self._intake.generating > 0
        return busy or self._worked or bool(scored)

    def switch_version(self) -> bool:
        """Take in the newest whole version, if one is there and no sample would become one of two versions that
        mustn't."""
        if not self._partial and (self._intake.generating or not self._in_force):
            return False
        if not self._subscriber.waiting:
            return False
        self._main.set("taking in a version")  # with a broadcast this is where all meet
        version = self._subscriber.take()
        if version is None:
            return False
        self._main.set(f"loading version {version.version}")
        self.engine.load_weights(version.version, version.tensors, version.lasting)
        self._release_kept()
        if version.lasting:
            self._release_kept = version.release
        else:
            version.release()
        self._loaded, self._unused = version.version, not self._partial
        self._main.version = self.engine.version
        self._main.set("generating")
        return True

    def reached(self, version: int) -> bool:
        """Whether the engine holds that version, or a newer one, from the trainers; takes it in when it has come.

        The engine calls the weights of the model folder version 0, too, but they come before the warm start."""
        self.switch_version()
        self.engine.step()
        return self._loaded >= version and self.engine.version >= version

    def post(self, target: int, message: Message) -> None:
        """Have the courier send a message; messages to one rank keep their order."""
        self._courier.submit(lambda: self._courier.transport.send(target, message))

    @property
    def waits(self) -> bool:
        """Whether something will come that the courier doesn't announce: a reward, or a version coming into force."""
        return bool(self._groups) or bool(self._intake.held)

    def drop_all(self) -> list[Group]:
        """Give up whatever runs: the run is over. Returns the groups that were begun, with all their tokens."""
        for group in self._groups.values():
            self._take_in(self._abort(group))
        begun = [group for group in self._groups.values() if group.begun]
        self._groups.clear()
        self._intake.clear()
        self._desk.news.clear()
        return begun

    def resume(self, key: Key, kept: Sequence[Trajectory]) -> None:
        """Go on with a group that was at work when the run was stopped; its ledger counts it as started, or says that
        it is dropped."""
        grant = TicketGrant(*key, min(trajectory.born for trajectory in kept if trajectory.response_length))
        task = self._tasks.task(grant.ticket)
        group = Group.resumed(grant, task, self._tasks.encode(task), self._group_size, kept)
        self._groups[key] = group
        self._intake.resumed(len(group.growing))
        self._submit(group)
        for index, sample in enumerate(group.samples):
            if sample.finish and sample.reward is None:
                self._scorer.submit(group.unit(index), task, sample.text)

    # What the ledgers say

    def _take_news(self) -> bool:
        busy = bool(self._desk.news)
        while self._desk.news:
            match self._desk.news.popleft():
                case Grants(grants):
                    self._intake.granted(grants)
                case Forgotten(room):
                    self._intake.forgotten(room)
                case Cut(keys, keep):
                    self._cut(keys, keep)
                case Late(keys):
                    for group in self._present(keys):
                        group.late = True
                case Dropped(keys):
                    self._drop(keys)
        return busy

    def _cut(self, keys: Collection[Key], keep: bool) -> None:
        """End these groups. Those that aren't here any more have crossed the message, with all that they had."""
        unbegun = self._intake.withdraw(keys)
        complete: list[Group] = []
        for group in self._present(keys):
            growing = group.growing
            self._take_in(self._abort(group))
            group.late = True
            if not group.begun:
                self._close(group)
                unbegun.append(group.key)
                continue
            for unit in growing:
                self._end_sample(group, unit, keep)
            if group.complete:
                complete.append(group)
        self._hand_over(complete)
        self._hand_back(unbegun)

    def _end_sample(self, group: Group, unit: Unit, keep: bool) -> None:
        sample = group.samples[unit.sample]
        if keep and sample.tokens:
            self._finish(group, unit, CUT)
        else:
            sample.left_out = True

    def _drop(self, keys: Collection[Key]) -> None:
        """These groups count no more, wherever they are."""
        self._intake.withdraw(keys)
        self._store.release(keys)
        for group in self._present(keys):
            self._abort(group)
            self._close(group, late=True)

    def _present(self, keys: Iterable[Key]) -> list[Group]:
        return [self._groups[key] for key in keys if key in self._groups]

    def _hand_back(self, keys: Iterable[Key]) -> None:
        back: dict[int, list[Key]] = {}
        for key in keys:
            back.setdefault(self._ledger_of(key[0]), []).append(key)
        for ledger, tickets in back.items():
            self.post(ledger, Returned(tickets))

    # Groups

    def _ask_for_more(self) -> None:
        kept = self._store.memory_use()
        room = self._intake.ask(self._memory.at_work(kept.groups, kept.bytes))
        if room:
            self.post(self._home, Ask(room))

    def _start_granted(self) -> bool:
        if not self._may_start():
            return False
        grants = self._intake.start(self.engine.version)
        for grant in grants:
            self._start(grant)
        self._unused &= not grants
        return bool(grants)

    def _may_start(self) -> bool:
        """Whether a group started now can keep to one version, if it has to, and no version waits for its turn."""
        return self._partial or (self._in_force and (self._unused or not self._subscriber.waiting))

    @property
    def _in_force(self) -> bool:
        """Whether the next token is sampled with the newest version that was loaded."""
        return self.engine.version >= self._loaded

    def _start(self, grant: TicketGrant) -> None:
        task = self._tasks.task(grant.ticket)
        group = Group(grant, task, self._tasks.encode(task), [Sample() for _ in range(self._group_size)])
        self._groups[group.key] = group
        self._submit(group)

    def _submit(self, group: Group) -> None:
        """Have the engine sample what is missing."""
        for unit in group.growing:
            begun = tuple(group.samples[unit.sample].tokens)
            key = self._seed, unit.ticket, unit.sample
            self.engine.add(Request(unit, group.prompt, self.params, key, begun))

    def _take_in(self, chunks: Iterable[Chunk]) -> None:
        """Add new tokens to their samples. Tell the ledgers which version the first token of a group was sampled with:
        it fixes the deadline."""
        starts: dict[int, list[tuple[int, int, int]]] = {}
        for chunk in chunks:
            group = self._group_of(chunk.id)
            if group is None:
                continue
            if not group.begun:
                ledger = self._ledger_of(group.grant.ticket)
                starts.setdefault(ledger, []).append((*group.key, chunk.version))
            self._advance(group, chunk)
        for ledger, entries in starts.items():
            self.post(ledger, Started(entries))

    def _advance(self, group: Group, chunk: Chunk) -> None:
        assert isinstance(chunk.id, Unit)
        group.samples[chunk.id.sample].append(chunk)
        self._tally.sampled(len(chunk.tokens))
        if chunk.finish is not None:
            self._intake.sampled()
            self._finish(group, chunk.id, chunk.finish)

    def _finish(self, group: Group, unit: Unit, finish: str) -> None:
        """A sample has its last token: send the response to its reward."""
        sample = group.samples[unit.sample]
        sample.finish = finish
        sample.text = self._tasks.decode(sample.tokens)
        self._scorer.submit(unit, group.task, sample.text)

    def _settle(self, scored: list[Scored]) -> None:
        """Record rewards; hand over the groups that are complete, give up those whose reward failed."""
        complete: list[Group] = []
        for score in scored:
            group = self._group_of(score.key)
            if group is None:
                continue
            assert isinstance(score.key, Unit)
            if score.reward is None:
                self._give_up(group, score)
                continue
            group.samples[score.key.sample].reward = score.reward
            self._tally.scored(score.reward)
            if group.complete:
                complete.append(group)
        self._hand_over(complete)

    def _hand_over(self, groups: Iterable[Group]) -> None:
        """Put the data where trainers pull it from, then tell the ledgers."""
        by_ledger: dict[int, list[Group]] = {}
        for group in groups:
            trajectories = group.trajectories()
            if trajectories:
                self._memory.finished(self._store.put(*group.key, trajectories))
            self._close(group)
            by_ledger.setdefault(self._ledger_of(group.grant.ticket), []).append(group)
        for ledger, done in by_ledger.items():
            metas = [meta for group in done for meta in group.metas()]
            left_out = [unit for group in done for unit in group.left_out]
            counters = self._tally.counters(self.engine.version, self._store.memory_use())
            self.post(ledger, Finished(metas, counters, left_out))

    def _give_up(self, group: Group, score: Scored) -> None:
        self._abort(group)
        self._close(group)
        failed = Failed(*group.key, score.reason or "reward_failed", score.error or "")
        self.post(self._ledger_of(group.grant.ticket), failed)

    def _abort(self, group: Group) -> list[Chunk]:
        """Stop sampling; returns the tokens that were made and not handed out yet."""
        growing = group.growing
        chunks = [self.engine.abort(unit) for unit in growing]
        self._intake.sampled(len(growing))
        return [chunk for chunk in chunks if chunk is not None]

    def _close(self, group: Group, late: bool = False) -> None:
        """The group is over. It was late if its ledger said so, or if its deadline has passed by the newest version
        known here."""
        del self._groups[group.key]
        passed = self._loaded - group.grant.min_version > self._oldest
        self._intake.ended(late or group.late or passed)

    def _group_of(self, id: Hashable) -> Group | None:
        """The group a chunk or a reward belongs to; None when it was given up meanwhile."""
        return self._groups.get((id.ticket, id.attempt)) if isinstance(id, Unit) else None

    def _ledger_of(self, ticket: int) -> int:
        return self._roles.trainers[ticket % len(self._roles.trainers)]
