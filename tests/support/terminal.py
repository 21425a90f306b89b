"""What a command shows in a terminal of so many columns."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
from collections.abc import Mapping, Sequence
from pathlib import Path


def screen(command: Sequence[str], columns: int, environment: Mapping[str, str], folder: Path) -> list[str]:
    """Run *command*, whose output and messages go to a terminal, and return the lines that it writes there, without colours."""
    outer, inner = pty.openpty()
    fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    variables = {name: value for name, value in environment.items() if name not in ("COLUMNS", "LINES")}
    process = subprocess.Popen(
        command, stdin=inner, stdout=inner, stderr=inner, env={**variables, "TERM": "xterm"}, cwd=folder, start_new_session=True
    )
    os.close(inner)
    data = b""
    with contextlib.suppress(OSError):  # the last reader of a terminal gets EIO
        while part := os.read(outer, 65536):
            data += part
    os.close(outer)
    process.wait(60)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", data.decode("utf-8", "replace"))
    return [line.rpartition("\r")[2].rstrip() for line in text.replace("\r\n", "\n").split("\n")]
