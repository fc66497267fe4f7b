"""Mistakes in a config, told in one paragraph: which key, what was expected, which name was meant."""

from __future__ import annotations

import difflib
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

WORDS = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "a text",
    "path_type": "a path",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a section with keys",
    "model_type": "a section with keys",
    "too_short": "a list of {min_length} or more values",
    "too_long": "a list of at most {max_length} values",
    "greater_than_equal": "{ge:g} or more",
    "greater_than": "more than {gt:g}",
    "less_than_equal": "{le:g} or less",
    "less_than": "less than {lt:g}",
    "literal_error": "{expected}",
}
"""What a value must be, by pydantic's type of error; its own texts speak of inputs, strings and parsing."""


def describe_mistakes(error: ValidationError, model: type[BaseModel], source: str) -> str:
    """One paragraph for all errors of a validation of `model`; `source` is where the values came from."""
    mistakes = [_describe(mistake, model) for mistake in error.errors()]
    count = f"{len(mistakes)} mistakes: " if len(mistakes) > 1 else ""
    return f"{source}: {count}{'; '.join(mistakes)}."


def _describe(mistake: Mapping[str, Any], model: type[BaseModel]) -> str:
    path = ".".join(str(part) for part in mistake["loc"])
    match mistake["type"]:
        case "extra_forbidden":
            return f"unknown key `{path}`{_suggestion(mistake['loc'], model)}"
        case "missing":
            return f"`{path}` is missing"
        case "value_error":
            return str(mistake["ctx"]["error"])
        case _:
            return f"`{path}` must {_expected(mistake)}, but {_found(mistake['input'])}"


def _expected(mistake: Mapping[str, Any]) -> str:
    """What a value must be, as the end of a sentence with "must"."""
    context = mistake.get("ctx", {})
    kind = WORDS.get(mistake["type"])
    if kind is not None:
        return f"be {kind.format(**context)}"
    if mistake["type"] == "string_pattern_mismatch":
        return f"match {context['pattern']}"
    return "be " + str(mistake["msg"]).removeprefix("Input should be ").partition(", ")[0]


def _found(value: object) -> str:
    """What is there, as the end of a sentence with "but"."""
    if value is None:
        return "is empty"
    if isinstance(value, dict) and value:
        return f"is a section with the keys {', '.join(map(str, value))}"
    return f"is {value!r}"


def _suggestion(location: tuple[str | int, ...], model: type[BaseModel]) -> str:
    """The nearest existing name: in the same section, or a key of the same name in another one."""
    *above, wrong = (str(part) for part in location)
    section = section_at(model, above)
    near = difflib.get_close_matches(wrong, section.model_fields if section else (), n=1)
    if near:
        return f" (did you mean `{'.'.join([*above, near[0]])}`?)"
    everywhere = {path.rpartition(".")[2]: path for path in reversed(list(key_paths(model)))}
    near = difflib.get_close_matches(wrong, everywhere, n=1, cutoff=0.8)
    if near:
        return f" (did you mean `{everywhere[near[0]]}`?)"
    return f" (known here: {', '.join(section.model_fields)})" if section else ""


def section_at(model: type[BaseModel], path: list[str]) -> type[BaseModel] | None:
    """The section that the keys in `path` lead to, if they lead to one."""
    for key in path:
        field = model.model_fields.get(key)
        section = section_of(field.annotation) if field else None
        if section is None:
            return None
        model = section
    return model


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The section in an annotation such as `Section` or `Section | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        return next(filter(None, map(section_of, typing.get_args(annotation))), None)
    return None


def key_paths(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every key of the config as a dotted path, sections first."""
    for name, field in model.model_fields.items():
        yield prefix + name
        if section := section_of(field.annotation):
            yield from key_paths(section, f"{prefix}{name}.")
