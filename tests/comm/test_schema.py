"""Schemas: what fits them, what doesn't, and what the errors say."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from headrace.comm.columns import gather
from headrace.comm.messages import Key
from headrace.comm.schema import ExchangeError, Field, Schema, fixed, ragged, text

SCHEMA = Schema(
    {
        "tokens": ragged(np.int32),
        "reward": fixed(np.float32),
        "steps": fixed(np.uint8),
        "hidden": ragged("bfloat16", (4,)),
        "pixels": fixed(np.uint8, (2, 2, 3), optional=True),
        "finish": text(optional=True),
    }
)


def sample(**changes: Any) -> dict[str, Any]:
    values = {"tokens": np.arange(3, dtype=np.int32), "reward": 0.5, "steps": 7, "hidden": np.ones((2, 4), np.uint16)}
    return {name: value for name, value in (values | changes).items() if value is not ...}


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"tokens": np.arange(3)}, r"tokens of sample 1 of group 'x' is int64 \[3\]; the schema says int32 \[\*\]"),
        ({"tokens": np.zeros((3, 1), np.int32)}, r"is int32 \[3, 1\]; the schema says int32 \[\*\]"),
        ({"tokens": np.int32(3)}, r"is int32 \[\]; the schema says int32 \[\*\]"),
        ({"tokens": [1, 2]}, r"is of type list; the schema says int32 \[\*\]"),
        (
            {"tokens": ...},
            r"tokens of sample 1 of group 'x' is missing; the schema says int32 \[\*\], and not optional",
        ),
        ({"reward": None}, r"reward of sample 1 of group 'x' is missing"),
        ({"reward": np.float64(1)}, r"reward .* is float64 \[\]; the schema says float32 \[\]"),
        ({"steps": 0.5}, r"steps .* is of type float; the schema says uint8 \[\]"),
        ({"steps": 256}, r"steps .* is of type int; the schema says uint8 \[\]"),
        (
            {"hidden": np.ones((2, 4), np.float32)},
            r"hidden .* bfloat16 \[\*, 4\]. Give its bits, as uint16 of the same",
        ),
        (
            {"hidden": torch.ones(2, 4, dtype=torch.bfloat16)},
            r"is torch.bfloat16 \[2, 4\]; .* Give its bits, as uint16",
        ),
        ({"pixels": np.zeros((2, 2, 4), np.uint8)}, r"is uint8 \[2, 2, 4\]; the schema says uint8 \[2, 2, 3\]"),
        ({"finish": 3}, r"finish .* is of type int; the schema says a text"),
        (
            {"prize": 1.0},
            r"Sample 1 of group 'x' has a field prize, which isn't in the schema; the fields are tokens, ",
        ),
    ],
)
def test_a_value_that_does_not_fit_is_told_with_its_place(changes: dict[str, Any], found: str) -> None:
    with pytest.raises(ExchangeError, match=found):
        gather(SCHEMA, "x", [sample(), sample(**changes)])


def test_torch_tensors_and_plain_numbers_fit() -> None:
    hidden = torch.randn(2, 4).to(torch.bfloat16)
    group = gather(SCHEMA, 1, [sample(tokens=torch.arange(3, dtype=torch.int32), hidden=hidden.view(torch.uint16))])
    assert group["tokens"][0].tolist() == [0, 1, 2]
    assert group["reward"] == [np.float32(0.5)]
    assert torch.equal(torch.from_numpy(group["hidden"][0].copy()).view(torch.bfloat16), hidden)


@pytest.mark.parametrize("key", [True, 1.5, None, (1, "a"), 2**63, b"x"])
def test_a_key_of_another_form_is_refused(key: Any) -> None:
    with pytest.raises(ExchangeError, match="can't be the key of a group"):
        gather(SCHEMA, key, [sample()])


def test_keys_with_names_are_tuples_of_so_many_integers() -> None:
    schema = Schema({"reward": fixed(np.float32)}, key=("ticket", "attempt"))
    assert schema.name(gather(schema, (3, 1), [{"reward": 0.0}]).key) == "ticket 3 attempt 1"
    wrong: list[Key] = [3, (3,), (3, 1, 2), "3 1"]
    for key in wrong:
        with pytest.raises(ExchangeError, match=r"keys are \(ticket, attempt\)"):
            gather(schema, key, [])


@pytest.mark.parametrize("dtype", [object, np.dtype([("a", "i4")]), "U0", "float12"])
def test_a_dtype_that_is_no_plain_number_is_refused(dtype: Any) -> None:
    with pytest.raises(ExchangeError, match="dtype"):
        fixed(dtype)


def test_a_negative_axis_points_to_ragged() -> None:
    with pytest.raises(ExchangeError, match="use `ragged`"):
        fixed(np.int32, (-1, 3))


@pytest.mark.parametrize(
    ("dtype", "told"),
    [(torch.bfloat16, "bfloat16"), ("float8_e4m3fn", "float8_e4m3fn"), (torch.int64, "int64"), (bool, "bool")],
)
def test_a_dtype_may_be_given_as_numpy_and_torch_have_it(dtype: Any, told: str) -> None:
    assert str(ragged(dtype, (2,))) == f"{told} [*, 2]"


def test_the_fingerprint_is_that_of_the_fields_in_any_order() -> None:
    same = Schema(dict(reversed(SCHEMA.fields.items())))
    assert same.fingerprint == SCHEMA.fingerprint
    others: list[Field | None] = [None, ragged(np.int64), fixed(np.int32), ragged(np.int32, (1,)), text()]
    others.append(ragged(np.int32, optional=True))
    seen = {SCHEMA.fingerprint, Schema(SCHEMA.fields, key=("a", "b")).fingerprint}
    for other in others:
        fields = {name: field for name, field in (SCHEMA.fields | {"tokens": other}).items() if field}
        seen.add(Schema(fields).fingerprint)
    assert len(seen) == 2 + len(others)


def test_a_difference_names_each_field_and_both_sides() -> None:
    other = Schema({**SCHEMA.fields, "tokens": ragged(np.int64), "extra": text(optional=True)}, key=("ticket",))
    assert SCHEMA.difference(other.encode()) == (
        "tokens is int64 [*] there and int32 [*] here; extra is a text, optional there and missing here; "
        "keys are (ticket) there and () here"
    )


def test_a_schema_without_fields_is_refused() -> None:
    with pytest.raises(ExchangeError, match="at least one field"):
        Schema({})
