"""What each rank of the soak does: producers put groups of random sizes, consumers check every byte of them.

    producer                                        consumer: goes round all producers, again and again
    put, unless it keeps enough ──▶ its store ◀──── consume as `scorer`: tokens, in turns with the other consumers
                                              ◀──── consume as `trainer`, after `scorer`: everything
                                              ◀──── now and then get: some fields of some samples, once more
                                    forgotten ◀──── release
    time is over: put END ────────▶           ◀──── list: nothing but END is left

Each sample carries the checksums of its fields, so that they are checked in the consumer's hands, whichever of them
were asked for. A rank leaves a report in a folder, by which `benchmarks.soak` judges.
"""

from __future__ import annotations

import math
import random
import sys
import time
from array import array
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from headrace.comm.columns import Group, pack_groups
from headrace.comm.messages import Consume, Key, Message, Pulled
from headrace.comm.mpi import MpiTransport
from headrace.comm.sample_exchange import Exchange, ExchangeError, Schema, fixed, ragged, text
from headrace.comm.transport import Buffer, Received

CHECKED = ("tokens", "hidden", "pixels", "reward", "note")
SCHEMA = Schema(
    {
        "tokens": ragged(np.int32),
        "hidden": ragged("bfloat16", (16,)),
        "pixels": ragged(np.uint8, (8, 8, 3), optional=True),
        "reward": fixed(np.float64),
        "note": text(optional=True),
        "samples": fixed(np.int32),
        "checksums": fixed(np.uint64, (len(CHECKED),)),
    }
)
SCORED = ["tokens", "note", "samples", "checksums"]
"""Fields that a scorer reads."""
NAMES = ("scorer", "trainer")
END = "end"
LEAST_BYTES = 1000
POOL_BYTES = 4 << 20
"""Random bytes of which a producer cuts its samples."""
HELD_GROUPS = 64
"""A producer keeps no more groups, nor more bytes than the largest group has."""
LOOK_S = 1.0
"""How often a rank looks at its memory, at the most."""
WINDOWS = 4
"""Parts of the run in which the memory's peaks are compared."""
MOST_COMPLAINTS = 3
NAP_S = 0.02


class Plan(msgspec.Struct, frozen=True):
    """What the soak is to be."""

    folder: str
    """Of the reports."""
    seconds: float
    producers: int
    """Ranks from 0; the others consume."""
    most_bytes: int
    """Of the largest group."""
    patience_s: float
    """How long consumers may take for what is left at the end."""
    fault: str = ""
    """One of `FAULTS`: what goes wrong, so that it can be seen that the soak notices."""


class Report(msgspec.Struct):
    """What a rank has done."""

    rank: int
    groups: int = 0
    """Put, or consumed as `trainer`."""
    bytes: int = 0
    seconds: float = 0.0
    taken: dict[str, dict[int, Sequence[int]]] = {}
    """Name → producer → the numbers of the groups that came."""
    peaks: list[int] = []
    """Most bytes of memory of its own in each of `WINDOWS`."""
    shared: int = 0
    """Most bytes of libraries, which ranks share, at any time."""
    complaints: list[str] = []


def report_file(folder: str, rank: int) -> Path:
    return Path(folder) / f"rank_{rank:03d}.json"


class Clock:
    """Tells a rank when its time is over, and watches its memory meanwhile."""

    def __init__(self, seconds: float, report: Report) -> None:
        self.begun = time.monotonic()
        self.seconds = seconds
        self._report = report
        self._looked, self._window = -math.inf, 0
        report.peaks = [0] * WINDOWS

    def passed(self) -> float:
        """Seconds."""
        now = time.monotonic()
        if now - self._looked > min(LOOK_S, self.seconds / 50):
            self._looked = now
            self._look(now - self.begun)
        return now - self.begun

    @property
    def over(self) -> bool:
        return self.passed() > self.seconds

    def _look(self, passed: float) -> None:
        own, shared = _memory()
        self._report.shared = max(self._report.shared, shared)
        window = min(int(passed / self.seconds * WINDOWS), WINDOWS - 1)
        for each in range(self._window, window + 1):  # a call may last longer than a window
            self._report.peaks[each] = max(self._report.peaks[each], own)
        self._window = window


def _memory() -> tuple[int, int]:
    """Bytes of memory of this process alone, that which is shared by messages included, and of libraries."""
    lines = dict(line.split()[:2] for line in Path("/proc/self/status").read_text().splitlines() if "kB" in line)
    own, sent, libraries = (int(lines[name]) << 10 for name in ("RssAnon:", "RssShmem:", "RssFile:"))
    return own + sent, libraries


def checksum(key: Key, row: int, name: str, value: Any) -> int:
    """Of one field of one sample, and of its place."""
    array = value is not None and not isinstance(value, str)
    told = (value.dtype.str, value.shape) if array else value
    summed = xxhash.xxh3_64(repr((key, row, name, told)).encode())
    if array:
        summed.update(np.ravel(value).view(np.uint8).data)
    return int(summed.intdigest())


