"""Signals that ask the launcher to end the run: caught from its first moment to its last."""

from __future__ import annotations

import signal
from contextlib import AbstractContextManager
from types import FrameType, TracebackType
from typing import Any

from typing_extensions import Self

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)
"""SIGUSR2 is what a batch script passes on when its time limit comes near."""


class Stopped(BaseException):
    """The launcher was asked to end before any rank ran. No mistake, so no error that somebody might catch."""


class StopRequest(AbstractContextManager["StopRequest"]):
    """Whether somebody has asked for an end, and whether twice, which means at once.

    SIGTERM after SIGUSR2 isn't a second wish: so Slurm pre-empts, first the warning, then the end of the grace time.
    """

    def __init__(self) -> None:
        self.signum: int | None = None
        """The first signal."""
        self.at_once = False
        self.raises = True
        """Whether the first signal raises `Stopped`: as long as there are no ranks that have to be asked."""
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._take) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _take(self, signum: int, _: FrameType | None) -> None:
        if self.signum is None:
            self.signum = signum
            if self.raises:
                raise Stopped
        elif (self.signum, signum) != (signal.SIGUSR2, signal.SIGTERM):
            self.at_once = True
