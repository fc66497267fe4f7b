"""Algorithms by name: the built-in ones, and a user's own by import path."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Generic, TypeVar, cast

from headrace.comm.errors import ConfigError
from headrace.comm.imports import is_import_path, load_function

F = TypeVar("F", bound=Callable[..., object])


class Registry(Generic[F]):
    """Functions of one kind; `key` is the config key that names one of them, for the messages."""

    def __init__(self, key: str) -> None:
        self.key = key
        self._functions: dict[str, F] = {}

    @property
    def names(self) -> list[str]:
        """The built-in names, and the import paths that were loaded."""
        return sorted(self._functions)

    def register(self, name: str) -> Callable[[F], F]:
        """Decorator: make a function available under `name`."""

        def add(function: F) -> F:
            self._functions[name] = function
            return function

        return add

    def get(self, name: str) -> F:
        """The function called `name`, or the user's own behind the import path `name`, which is loaded only once.

        Raises:
            ConfigError: there is no such name, the import fails, or what it gives can't be called.
        """
        if name not in self._functions:
            if not is_import_path(name):
                raise self._unknown(name)
            self._functions[name] = cast(F, load_function(name, self.key))
        return self._functions[name]

    def _unknown(self, name: str) -> ConfigError:
        nearest = difflib.get_close_matches(name, self.names)
        guess = f" Did you mean {' or '.join(nearest)}?" if nearest else ""
        return ConfigError(
            f"{self.key}: there is no {name!r}.{guess} Known are {', '.join(self.names)}; for one of your own give "
            "package.module:function or path/to/file.py:function."
        )
