"""Every message that ranks exchange, in one place.

    generator ── Ask(room) ─────────────────────▶ home ledger        the right to start `room` more groups
    generator ◀─ Grants([(ticket, attempt, min)]) ── ledger          a ticket each
    generator ◀─ Redirect(ledger, room) ────────── ledger            "ask that one", it has numbers left
    generator ── Started([(ticket, attempt, born)]) ▶ ledger of the ticket (ticket mod number of ledgers)
    generator ── Finished([SampleMeta]) ────────▶ ledger of the ticket
    generator ── Failed(ticket, attempt, reason) ▶ ledger of the ticket
    generator ── Returned([(ticket, attempt)]) ─▶ ledger of the ticket   not begun: give them to another
    generator ◀─ Cut([(ticket, attempt)], keep) ── ledger            overdue: end these groups with what there is
    generator ◀─ Late([(ticket, attempt)]) ─────── ledger            a step is held up by these groups
    generator ◀─ Dropped([(ticket, attempt)]) ──── ledger            these count no more: stop and forget them
    generator ◀─ Forgotten(room) ───────────────── ledger            you were silent: so many asks were forgotten
    any       ── Silence(rank, over) ───────────▶ trainers           a generator is taken for lost, or is back
    ledger    ── RoundPart(...) ────────────────▶ ledger             one hop of an all-gather among the ledgers
    ledger    ── Progress(round, standing) ─────▶ ledger             to the watcher, who begins that round in time
    trainer   ── Pull(keys, fields) ────────────▶ generator          the data of finished groups
    consumer  ── Consume(consumer, count) ──────▶ owner              groups that this consumer hasn't had
    consumer  ── Browse(partition) ─────────────▶ owner              which groups are there?
    trainer   ◀─ Pulled(...) + buffers ────────── generator          the answer to each of these
    trainer   ── Release(keys) ─────────────────▶ generator          trained and covered, or superseded: forget them
    trainer   ── WeightsReady(version, ...) ────▶ generator          a version is whole, or (collective): meet
    generator ── WeightsPull(version, bucket) ──▶ trainer            that bucket please, or (collective): I have joined
    generator ◀─ WeightsPart(...) + buffer ─────── trainer
    generator ── WeightsTaken(version) ─────────▶ trainer            the snapshot may be reused
    generator ── NodeSoon() ────────────────────▶ generators of its node   a version is on its way, or nearly whole
    generator ── NodeVersion(version, ...) ─────▶ generators of its node   a version is whole in memory that you can see
    generator ── NodeReturned(version) ─────────▶ generator          I don't read it any more
    generator ── Salvaged(groups) ──────────────▶ trainer 0          at the start of a resumed run, see `ranks.resume`
    trainer 0 ── Resumption(plan) ──────────────▶ trainers
    trainer 0 ── Covered(...) ──────────────────▶ generators         a checkpoint is durable: forget what it has settled
    all       ── Heartbeat(...) ────────────────▶ next rank of the ring
    trainer   ── StepReport(step, ...) ─────────▶ trainer 0          its part of a line of metrics
    trainer 0 ── CheckpointBegin(step) ─────────▶ trainers           the folder is there, write your part
    trainer   ── CheckpointPart(step, ledger) ──▶ trainer 0          my files are written; my ledger's state
    generator ── Evaluating(...) ───────────────▶ trainers           still at it
    generator ── EvalResult(...) ───────────────▶ trainer 0
    trainer 0 ── Stop(stage) ───────────────────▶ all                the cascade at the end, see `ranks.shutdown`
    generator ── Bye(stage) ────────────────────▶ trainer 0          (an exchange alone: all ▶ rank 0 ▶ all)

Structs are msgpack arrays tagged by name, checked against their types when decoded; bulk data travels behind them as
raw buffers. Nothing is ever unpickled. Ranks in messages are ranks of the job's own communicator.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

Key = int | str | tuple[int, ...]
"""Names a group of samples; those of trajectories are (ticket, attempt)."""


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of all messages."""


