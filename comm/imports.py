"""Objects that a user names in a config: `package.module:name` or `path/to/file.py:name`."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from headrace.comm.errors import ConfigError, HeadraceError

IMPORTERS = (__file__, importlib.__file__)
"""Files whose frames say nothing of where a user's code failed."""


def is_import_path(name: str) -> bool:
    """Whether the name is a path to an object rather than a name in a registry."""
    return ":" in name


def load_function(path: str, key: str) -> Callable[..., Any]:
    """The function behind `path`; `key` is the config key that named it, for the message.

    Importing a module runs its code: call this only with names that the user wrote into the config.

    Raises:
        ConfigError: the module can't be imported, has no such name, or it can't be called.
    """
    module_name, _, attribute = path.partition(":")
    if not module_name or not attribute:
        raise ConfigError(f"{key}: {path!r} isn't of the form package.module:name or path/to/file.py:name.")
    if module_name.endswith(".py") and not Path(module_name).is_file():
        raise ConfigError(f"{key}: there is no file {module_name} (seen from {Path.cwd()}).")
    try:
        module = _load_file(Path(module_name)) if module_name.endswith(".py") else importlib.import_module(module_name)
    except Exception as error:
        raise ConfigError(f"{key}: importing {module_name} failed: {error_in_short(error)}.") from error
    if not hasattr(module, attribute):
        near = difflib.get_close_matches(attribute, [name for name in vars(module) if name[0] != "_"], n=1)
        raise ConfigError(f"{key}: {module_name} has no {attribute!r}{f'; did you mean {near[0]}?' if near else '.'}")
    function = getattr(module, attribute)
    if not callable(function):
        raise ConfigError(f"{key}: {path} is a {type(function).__name__}; it must be a function.")
    return function  # type: ignore[no-any-return]


def error_in_short(error: BaseException) -> str:
    """An error of a user's code in one line: its type, its message, and where it was raised."""
    message = " ".join(_message(error).split())
    if isinstance(error, HeadraceError):
        return message
    told = f"{type(error).__name__}: {message}"
    frames = traceback.extract_tb(error.__traceback__)
    places = [frame for frame in frames if frame.filename not in IMPORTERS and not frame.filename.startswith("<")]
    if isinstance(error, SyntaxError) or not places:  # a SyntaxError tells its place itself
        return told
    return f"{told} ({places[-1].filename}, line {places[-1].lineno})"


def _message(error: BaseException) -> str:
    """What an error says; half characters, which can't be written anywhere, as their numbers."""
    try:
        return str(error).encode(errors="backslashreplace").decode()
    except Exception as second:
        return f"(its own text can't be made: {type(second).__name__})"


def _load_file(file: Path) -> ModuleType:
    """Import a file by its path, under a name that a child process can find again."""
    name = f"headrace_user_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file.resolve())
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} can't be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
