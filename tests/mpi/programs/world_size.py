"""Says what `check_world` says, and ends with status 3 if it refuses."""

from __future__ import annotations

import sys

from mpi4py import MPI

from headrace.comm.errors import HeadraceError
from headrace.comm.mpi import check_world

try:
    check_world(MPI.COMM_WORLD, int(sys.argv[1]) if len(sys.argv) > 1 else None)
except HeadraceError as error:
    print(f"refused: {error}", flush=True)
    sys.exit(3)
