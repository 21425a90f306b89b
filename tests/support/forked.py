"""Copies of the test's process, to be killed: what is imported already is not imported again."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable
from typing import Any


def exit_code(run: Callable[[], object]) -> int:
    """Call *run* in a copy of this process, and return its exit code, or minus the number of the signal that ended it."""
    child = multiprocessing.get_context("fork").Process(target=run)
    child.start()
    child.join(120)
    if child.exitcode is None:
        child.kill()
        child.join()
    assert child.exitcode is not None
    return child.exitcode


def killed(run: Callable[[], object], when: Callable[[], bool]) -> bool:
    """Call *run* in a copy of this process, kill that and all it started once *when* is true, and return whether it was in time."""

    def lead() -> None:
        os.setpgid(0, 0)
        run()

    child = multiprocessing.get_context("fork").Process(target=lead)
    child.start()
    while child.is_alive() and not when():
        pass
    assert child.pid
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.join()
    return child.exitcode == -signal.SIGKILL


class Killer:
    """Ends this process by SIGKILL before the *after*-th call of the functions that it watches."""

    def __init__(self, after: int) -> None:
        self._left = after

    def watch(self, owner: Any, *names: str, below: str = "") -> None:
        """Replace functions of *owner* by ones that are counted when their first or last argument holds *below*."""
        for name in names:
            setattr(owner, name, self._counted(getattr(owner, name), below))

    def _counted(self, real: Callable[..., Any], below: str) -> Callable[..., Any]:
        def call(*words: Any, **options: Any) -> Any:
            self._left -= below in f"{words[0]} {words[-1]}"
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*words, **options)

        return call
