"""
Run git.

The user's git configuration never leaks in: its files are switched off and its variables removed,
except those that say how to reach a host.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from sparkwright.core.errors import CommandError, GitError
from sparkwright.core.process import refuse_full_disk, wrap_with_limits

#: Variables about reaching hosts, which must stay; GIT_DIR, GIT_INDEX_FILE and their like would
#: redirect our commands.
_KEPT = frozenset(
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

#: In place of the user's own file.
_GLOBAL = Path(__file__).with_name("gitconfig")

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


def _command() -> Any:
    """
    Return GitPython's command layer; imported late because it costs as much as the rest of the
    command line.
    """
    for name in [name for name in os.environ if name.startswith("GIT_") and name not in _KEPT]:
        del os.environ[name]
    os.environ["GIT_PYTHON_REFRESH"] = "quiet"
    from git.cmd import Git

    return Git


def run(
    arguments: Sequence[str],
    *,
    cwd: Path,
    env: Mapping[str, str] | None = None,
    stdin: bytes | IO[bytes] | None = None,
    check: bool = True,
    timeout: int | None = None,
    durable: bool = True,
    on_progress: OnProgress | None = None,
) -> tuple[int, bytes, str]:
    """
    Run ``git`` with *arguments* and return its status, standard output and standard error.

    Args:
        durable: Flush files to the disk; False for files that do not outlive the run.
        on_progress: Told what git's ``--progress`` says, as it comes; standard output is not
            returned then.

    Raises:
        tool-missing: git is not installed.
        git-failed: It ended with another status than 0 and *check* is set.
        disk-full: It found no room for what it writes.
    """
    command = [
        "git",
        *(part for name, value in _CONFIG.items() for part in ("-c", f"{name}={value}")),
        *([] if durable else ["-c", "core.fsync=none"]),
        *arguments,
    ]
    own = {
        "GIT_CONFIG_GLOBAL": str(_GLOBAL),
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_ATTR_NOSYSTEM": "1",
        "GIT_TERMINAL_PROMPT": "0",
        "TZ": "UTC",
    }
    environment = {**own, **(env or {})}
    with tempfile.TemporaryFile() as spool:
        if isinstance(stdin, bytes):
            spool.write(stdin)
            spool.seek(0)
        try:
            # A git that outlived a killed run would write under the lock of the next one.
            command = wrap_with_limits(command)
            source = spool if stdin is None or isinstance(stdin, bytes) else stdin
            layer = _command()(str(cwd))
            if on_progress:
                child = layer.execute(command, istream=source, env=environment, as_process=True)
                err = _watched(child.proc, on_progress)
                status, out = child.proc.wait(), b""
            else:
                status, out, err = layer.execute(
                    command,
                    istream=source,
                    env=environment,
                    with_extended_output=True,
                    with_exceptions=False,
                    stdout_as_string=False,
                    strip_newline_in_stdout=False,
                    kill_after_timeout=timeout,
                )
        except Exception as error:
            if isinstance(error, FileNotFoundError) or type(error).__name__ == "GitCommandNotFound":
                raise CommandError("tool-missing", "git is not installed.") from error
            raise
    if status:
        refuse_full_disk(str(err).splitlines(), f"git in {cwd}")
    if check and status:
        raise GitError(
            "git-failed",
            f"git {arguments[0]} ended with status {status}.",
            details=str(err).strip().splitlines()[-20:],
        )
    return int(status), bytes(out), str(err)


def _watched(child: Any, on_progress: OnProgress) -> str:
    """Pass the progress that git prints to *on_progress*, and return its other messages."""
    lines_read, pending = [], b""
    while chunk := child.stderr.read1(4096):
        *lines, pending = re.split(rb"[\r\n]", pending + chunk)
        for line in lines:
            if match := _PROGRESS.match(line):
                on_progress(match[1].decode(), int(match[2]), int(match[3]))
            elif line.strip():
                lines_read.append(line)
    return b"\n".join([*lines_read, pending]).decode("utf-8", "replace")
