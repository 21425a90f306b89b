"""
Processes that tests start, wait for, and kill.

A copy of the test's process has imported already what it runs. A program ignores what its parent ignored, unless it says otherwise; a test run
that was started with ``nohup … &`` by a script, by cron or by many CI systems ignores interruptions and the end of its terminal. What a test
sends is then heard only by a program that was started with `heard` as its ``preexec_fn``.
"""

import contextlib
import functools
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

#: Audit events of the interpreter that change the file system.
WRITES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.chmod", "shutil.rmtree"}


def heard() -> None:
    """Let the program be ended by each, as one that was started at a terminal."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def script(path: Path, text: str, interpreter: str = "/bin/sh") -> Path:
    """Write *text* as a program that *interpreter* runs, and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!{interpreter}\n{text}\n")
    path.chmod(0o755)
    return path


def until(condition: Callable[[], Any], seconds: float = 60) -> Any:
    """Return the first true value of *condition*, which has to come within *seconds*."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, f"it does not happen within {seconds:g} s"
        time.sleep(0.02)
    return value


def killed(run: Callable[[], object], when: Callable[[], bool] | None = None) -> bool:
    """
    Call *run* in a copy of this process, kill that and all it started once *when* is true, and return whether it was in time; without *when*
    it may kill itself.
    """

    def lead() -> None:
        os.setpgid(0, 0)
        run()

    child = multiprocessing.get_context("fork").Process(target=lead)
    child.start()
    if when is None:
        child.join(120)
    while when and child.is_alive() and not when():
        pass
    assert child.pid
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.join()
    return child.exitcode == -signal.SIGKILL


def kill_at(step: int, run: Callable[[], object], below: str = "") -> bool:
    """
    Run *run* in a copy of this process that ends itself before its *step*-th file operation, of those whose paths hold *below*; return whether
    it came so far.
    """
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    left = step

    def watch(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal left
        mode = arguments[2] if event == "open" else 0
        writes = event in WRITES or (isinstance(mode, int) and mode & (os.O_WRONLY | os.O_RDWR))
        if writes and below in str(arguments[:2]):
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


@functools.cache
def mounting_shell() -> list[str]:
    """
    Return the command whose next argument is a shell script that may mount.

    Systems that give ordinary users no namespaces (a chroot, Ubuntu 24.04 as installed) skip the test; as root it fails.
    """
    own = [] if os.geteuid() == 0 else ["--map-root-user"]
    # In a plain chroot the root folder is no mount, so its propagation cannot be changed.
    for propagation in ("private", "unchanged"):
        command = ["unshare", *own, "--mount", "--propagation", propagation, "sh", "-c"]
        with tempfile.TemporaryDirectory() as folder:
            trial = f'mount -t tmpfs none "{folder}" && umount "{folder}"'
            run = subprocess.run([*command, trial], capture_output=True, text=True, check=False)
        if not run.returncode:
            return command
    reason = f"no file system can be mounted here: {run.stderr.strip() or run.returncode}"
    raise (pytest.skip.Exception if own else pytest.fail.Exception)(reason)
