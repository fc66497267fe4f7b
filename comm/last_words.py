"""What a rank prints before it aborts the job must have left it: a launcher that learns of the abort before it has read
the rank's output throws that output away, as Hydra (MPICH's) does when it had no time to read for a moment."""

from __future__ import annotations

import fcntl
import os
import stat
import struct
import termios
import time
from collections.abc import Iterable
from typing import TextIO

READ_LIMIT_S = 5.0
"""So long a launcher is waited for that doesn't read."""
NAP_S = 0.005
FORWARD_S = 0.1
"""From the launcher's process on this node to the one that the user started."""


def wait_until_read(streams: Iterable[TextIO]) -> None:
    """Flush the streams, and return when the other ends of those that are pipes have read all, or after the limit."""
    streams = list(streams)
    for stream in streams:
        stream.flush()
    pipes = [stream.fileno() for stream in streams if stat.S_ISFIFO(os.fstat(stream.fileno()).st_mode)]
    deadline = time.monotonic() + READ_LIMIT_S
    while any(_unread(pipe) for pipe in pipes) and time.monotonic() < deadline:
        time.sleep(NAP_S)
    time.sleep(FORWARD_S)


def _unread(pipe: int) -> int:
    """Bytes in a pipe; Linux tells them at either end."""
    return struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)))[0]  # type: ignore[no-any-return]
