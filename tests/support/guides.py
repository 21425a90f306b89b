"""
Runs the commands of a page of the documentation as a reader would: those of its ``console`` blocks, in order, in one shell's folder.

A command that is to fail names the reference after an arrow: ``$ sparkwright … # → gate-failed``. Placeholders of a page (``INDEX``,
``OWNER/NAME``) stand for what the test has; nothing else of a command is changed.
"""

import dataclasses
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from markdown_it import MarkdownIt

#: Seconds after which a command hangs.
PATIENCE = 900


@dataclasses.dataclass(frozen=True)
class Command:
    """A command of a page: the *line* in which it stands, its *text*, and the reference that it is to end with, if any."""

    line: int
    text: str
    refused: str = ""


def commands(page: Path) -> list[Command]:
    """Return every command of *page*."""
    found = []
    for token in MarkdownIt().parse(page.read_text("utf-8")):
        if token.type == "fence" and token.info.strip() == "console":
            assert token.map
            for number, line in enumerate(token.content.splitlines(), token.map[0] + 2):
                if line.startswith("$ "):
                    refused = re.search(r"\s# → ([a-z-]+)$", line)
                    found.append(Command(number, line[2:], refused[1] if refused else ""))
    return found


def run(
    page: Path, folder: Path, environment: Mapping[str, str], places: Mapping[str, str], *, only: Sequence[Command] | None = None,
    here: Mapping[str, str] | None = None,
) -> list[str]:  # fmt: skip
    """
    Run the commands of *page* (or *only* some), and return what each printed.

    Args:
        places: Placeholder → what stands for it here.
        here: Part of a command → the reference that it ends with where the test's world cannot carry it further.
    """
    said, where = [], folder
    # Not in *folder*, which may be the checkout.
    script = Path(tempfile.mkdtemp()) / "where"
    for command in commands(page) if only is None else only:
        text = command.text
        for name, value in places.items():
            text = text.replace(name, value)
        # `cd` holds for the lines that follow.
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-c", f'cd "$0" && {{ {text}\n}}; ended=$?; pwd >"$1"; exit $ended', str(where), str(script)],
            env=dict(environment), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
            timeout=PATIENCE,
        )  # fmt: skip
        where = Path(script.read_text().strip())
        told = f"{page.name}:{command.line}: {text}\n{done.stdout[-6000:]}"
        refused = command.refused or next((reference for part, reference in (here or {}).items() if part in command.text), "")
        assert done.returncode in ((1, 4, 5) if refused else (0,)), told
        assert f"error: {refused}:" in done.stdout or not refused, told
        said.append(done.stdout)
    return said
