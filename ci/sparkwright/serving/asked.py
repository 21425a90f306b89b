"""Requests to stop: SIGINT, SIGTERM and a terminal that goes away, noted in every phase and acted upon where it is safe."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any, Self

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Asked:
    """
    Whether somebody asked this program to stop, while its ``with`` block runs.

    Attributes:
        times: How often.
        gently: Only note it, as something runs that has to be ended first; otherwise `KeyboardInterrupt` is raised wherever the program is.
    """

    def __init__(self) -> None:
        self.times, self.gently = 0, False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for one in SIGNALS:
            # What whoever started us wants ignored (nohup, a job in the background of a script) stays ignored; TERM never is.
            if one is signal.SIGTERM or signal.getsignal(one) is not signal.SIG_IGN:
                self._before[one] = signal.signal(one, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for one, handler in self._before.items():
            signal.signal(one, handler)

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        self.times += 1
        if not self.gently:
            raise KeyboardInterrupt
