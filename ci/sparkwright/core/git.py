"""
Run git.

The user's git configuration never leaks in: its files are switched off and its variables removed,
except those that say how to reach a host.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from sparkwright.core.errors import CommandError, GitError
from sparkwright.core.process import refuse_full_disk, wrap_with_limits

#: Variables about reaching hosts, which must stay; GIT_DIR, GIT_INDEX_FILE and their like would
#: redirect our commands.
_NETWORK = frozenset(
    {
        "GIT_SSH",
        "GIT_SSH_COMMAND",
        "GIT_SSL_CAINFO",
        "GIT_SSL_NO_VERIFY",
        "GIT_ASKPASS",
        "GIT_HTTP_PROXY_AUTHMETHOD",
    }
)

_CONFIG = {
    # `*.py diff=python`, say, would change the headings of hunks
    "core.attributesFile": os.devnull,
    "core.autocrlf": "false",  # bytes are what the lock names
    "core.fsync": "all",  # a tree that a record names must survive a power cut
    "core.untrackedCache": "false",
    "gc.auto": "0",  # trees have no commit that would keep them from collection
    "protocol.ext.allow": "never",  # an ext:: url runs a command
    # historic commits of the upstreams fail it; ids are compared instead
    "transfer.fsckObjects": "false",
    "advice.detachedHead": "false",
    "init.defaultBranch": "main",
    # A host that accepts the connection and says nothing.
    "http.lowSpeedLimit": "1",
    "http.lowSpeedTime": "60",
}

_ENVIRONMENT = {
    # In place of the user's own file.
    "GIT_CONFIG_GLOBAL": str(Path(__file__).with_name("gitconfig")),
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_ATTR_NOSYSTEM": "1",
    "GIT_TERMINAL_PROMPT": "0",
    "LANGUAGE": "C",
    "LC_ALL": "C",
    "TZ": "UTC",
}

#: Otherwise git takes a damaged bare repository for no repository, and works in the one that the
#: cache directory happens to lie in.
HERE = {"GIT_DIR": "."}

REGULAR, EXECUTABLE, LINK, SUBMODULE = "100644", "100755", "120000", "160000"

#: Phase, how many are done, and of how many.
OnProgress = Callable[[str, int, int], None]

#: Other lines end in ", done." or come from the other side; nobody waits for them.
_PROGRESS = re.compile(
    rb"(Receiving objects|Resolving deltas|Updating files):\s+\d+% \((\d+)/(\d+)\)"
)


def run(
    arguments: Sequence[str],
    *,
    cwd: Path,
    env: Mapping[str, str] | None = None,
    stdin: bytes | IO[bytes] | None = None,
    check: bool = True,
    timeout: float | None = None,
    durable: bool = True,
    on_progress: OnProgress | None = None,
) -> tuple[int, bytes, str]:
    """
    Run ``git`` with *arguments* and return its status, standard output and standard error.

    Args:
        durable: Flush files to the disk; False for files that do not outlive the run.
        on_progress: Called with the progress that git's ``--progress`` prints; standard output is
            not returned then.

    Raises:
        tool-missing: git is not installed.
        git-failed: It ended with another status than 0 and *check* is set, or ran out of time.
        disk-full: It found no room for what it writes.
    """
    settings = _CONFIG if durable else {**_CONFIG, "core.fsync": "none"}
    options = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("GIT_") or name in _NETWORK
    }
    environment = {**inherited, **_ENVIRONMENT, **(env or {})}
    try:
        # A git that outlived a killed run would write under the lock of the next one.
        command = wrap_with_limits(["git", *options, *arguments])
    except FileNotFoundError as error:
        raise CommandError("tool-missing", "git is not installed.") from error
    with tempfile.TemporaryFile() as spool:
        if isinstance(stdin, bytes):
            spool.write(stdin)
            spool.seek(0)
        source = spool if stdin is None or isinstance(stdin, bytes) else stdin
        if on_progress:
            status, messages = _run_with_progress(command, cwd, environment, source, on_progress)
            output = b""
        else:
            try:
                done = subprocess.run(
                    command,
                    cwd=cwd,
                    env=environment,
                    stdin=source,
                    capture_output=True,
                    check=False,
                    timeout=timeout,
                )
            except subprocess.TimeoutExpired as error:
                what = f"git {arguments[0]} had no answer in {timeout} seconds."
                raise GitError("git-failed", what) from error
            status, output, messages = done.returncode, done.stdout, done.stderr
    text = messages.decode("utf-8", "replace")
    if status:
        refuse_full_disk(text.splitlines(), f"git in {cwd}")
    if check and status:
        what = f"git {arguments[0]} ended with status {status}."
        raise GitError("git-failed", what, details=text.strip().splitlines()[-20:])
    return status, output, text


def _run_with_progress(
    command: Sequence[str],
    cwd: Path,
    env: Mapping[str, str],
    source: IO[bytes],
    on_progress: OnProgress,
) -> tuple[int, bytes]:
    """Return the status and the messages of git, its progress passed to *on_progress*."""
    messages, pending = list[bytes](), b""
    with subprocess.Popen(
        command, cwd=cwd, env=env, stdin=source, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as child:
        assert isinstance(child.stderr, io.BufferedReader)
        while chunk := child.stderr.read1():
            *lines, pending = re.split(rb"[\r\n]", pending + chunk)
            for line in lines:
                if match := _PROGRESS.match(line):
                    on_progress(match[1].decode(), int(match[2]), int(match[3]))
                elif line.strip():
                    messages.append(line)
    return child.returncode, b"\n".join([*messages, pending])
