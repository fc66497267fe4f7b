"""Objects that a user names in a config: `package.module:name` or `path/to/file.py:name`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from headrace.comm.errors import ConfigError


def is_import_path(name: str) -> bool:
    """Whether the name is a path to an object rather than a name in a registry."""
    return ":" in name


def load_object(path: str, key: str) -> Any:
    """The object behind `path`; `key` is the config key that named it, for the message.

    Importing a module runs its code: call this only with names that the user wrote into the config.

    Raises:
        ConfigError: the module can't be imported or has no such name.
    """
    module_name, _, attribute = path.partition(":")
    if not module_name or not attribute:
        raise ConfigError(f"{key}: {path!r} isn't of the form package.module:name or path/to/file.py:name.")
    try:
        module = _load_file(Path(module_name)) if module_name.endswith(".py") else importlib.import_module(module_name)
    except FileNotFoundError:
        raise ConfigError(f"{key}: there is no file {module_name} (seen from {Path.cwd()}).") from None
    except Exception as error:
        raise ConfigError(f"{key}: importing {module_name} failed: {type(error).__name__}: {error}") from error
    if not hasattr(module, attribute):
        raise ConfigError(f"{key}: {module_name} has no {attribute!r}.")
    return getattr(module, attribute)


def _load_file(file: Path) -> ModuleType:
    """Import a file by its path, under a name that a child process can find again."""
    if not file.is_file():
        raise FileNotFoundError(file)
    name = f"headrace_user_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file.resolve())
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} can't be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
