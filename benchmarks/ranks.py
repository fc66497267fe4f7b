"""Runs a benchmark's own module on real MPI ranks."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import traceback
from typing import Any

from headrace.launcher.mpi import choose_mpi

LIMIT_S = 600


def parse_options(description: str | None) -> argparse.Namespace:
    """--json, --quick, and --rank-of CASE, by which a benchmark starts itself as the ranks of a case."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    parser.add_argument("--quick", action="store_true", help="one round instead of five")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    return parser.parse_args()


def abort(error: BaseException) -> None:
    """End all ranks: an error of a courier must not leave its main thread waiting."""
    traceback.print_exception(error)
    os._exit(1)


def run_ranks(module: str, ranks: int, *arguments: object) -> Any:
    """Run `python -m MODULE ARGUMENTS` on so many ranks, one torch thread each; returns what one of them printed.

    The module prints one line of JSON, by one rank.

    Raises:
        SystemExit: a rank failed; with what all printed.
    """
    mpi = choose_mpi("auto", os.environ)
    command = [*mpi.command(ranks), sys.executable, "-m", "mpi4py", "-m", module, *map(str, arguments)]
    environment = os.environ | mpi.environment | {"OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    if ended.returncode:
        raise SystemExit(f"{module} ended with status {ended.returncode}:\n{ended.stdout}\n{ended.stderr}")
    return json.loads(ended.stdout)
