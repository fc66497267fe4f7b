"""A config as YAML with the documentation of every key above it."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

import yaml
from pydantic import BaseModel

WIDTH = 110


def describe_config(config: BaseModel) -> str:
    """YAML that loads back to the same config, each key under its documentation as comment."""
    return "\n".join(_lines(config, 0)) + "\n"


def _lines(section: BaseModel, depth: int) -> Iterator[str]:
    indent = "  " * depth
    values = section.model_dump(mode="json")
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        text = field.description or (type(value).__doc__ if isinstance(value, BaseModel) else None) or ""
        if depth == 0:
            yield ""
        yield from textwrap.wrap(
            " ".join(text.split()), WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# "
        )
        if isinstance(value, BaseModel):
            yield f"{indent}{name}:"
            yield from _lines(value, depth + 1)
        else:
            yield from _value(name, values[name], indent)


def _value(name: str, value: object, indent: str) -> list[str]:
    text = yaml.safe_dump({name: value}, sort_keys=False, allow_unicode=True, width=WIDTH)
    return [indent + line for line in text.rstrip("\n").splitlines()]
