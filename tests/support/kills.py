"""Copies of this process that end themselves before a given file operation."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

#: Audit events of the interpreter that change the file system.
WRITES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.chmod", "shutil.rmtree"}


def kill_at(step: int, run: Callable[[], object]) -> bool:
    """Run *run* in a copy of this process that ends itself before its *step*-th file operation; return whether it came so far."""
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    left = step

    def watch(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal left
        mode = arguments[2] if event == "open" else 0
        if event in WRITES or (isinstance(mode, int) and mode & (os.O_WRONLY | os.O_RDWR)):
            left -= 1
            if not left:
                os._exit(9)

    status = 1
    try:
        sys.addaudithook(watch)
        run()
        status = 0
    finally:
        os._exit(status)
