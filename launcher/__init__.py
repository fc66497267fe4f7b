"""From a config file to running ranks: command line, config, MPI, live view, reports.

From Python: `from headrace.launcher import submit_job`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.launcher.python_api import prepare_run, submit_job
    from headrace.launcher.submitit_run import RunError
    from headrace.launcher.summary import RunSummary

__all__ = ["RunError", "RunSummary", "prepare_run", "submit_job"]

PLACES = {"RunError": "submitit_run", "RunSummary": "summary", "prepare_run": "python_api", "submit_job": "python_api"}


def __getattr__(name: str) -> object:
    """Loaded when used: most of this package needs none of it, and submitit is optional."""
    if name not in PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if PLACES[name] == "submitit_run":
        import_module(f"{__name__}.python_api").require_submitit()
    return getattr(import_module(f"{__name__}.{PLACES[name]}"), name)