class TicketGrant(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The right, and the duty, to produce one group."""

    ticket: int
    attempt: int
    min_version: int
    """The oldest version any token of the group may be sampled with."""


class SampleMeta(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What the ledger learns of a finished sample; the data stays with its owner until it is pulled."""

    ticket: int
    sample: int
    attempt: int
    born: int
    """Oldest version among its sampled tokens."""
    prompt_tokens: int
    response_tokens: int
    reward: float
    spans: tuple[tuple[int, int], ...] = ()
    """(version, tokens) of the response, in order; empty when all of it has version `born`."""

    def tokens_since(self, version: int) -> int:
        """Tokens of the response that were sampled with `version` or a newer one."""
        if self.born >= version:
            return self.response_tokens
        return sum(tokens for sampled, tokens in self.spans if sampled >= version)

    def born_since(self, version: int) -> int:
        """The oldest version, from `version` on, of its tokens; `version` itself where there is none."""
        if self.born >= version:
            return self.born
        return min((sampled for sampled, _ in self.spans if sampled >= version), default=version)


class GeneratorCounters(msgspec.Struct, frozen=True, array_like=True):
    """Running totals of a generator since its start; they ride on `Finished`."""

    generated_tokens: int
    finished_samples: int
    reward_sum: float
    busy_s: float
    """Time in which it had samples to generate."""
    wall_s: float
    version: int
    """The version held now."""
    kept_bytes: int = 0
    """Memory taken by finished groups now."""
    spilled: int = 0
    """Finished groups that left the memory for the archive before they were trained."""


class Ask(Message, frozen=True):
    room: int
    """How many more groups can be started; adds to what was asked for before."""


class Grants(Message, frozen=True):
    grants: list[TicketGrant]


class Redirect(Message, frozen=True):
    ledger: int
    """Index (not rank) of a ledger that has numbers left."""
    room: int


class Started(Message, frozen=True):
    starts: list[tuple[int, int, int]]
    """(ticket, attempt, version that samples its first token)."""


class Finished(Message, frozen=True):
    samples: list[SampleMeta]
    counters: GeneratorCounters
    left_out: list[tuple[int, int, int]] = []
    """(ticket, sample, attempt) of samples that end without data, since their groups were cut without keeping them."""


class Failed(Message, frozen=True):
    ticket: int
    attempt: int
    reason: str
    """A short word for the metrics, for instance `reward_raised`."""
    text: str
    """The error as it was."""


class Returned(Message, frozen=True):
    """Groups that were granted and not begun; their tickets go to others."""

    tickets: list[tuple[int, int]]
    """(ticket, attempt)."""


class Cut(Message, frozen=True):
    """These groups hold up a step: end them now. Answered by `Finished`, `Failed`, or, for groups without a token, by
    `Returned`."""

    tickets: list[tuple[int, int]]
    """(ticket, attempt)."""
    keep: bool
    """True: the unfinished samples end as they are, truncated. False: they are left out."""


class Late(Message, frozen=True):
    """A step waits for these groups, or goes on without them: for the generator's measure of its speed."""

    tickets: list[tuple[int, int]]
    """(ticket, attempt)."""


class Dropped(Message, frozen=True):
    """These groups are given up by their ledger: stop sampling them, forget their data."""

    tickets: list[tuple[int, int]]
    """(ticket, attempt)."""


class Forgotten(Message, frozen=True):
    """The generator was taken for lost: what it had asked for here is forgotten."""

    room: int
    """How many asks that were."""


class Silence(Message, frozen=True):
    """From whoever watches a generator's heartbeats, to every trainer."""

    rank: int
    over: bool
    """False: the generator is taken for lost. True: it is heard again."""


class RoundPart(Message, frozen=True):
    round: int
    hop: int
    parts: list[tuple[int, bytes]]
    """(ledger index, its encoded contribution)."""


class Progress(Message, frozen=True):
    """What has changed at a ledger since the last round, in which others may wait for it."""

    round: int
    """The next round."""
    standing: bytes
    """An encoded `ranks.forming.Standing`."""


class Pull(Message, frozen=True):
    request: int
    keys: Sequence[Key]
    schema: str
    """`Schema.fingerprint` of the consumer."""
    fields: list[str] | None = None
    """None means all."""
    rows: list[int] | None = None
    """Which samples of every group, by their places; None means all."""


class Consume(Message, frozen=True):
    """Give me groups that nobody has got under this name."""

    request: int
    consumer: str
    """Ranks that use the same name share the groups among them."""
    count: int
    """Most groups."""
    partition: str
    schema: str
    fields: list[str] | None = None
    after: str | None = None
    """Only groups that were given out under this other name."""
    patience_s: float = 0.0
    """How long to wait for a group before the answer holds none."""


class Browse(Message, frozen=True):
    """Which groups do you keep? Answered by groups that are empty."""

    request: int
    schema: str
    partition: str | None = None
    """None means all."""


class Pulled(Message, frozen=True):
    """Answer to `Pull`, `Consume` and `Browse`."""

    request: int
    header: bytes
    """Keys, lengths, and what is small; the other columns follow as buffers."""
    error: str | None = None
    schema: bytes = b""
    """The owner's schema, encoded, where the consumer has another; there is nothing else then."""
    lost: Sequence[Key] = ()
    """With an error: groups that the owner had, and that can't be read any more."""


class Release(Message, frozen=True):
    keys: Sequence[Key]


class WeightsReady(Message, frozen=True):
    """The sender's share of a version is whole."""

    version: int
    meet: bool
    """True: a collective; the generator's main thread joins it at its next step boundary."""


class WeightsPull(Message, frozen=True):
    """Send me a bucket; or (collective) I have joined the broadcast of this version."""

    version: int
    bucket: int
    """Index of the bucket in the sender's share; 0 in a collective."""
    base: int = -1
    """The version of which I have all bytes, so that what has changed since is enough; -1: none."""


class WeightsPart(Message, frozen=True):
    """One bucket; its bytes travel behind it as one buffer, or as none when there are no bytes, or as the two buffers
    of `comm.delta`: what has changed."""

    version: int
    bucket: int
    buckets: int
    """How many the share has, at least 1; 0 when the sender no longer holds the version."""
    manifest: bytes | None
    """With bucket 0: an encoded `weights.Manifest` (names, dtypes, shapes, checksums of the sender's share)."""
    nbytes: int = 0
    """Length of the bucket, whatever travels."""
    base: int = -1
    """The version since which the buffers tell the changes; -1: they are the bytes themselves."""


class WeightsTaken(Message, frozen=True):
    """The generator needs no more of this version: it has it all, or gave it up."""

    version: int


class NodeShare(msgspec.Struct, frozen=True, array_like=True):
    """Where one trainer's share of a version is: see `comm.shared_memory`."""

    trainer: int
    pid: int
    descriptor: int
    name: str
    nbytes: int
    """Of the segment; the share is at its beginning."""
    manifest: bytes
    """An encoded `weights.Manifest`."""


class NodeSoon(Message, frozen=True):
    """A version is on its way, or nearly whole. It does nothing but end the receiver's nap; the next ones are short."""


class NodeVersion(Message, frozen=True):
    """A version is whole in memory that the receiver can map. It stays as it is until the receiver returns it."""

    version: int
    shares: list[NodeShare]


class NodeReturned(Message, frozen=True):
    """I have loaded this version, or don't want it: I don't look at it any more."""

    version: int
    problem: str = ""
    """Why its memory can't be seen from here, if so."""


class Heartbeat(Message, frozen=True):
    state: str
    """What the main thread is doing."""
    age_s: float
    """For how long."""
    version: int


class StepReport(Message, frozen=True):
    """What one trainer knows of a step that trainer 0 doesn't."""

    step: int
    tickets: dict[str, int]
    """Running totals of its ledger."""
    times: dict[str, float]
    """Seconds: `wait`, `train`, `sync`, `wall`."""
    age_sum: float
    """Sum of the ages, in versions, of the tokens it trained."""
    tokens: int
    """How many those are."""
    counters: dict[int, GeneratorCounters]
    """The newest word of every generator (by rank) that reported to its ledger."""
    ledger: bytes = b""
    """The ledger's state after the step, as msgpack."""


class HeldGroup(msgspec.Struct, frozen=True, array_like=True):
    """A group that a generator has read from the archive, and holds."""

    ticket: int
    attempt: int
    launch: int
    """The launch of the run that made it: 0, 1, …"""
    finished: bool
    """False: it was at work when the run was stopped."""
    born: int
    """Oldest and newest version among its tokens."""
    newest: int
    tokens: int
    """Of the responses."""
    samples: list[SampleMeta]
    """Of a finished group."""


class Salvaged(Message, frozen=True):
    groups: list[HeldGroup]


class Resumption(Message, frozen=True):
    plan: bytes
    """How the run goes on, as msgpack (`ranks.resume.Plan`)."""


class Covered(Message, frozen=True):
    """Tickets that a durable checkpoint has settled: all that were granted by then, but for those that were open."""

    next_numbers: list[int]
    """By ledger: the lowest number that had never been granted."""
    open: list[int]
    """Numbers below that which weren't settled."""


class CheckpointBegin(Message, frozen=True):
    step: int


class CheckpointPart(Message, frozen=True):
    step: int
    ledger: bytes
    """The ledger's state, as msgpack."""


class Hello(Message, frozen=True):
    """Start-up: every rank to rank 0."""

    host: str
    facts: dict[str, str]
    """What must be the same on every rank: hashes of config, data, tokenizer; versions of the software."""
    cores: str = ""
    """Those that it may run on, for instance `0-3,8`."""


class Welcome(Message, frozen=True):
    """Start-up: rank 0's answer to every rank."""

    hosts: list[str]
    start_step: int
    """Optimizer steps already done when the job starts: 0, or those of the checkpoint that is resumed."""
    error: str | None = None
    launch: int = 0
    """How often the run was started before."""
    cores: list[str] = []
    """Of every rank."""


class Evaluating(Message, frozen=True):
    """An evaluation goes on: whoever waits for its end may wait longer."""

    scored: int
    total: int


class EvalResult(Message, frozen=True):
    """One generator's share of an evaluation."""

    label: str
    """`before` or `after`."""
    version: int
    correct: float
    """Sum of the rewards."""
    total: int
    """Number of the tasks."""
    failed: int = 0
    """Tasks whose reward failed; they count as 0."""
    error: str = ""
    """Of the last of them, in one line."""


class Stop(Message, frozen=True):
    """1: no more groups; take in `version`, evaluate if the run is complete, say Bye. 2: leave."""

    stage: int
    complete: bool
    """False when the run was asked to stop and will go on later."""
    version: int
    """The last version of the run."""
    generators: list[int]
    """World ranks of those that share the last evaluation."""


class Bye(Message, frozen=True):
    stage: int