class Maker:
    """Makes groups of random samples."""

    def __init__(self, rank: int, most_bytes: int) -> None:
        self.rng = random.Random(rank)
        self._most = most_bytes
        self._pool = np.random.default_rng(rank).integers(0, 256, POOL_BYTES, np.uint8)

    def size(self) -> float:
        """Of a group, in bytes: all orders of magnitude are as likely."""
        return math.exp(self.rng.uniform(math.log(LEAST_BYTES), math.log(self._most)))

    def group(self, key: Key, nbytes: float) -> list[dict[str, Any]]:
        """Samples of unequal sizes, together of about so many bytes."""
        count = math.ceil(nbytes / POOL_BYTES) + self.rng.randrange(8)
        weights = [self.rng.uniform(0.5, 1.5) for _ in range(count)] or [1.0]
        return [self._sample(key, row, nbytes * w / sum(weights), len(weights)) for row, w in enumerate(weights)]

    def _sample(self, key: Key, row: int, nbytes: float, samples: int) -> dict[str, Any]:
        pixels = self._piece(nbytes * 5 / 8, np.uint8, (8, 8, 3)) if self.rng.random() < 0.7 else None
        sample: dict[str, Any] = {
            "tokens": self._piece(nbytes / 8, np.int32, ()),
            "hidden": self._piece(nbytes / 4 if pixels is not None else nbytes * 7 / 8, np.uint16, (16,)),
            "pixels": pixels,
            "reward": np.float64(self.rng.random()),
            "note": f"ä{self.rng.randrange(10**6)}" if self.rng.random() < 0.5 else None,
            "samples": samples,
        }
        sums = [checksum(key, row, name, sample[name]) for name in CHECKED]
        return sample | {"checksums": np.array(sums, np.uint64)}

    def _piece(self, nbytes: float, dtype: Any, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        row = math.prod(shape) * np.dtype(dtype).itemsize
        size = int(min(nbytes, POOL_BYTES)) // row * row
        start = self.rng.randrange(0, POOL_BYTES - size + 1, 4)
        return self._pool[start : start + size].view(dtype).reshape(-1, *shape)


def produce(exchange: Exchange, plan: Plan, report: Report, clock: Clock) -> None:
    """The first group is the largest there is, so that memory has its full size early."""
    maker = Maker(exchange.rank, plan.most_bytes)
    while not clock.over:
        key = (exchange.rank, report.groups)
        samples = maker.group(key, maker.size() if report.groups else plan.most_bytes)
        nbytes = sum(value.nbytes for sample in samples for value in sample.values() if isinstance(value, np.ndarray))
        while not _room(exchange, nbytes, plan.most_bytes):
            if clock.over:
                break
            time.sleep(NAP_S)
        else:
            exchange.put(key, samples)
            report.groups += 1
            report.bytes += nbytes
    exchange.put(END, [], partition=END)
    report.seconds = clock.passed()


def _room(exchange: Exchange, nbytes: int, most_bytes: int) -> bool:
    kept = exchange.statistics()
    return kept.groups == 0 or (kept.groups < HELD_GROUPS and kept.bytes + nbytes <= most_bytes)


class Consumer:
    """One rank that reads from all producers."""

    def __init__(self, exchange: Exchange, plan: Plan, report: Report, clock: Clock) -> None:
        self._exchange, self._plan, self._report, self._clock = exchange, plan, report, clock
        self._rng = random.Random(exchange.rank)
        self._taken: dict[str, dict[int, array[int]]] = {name: defaultdict(lambda: array("q")) for name in NAMES}
        report.taken = self._taken  # type: ignore[assignment]
        self._kept: list[Buffer] = []
        """By the fault `leak`."""

    def run(self) -> None:
        left = list(range(self._plan.producers))
        while left:
            for owner in self._rng.sample(left, len(left)):
                if not self._turn(owner) and self._clock.over and self._exchange.list(owner) == [END]:
                    left.remove(owner)
            if self._clock.passed() > self._clock.seconds + self._plan.patience_s:
                self._complain_of_rest(left)
                break
        self._report.seconds = self._clock.passed()

    def _complain_of_rest(self, owners: Iterable[int]) -> None:
        for owner in owners:
            rest = [key for key in self._exchange.list(owner) if key != END]
            if rest:
                self._complain(
                    f"{self._plan.patience_s:g} s after the end producer {owner} still keeps {SCHEMA.names(rest)}."
                )

    def _turn(self, owner: int) -> int:
        """Read what one producer has; returns how many groups that was."""
        exchange, rng = self._exchange, self._rng
        wait_s = rng.choice((0.0, 0.0, NAP_S))
        scored = exchange.consume(owner, "scorer", rng.randint(1, 4), SCORED, wait_s=wait_s)
        self._count("scorer", owner, scored)
        self._check_all(owner, scored.values())
        groups = exchange.consume(owner, "trainer", rng.randint(1, 4), after="scorer")
        self._count("trainer", owner, groups)
        self._check_all(owner, groups.values())
        self._report.groups += len(groups)
        self._report.bytes += sum(group.nbytes for group in groups.values())
        if groups and rng.random() < 0.1:
            self._read_again(owner, rng.choice([*groups.values()]))
        exchange.release(owner, groups)
        if self._plan.fault == "leak":
            lack = int(self._clock.passed() * LEAK_BYTES_PER_S) - sum(each.nbytes for each in self._kept)
            self._kept.append(np.ones(max(0, lack), np.uint8))
        return len(scored) + len(groups)

    def _count(self, name: str, owner: int, keys: Iterable[Any]) -> None:
        for producer, number in keys:
            self._taken[name][producer].append(number)
            if producer != owner:
                self._complain(f"Producer {owner} gave group {number} of producer {producer}.")

    def _check_all(self, owner: int, groups: Iterable[Group[Key]]) -> None:
        for group in groups:
            if any(count != len(group) for count in group["samples"]) or not len(group):
                self._complain(f"{SCHEMA.name(group.key)} of producer {owner} came with {len(group)} samples.")
            for row, sample in enumerate(group):
                self._check(owner, group.key, row, sample)

    def _check(self, owner: int, key: Key, row: int, sample: dict[str, Any]) -> None:
        for name, sent in zip(CHECKED, sample["checksums"].tolist(), strict=True):
            if name in sample and checksum(key, row, name, sample[name]) != sent:
                self._complain(
                    f"Field {name} of sample {row} of {SCHEMA.name(key)} of producer {owner} is corrupted: its "
                    "checksum in the consumer's hands isn't that of its producer."
                )

    def _read_again(self, owner: int, group: Group[Key]) -> None:
        """Some samples, in any order, and some fields of a group that hasn't been released."""
        rows = self._rng.sample(range(len(group)), self._rng.randint(1, len(group)))
        fields = [*self._rng.sample(CHECKED, 2), "checksums"]
        try:
            again = self._exchange.get(owner, [group.key], fields, rows)[group.key]
        except ExchangeError as error:
            self._complain(f"{SCHEMA.name(group.key)}, which nobody has released, can't be read again. {error}")
            return
        for row, sample in zip(rows, again, strict=True):
            self._check(owner, group.key, row, sample)

    def _complain(self, sentence: str) -> None:
        if len(self._report.complaints) < MOST_COMPLAINTS:
            self._report.complaints.append(f"Rank {self._exchange.rank}: {sentence}")


FAULTS = ("corrupt", "lose", "repeat", "leak")
LEAK_BYTES_PER_S = 150e6
FAULT_AT = 5
"""The answer to a trainer that goes wrong, of producer 0."""


class FaultyTransport(MpiTransport):
    """Spoils one answer: a byte of it is changed, its groups are left out, or it is the one before once more."""

    fault = ""

    def __init__(self, comm: Any) -> None:
        super().__init__(comm)
        self._asked: set[tuple[int, int]] = set()
        """Consumer and number of a trainer's questions."""
        self._answers: list[tuple[bytes, Sequence[Buffer]]] = []

    def poll(self) -> list[Received]:
        arrived = super().poll()
        for each in arrived:
            if isinstance(each.message, Consume) and each.message.consumer == "trainer":
                self._asked.add((each.source, each.message.request))
        return arrived

    def send(self, target: int, message: Message, buffers: Sequence[Buffer] = ()) -> None:
        if isinstance(message, Pulled) and buffers and (target, message.request) in self._asked:
            self._answers.append((message.header, buffers))
            if len(self._answers) == FAULT_AT:
                header, buffers = self._spoilt(message.header, buffers)
                message = Pulled(message.request, header)
        super().send(target, message, buffers)

    def _spoilt(self, header: bytes, buffers: Sequence[Buffer]) -> tuple[bytes, Sequence[Buffer]]:
        match self.fault:
            case "corrupt":
                changed = buffers[-1].copy()
                changed[changed.size // 2] ^= 1
                return header, [*buffers[:-1], changed]
            case "lose":
                return pack_groups(SCHEMA, [])
            case "repeat":
                return self._answers[-2]
        return header, buffers


def main(plan: Plan) -> None:
    """What each rank runs."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Dup()
    spoils = plan.fault and comm.Get_rank() == 0
    FaultyTransport.fault = plan.fault
    with Exchange.over(FaultyTransport(comm) if spoils else MpiTransport(comm), SCHEMA) as exchange:
        report = Report(exchange.rank)
        clock = Clock(plan.seconds, report)
        if exchange.rank < plan.producers:
            produce(exchange, plan, report, clock)
        else:
            Consumer(exchange, plan, report, clock).run()
        report_file(plan.folder, exchange.rank).write_bytes(msgspec.json.encode(report, enc_hook=list))


if __name__ == "__main__":
    main(msgspec.json.decode(sys.argv[1], type=Plan))
