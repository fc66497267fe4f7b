"""The journal of a run: which groups each optimizer step has trained, and the ledgers after it.

    trainer 0:  begin ─▶ trained(step) … covered(step) … trained(step) … end
                archive/journal.jsonl: one object per launch of the run and per step since the newest checkpoint

With the groups themselves in the archive, the steps since the checkpoint can be trained again as they were, and the
ledgers go on from where they stood after the last of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from headrace.comm.files import disk_errors, write_whole
from headrace.comm.messages import StepReport
from headrace.ranks.tickets import FormedGroup, LedgerState

JOURNAL = "journal.jsonl"


class Began(msgspec.Struct, frozen=True, tag=True):
    """The run went on from here; what earlier launches did later is void."""

    launch: int
    """0, 1, …: how often the run was started before."""
    step: int
    """Optimizer steps done."""


class Trained(msgspec.Struct, frozen=True, tag=True):
    """One optimizer step."""

    step: int
    groups: list[FormedGroup]
    """Its batch, ordered by ticket."""
    ledgers: list[LedgerState]
    """After it, by index."""


@dataclass(frozen=True, slots=True)
class Journal:
    """What a journal says."""

    launches: dict[int, int] = field(default_factory=dict)
    """Launch → the step from which it went on."""
    steps: dict[int, Trained] = field(default_factory=dict)

    def oldest_begin_after(self, launch: int) -> int | None:
        """What was sampled in `launch` by versions newer than this belongs to steps that were undone; None: nothing."""
        return min((step for later, step in self.launches.items() if later > launch), default=None)


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Began | Trained)


def read_journal(path: Path) -> Journal:
    """The journal up to the first line that isn't whole; an empty one if there is none."""
    journal = Journal()
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    for text in lines:
        try:
            line = _decoder.decode(text)
        except msgspec.DecodeError:
            break
        if isinstance(line, Trained):
            journal.steps[line.step] = line
            continue
        journal.launches[line.launch] = line.step
        for step in [step for step in journal.steps if step >= line.step]:
            del journal.steps[step]
    return journal


class JournalWriter:
    """Trainer 0's journal. A thread of its own writes, so that neither main thread nor courier waits for the disk."""

    def __init__(
        self,
        path: Path,
        launch: int,
        step: int,
        on_error: Callable[[BaseException], None],
        say: Callable[[str], None],
    ) -> None:
        """Go on with the journal from `step`, in this launch; when this returns, that is on the disk. `say` takes a
        sentence when the disk fails later: the run goes on, but the steps since can't be repeated as they were.

        Raises:
            HeadraceError: the disk fails now.
        """
        self._path = path
        self._on_error = on_error
        self._say = say
        self._works = True
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="journal")
        remedy = "Free some space or mend the permissions there, or go without it by checkpoint.archive: false."
        with disk_errors(f"The journal {path}", path, remedy):
            self._begin(launch, step)

    def trained(self, step: int, groups: Sequence[FormedGroup], reports: Sequence[StepReport]) -> None:
        """A step has ended on all ledgers; `reports` by their index."""
        self._submit(lambda: self._append(Trained(step, list(groups), [state_of(report) for report in reports])))

    def covered(self, step: int) -> None:
        """A durable checkpoint holds the first `step` optimizer steps: they needn't be repeated."""
        self._submit(lambda: self._forget(step))

    def close(self) -> None:
        """Returns when all is written."""
        self._thread.shutdown()

    def _begin(self, launch: int, step: int) -> None:
        journal = read_journal(self._path)
        kept = [line for line in journal.steps.values() if line.step < step]
        begins = [Began(*pair) for pair in journal.launches.items()]
        self._path.parent.mkdir(exist_ok=True)
        self._rewrite([*begins, *kept, Began(launch, step)])

    def _forget(self, step: int) -> None:
        journal = read_journal(self._path)
        begins = [Began(*pair) for pair in journal.launches.items()]
        self._rewrite([*begins, *(line for line in journal.steps.values() if line.step >= step)])

    def _rewrite(self, lines: Iterable[Began | Trained]) -> None:
        write_whole(self._path, b"".join(_encoder.encode(line) + b"\n" for line in lines), durable=True)

    def _append(self, line: Trained) -> None:
        with self._path.open("ab") as file:
            file.write(_encoder.encode(line) + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def _submit(self, action: Callable[[], None]) -> None:
        self._thread.submit(action).add_done_callback(self._ended)

    def _ended(self, future: Future[None]) -> None:
        error = future.exception()
        if isinstance(error, OSError):
            if self._works:
                self._say(f"The journal {self._path} can't be written ({error.strerror}). The run goes on without it.")
        elif error is not None:
            self._on_error(error)
        self._works = error is None


def state_of(report: StepReport) -> LedgerState:
    """The ledger after the step."""
    return msgspec.msgpack.decode(report.ledger, type=LedgerState)
