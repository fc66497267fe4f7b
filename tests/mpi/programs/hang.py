"""A rank that waits for ever for a message that nobody sends."""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

MPI.COMM_WORLD.Recv([np.empty(1, np.uint8), MPI.BYTE], MPI.COMM_WORLD.Get_rank(), 99)
