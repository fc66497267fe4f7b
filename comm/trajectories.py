"""Trajectories in the sample exchange: their schema, and groups of them as the training side knows them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from headrace.comm.columns import Group, Take, fresh, gather, unpack_groups
from headrace.comm.schema import ExchangeError, Schema, fixed, ragged, text
from headrace.comm.spilling import SpillingStore
from headrace.comm.trajectory import Trajectory, Unit
from headrace.comm.transport import Buffer

GroupKey = tuple[int, int]
"""(ticket, attempt)."""

COLUMN_DTYPES: dict[str, np.dtype[Any]] = {
    "tokens": np.dtype(np.int32),
    "loss_mask": np.dtype(np.uint8),
    "logprobs": np.dtype(np.float32),
    "versions": np.dtype(np.int32),
}
"""The columns of a trajectory: one row per token."""

ALWAYS = ("sample", "reward", "finish")
"""Without these, nothing is a trajectory."""

TEXTS = ("prompt_text", "response_text")

TRAJECTORY = Schema(
    {name: ragged(dtype) for name, dtype in COLUMN_DTYPES.items()}
    | {name: text() for name in TEXTS}
    | {"sample": fixed(np.int64), "reward": fixed(np.float64), "finish": text()},
    key=("ticket", "attempt"),
)


class TrajectoryStore(SpillingStore[GroupKey]):
    """The finished groups of one generator. `memory_bytes`: see `SpillingStore`."""

    def __init__(self, memory_bytes: float | None = None) -> None:
        super().__init__(TRAJECTORY, memory_bytes)

    def put(self, ticket: int, attempt: int, trajectories: Sequence[Trajectory]) -> int:
        """Keep the samples of one group, copied into contiguous columns; returns the bytes of these.

        Raises:
            ExchangeError: the group is there already, or a sample doesn't fit the schema or the group.
        """
        group = make_group(ticket, attempt, trajectories, self.room)
        self.add(group)
        return group.nbytes

    def get(self, keys: Iterable[GroupKey], fields: Sequence[str] | None = None) -> dict[GroupKey, list[Trajectory]]:
        """The samples of groups; their columns are read-only views. A field that wasn't asked for is empty.

        Raises:
            ExchangeError: a group isn't here, or there is no such field.
        """
        return trajectories_by_key(self.select(keys, needed(fields)))


def needed(fields: Sequence[str] | None) -> list[str] | None:
    """What to ask for, to have trajectories with these fields."""
    return None if fields is None else [*fields, *ALWAYS]


def make_group(ticket: int, attempt: int, trajectories: Sequence[Trajectory], take: Take = fresh) -> Group[GroupKey]:
    """Copy trajectories into read-only columns, in memory that `take` gives.

    Raises:
        ExchangeError: a trajectory is of another group, a column of another dtype, or their lengths differ.
    """
    key = (ticket, attempt)
    group = gather(TRAJECTORY, key, [_fields(key, item) for item in trajectories], take)
    _check_lengths(group)
    return group


def trajectories_of(group: Group[Any]) -> list[Trajectory]:
    """The samples of a group as views of its columns; columns that it lacks are arrays of length 0, texts empty.

    Raises:
        ExchangeError: it lacks one of `ALWAYS`, or its columns disagree about the lengths.
    """
    missing = [name for name in ALWAYS if name not in group.fields]
    if missing:
        raise ExchangeError(f"{TRAJECTORY.name(group.key)} came without {', '.join(missing)}.")
    _check_lengths(group)
    columns = [_rows(group, name) for name in COLUMN_DTYPES]
    texts = [group.texts.get(name, [""] * group.samples) for name in TEXTS]
    ticket, attempt = group.key
    once = zip(*(group[name] for name in ALWAYS), strict=True)
    return [
        Trajectory(
            Unit(ticket, int(sample), attempt),
            **dict(zip(COLUMN_DTYPES, per_token, strict=True)),
            reward=float(reward),
            finish=finish,
            prompt_text=prompt,
            response_text=response,
        )
        for (sample, reward, finish), per_token, prompt, response in zip(
            once, zip(*columns, strict=True), *texts, strict=True
        )
    ]


def trajectories_by_key(groups: Mapping[Any, Group[Any]]) -> dict[GroupKey, list[Trajectory]]:
    """The same of several groups."""
    return {key: trajectories_of(group) for key, group in groups.items()}


def unpack_trajectories(header: bytes, buffers: Sequence[Buffer]) -> dict[GroupKey, list[Trajectory]]:
    """The trajectories of what `pack_groups` made; their columns are views of the buffers.

    Raises:
        ExchangeError: header and buffers don't fit the schema or each other.
    """
    return trajectories_by_key(unpack_groups(TRAJECTORY, header, buffers))


def _fields(key: GroupKey, item: Trajectory) -> dict[str, Any]:
    if (item.unit.ticket, item.unit.attempt) != key:
        raise ExchangeError(f"{item.unit} can't be stored in the group of {TRAJECTORY.name(key)}.")
    values = {name: getattr(item, name) for name in (*COLUMN_DTYPES, *TEXTS, "finish")}
    return values | {"sample": item.unit.sample, "reward": float(item.reward)}


def _check_lengths(group: Group[Any]) -> None:
    """All columns have one row per token."""
    lengths = {name: column.lengths for name, column in group.columns.items() if name in COLUMN_DTYPES}
    for name, each in lengths.items():
        first, expected = next(iter(lengths.items()))
        if each != expected:
            index = next(i for i, pair in enumerate(zip(each, expected, strict=True)) if pair[0] != pair[1])
            raise ExchangeError(
                f"Field {name} of sample {index} of {TRAJECTORY.name(group.key)} has {each[index]} rows for "
                f"{expected[index]} {first}."
            )


def _rows(group: Group[Any], name: str) -> list[Any]:
    if name in group.columns:
        return group[name]
    return [np.empty(0, COLUMN_DTYPES[name])] * group.samples
