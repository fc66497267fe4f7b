"""Prompts and answers of every step, for people to read: `samples.jsonl` in the run folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import chain, islice, zip_longest
from pathlib import Path

from headrace.comm.trajectory import Trajectory
from headrace.ranks.metrics import cut_after


class SampleLog:
    """Appends a few samples of every step; trainer 0 has one."""

    def __init__(self, folder: Path, start_step: int, keep: int) -> None:
        path = folder / "samples.jsonl"
        cut_after(path, start_step)
        self._file = path.open("a", encoding="utf-8")
        self._keep = keep

    def write(self, step: int, groups: Sequence[Sequence[Trajectory]]) -> None:
        """Write the first `keep` samples, taken from as many groups as possible."""
        one_of_each = filter(None, chain.from_iterable(zip_longest(*groups)))
        for sample in islice(one_of_each, self._keep):
            ticket, index, attempt = sample.unit
            line = {
                "step": step,
                "ticket": ticket,
                "sample": index,
                "attempt": attempt,
                "reward": sample.reward,
                "born": sample.born,
                "newest": int(sample.versions.max()),
                "finish": sample.finish,
                "prompt": sample.prompt_text,
                "response": sample.response_text,
            }
            self._file.write(json.dumps(line, ensure_ascii=False) + "\n")
        self._file.flush()
