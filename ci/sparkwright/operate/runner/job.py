"""GitHub's runner as a child: a fresh copy of it, run as the job's user for one job, and what it says of that job."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import time
from pathlib import Path

from sparkwright.core import process
from sparkwright.core.console import one_line
from sparkwright.operate.errors import LabError
from sparkwright.operate.runner.ground import Ground
from sparkwright.operate.runner.lines import Lines
from sparkwright.operate.runner.plan import HOOK
from sparkwright.operate.runner.registration import Registered

#: Bytes of the runner's own output that are kept; the log of the job itself is GitHub's.
LOGGED = 16 * 1024 * 1024
# src/Runner.Listener/JobDispatcher.cs of actions/runner; each line begins with the time.
_BEGAN = re.compile(r": Running job: (.+)")
_ENDED = re.compile(r": Job .+ completed with result: ([A-Za-z]{1,40})\s*$")


def prepare(ground: Ground) -> None:
    """
    Lay a fresh copy of the runner into the work folder, and a home and a place for temporary files beside it.

    Raises:
        runner-unfit: There is no runner, or others than root could have changed it.
    """
    source = ground.at(ground.policy.folders.runner)
    try:
        found = (source / "run.sh").lstat()
    except OSError as error:
        raise LabError("runner-unfit", f"There is no runner of GitHub's in {source}.", details=[str(error)]) from error
    if found.st_mode & 0o022 or not stat.S_ISREG(found.st_mode) or (ground.root and found.st_uid != 0):
        raise LabError("runner-unfit", f"Others than root can change {source}/run.sh.")
    ground.work.chmod(0o711)
    target = ground.work / "runner"
    shutil.copytree(source, target, symlinks=True)
    for name in ("home", "tmp"):
        (ground.work / name).mkdir(mode=0o700)
    if ground.root:
        for folder in (target, ground.work / "home", ground.work / "tmp"):
            _give(folder, ground)


def _give(folder: Path, ground: Ground) -> None:
    os.lchown(folder, ground.uid, ground.gid)
    for place, folders, files in os.walk(folder):
        for name in (*folders, *files):
            os.lchown(Path(place, name), ground.uid, ground.gid)


class Running:
    """
    The runner, started.

    Attributes:
        job: Name of its job, one line; empty while it waits for one. *began*: when the job did, by the monotonic clock.
        result: What the runner said of the job's end; a job could write that line, so it decides nothing.
    """

    def __init__(self, ground: Ground, registered: Registered, log: Path) -> None:
        self.job = self.result = ""
        self.began = 0.0
        self._secret, self._left = registered.config.encode(), LOGGED
        log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.log = log
        self._sink = os.fdopen(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb")
        self._child = subprocess.Popen(
            _command(ground), cwd=ground.work / "runner", env=_environment(ground, registered), stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        assert self._child.stdout is not None
        self._lines = Lines(self._child.stdout.fileno())

    def look(self, wait: float) -> bool:
        """Read what the runner says within *wait* seconds; False when it has ended."""
        for line in self._lines.read(wait):
            self._say(line)
        if self._lines.closed:
            # Whoever holds its output open may outlive it; whoever closed it may not have ended.
            time.sleep(min(wait, 0.05))
        return self._child.poll() is None

    def _say(self, line: str) -> None:
        data = line.encode().replace(self._secret, b"***") + b"\n"
        if self._left > 0:
            self._sink.write(data[: self._left])
            self._sink.flush()
            self._left -= len(data)
        if not self.job and (found := _BEGAN.search(line)):
            self.job, self.began = one_line(found[1], 200), time.monotonic()
        elif self.job and (found := _ENDED.search(line)):
            self.result = found[1]

    @property
    def status(self) -> int | None:
        return self._child.poll()

    @property
    def pid(self) -> int:
        return self._child.pid

    def drain(self) -> None:
        """Take in what a runner that has ended said last; something that it left may hold its output open."""
        self._lines.quiet = False
        while not (self._lines.quiet or self._lines.closed):
            for line in self._lines.read(0):
                self._say(line)

    def finish(self) -> None:
        """
        Let go of a runner that has ended, or was killed a moment ago.

        Raises:
            runner-unclean: The kernel cannot end it.
        """
        try:
            self._child.wait(10)
        except subprocess.TimeoutExpired:
            raise LabError("runner-unclean", "GitHub's runner does not end.", details=[f"process {self._child.pid}"]) from None
        self.drain()
        self._sink.close()
        assert self._child.stdout is not None
        self._child.stdout.close()


def _command(ground: Ground) -> list[str]:
    """Return the command: run.sh, as the job's user where this is root, without a right, and not outliving its parent."""
    rights = [f"--reuid={ground.uid}", f"--regid={ground.gid}", "--clear-groups", "--inh-caps=-all", "--bounding-set=-all"]
    dropped = rights if ground.root else []
    words = process.wrap_with_limits([ground.work / "runner" / "run.sh"], by=9)
    if words[0].endswith("setpriv"):
        return [words[0], "--no-new-privs", *dropped, *words[1:]]
    raise LabError("runner-unfit", "setpriv is not installed; it is part of util-linux.")


def _environment(ground: Ground, registered: Registered) -> dict[str, str]:
    """
    Return the job's environment: nothing of this program's own.

    The configuration goes by the environment, which GitHub's runner reads and removes from its own; an argument would be in every listing
    of processes. The hook's name must end in ``.sh``.
    """
    return {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "LANG": "C.UTF-8",
        "HOME": str(ground.work / "home"),
        "TMPDIR": str(ground.work / "tmp"),
        "HF_HOME": str(ground.models),
        "HF_HUB_OFFLINE": "1",
        "ACTIONS_RUNNER_HOOK_JOB_STARTED": str(ground.config / HOOK),
        "ACTIONS_RUNNER_INPUT_JITCONFIG": registered.config,
        "SPARKWRIGHT_UNIT": f"runner {ground.state}",
    }
