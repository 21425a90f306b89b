"""
Run git, by GitPython's command layer.

The user's git configuration never leaks in: its files are switched off and its variables removed,
except those that say how to reach a host.
"""

from __future__ import annotations

import io
import os
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from sparkwright.core.errors import GitError
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
    environment = {**_ENVIRONMENT, **(env or {})}
    # A git that outlived a killed run would write under the lock of the next one.
    command = wrap_with_limits(["git", *options, *arguments])
    with tempfile.TemporaryFile() as spool:
        if isinstance(stdin, bytes):
            spool.write(stdin)
            spool.seek(0)
        source = spool if stdin is None or isinstance(stdin, bytes) else stdin
        layer = _git()(str(cwd))
        if on_progress:
            # It ends the process when it is collected.
            child = layer.execute(command, istream=source, env=environment, as_process=True)
            messages, output = _pass_progress(child.proc.stderr, on_progress), b""
            status = child.proc.wait()
        else:
            status, output, messages = layer.execute(
                command,
                istream=source,
                env=environment,
                with_extended_output=True,
                with_exceptions=False,
                stdout_as_string=False,
                strip_newline_in_stdout=False,
                kill_after_timeout=timeout,
            )
    text = str(messages)
    if status:
        refuse_full_disk(text.splitlines(), f"git in {cwd}")
    if check and status:
        what = f"git {arguments[0]} ended with status {status}."
        raise GitError("git-failed", what, details=text.strip().splitlines()[-20:])
    return status, output, text


def _git() -> Any:
    """
    Return GitPython's class for commands, and remove the variables that would redirect them. It is
    imported late, because that takes as long as the rest of the command line.
    """
    for name in [name for name in os.environ if name.startswith("GIT_") and name not in _NETWORK]:
        del os.environ[name]
    os.environ["GIT_PYTHON_REFRESH"] = "quiet"
    from git.cmd import Git

    return Git


def _pass_progress(stream: io.BufferedReader, on_progress: OnProgress) -> str:
    """Pass the progress that git prints to *on_progress*, and return its other messages."""
    messages, pending = list[bytes](), b""
    while chunk := stream.read1():
        *lines, pending = re.split(rb"[\r\n]", pending + chunk)
        for line in lines:
            if match := _PROGRESS.match(line):
                on_progress(match[1].decode(), int(match[2]), int(match[3]))
            elif line.strip():
                messages.append(line)
    return b"\n".join([*messages, pending]).decode("utf-8", "replace")
