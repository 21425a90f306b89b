"""
The summary page of a GitHub job: the results of a command as Markdown, in the file that
``GITHUB_STEP_SUMMARY`` names.

Results may hold untrusted text, so every text is escaped: no markup, no link, no mention.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence
from pathlib import Path

#: GitHub drops the page of a step that has more than 1 MiB (docs.github.com, job summaries).
LARGEST = 900_000

#: What Markdown, or the sites that render it, take for their own.
_SPECIAL = re.compile(r"([\\`*_{}\[\]<>|~#!&$])")
#: A mention, an address or an issue that a site would make a link of; a character without width
#: ends it.
_LINKED = re.compile(r"(@|://|\bwww(?=\.)|(?<=\\#)(?=\d))")


def plain(text: str) -> str:
    """Return *text*, one printable line of it, as plain text in Markdown."""
    printable = "".join(letter if letter.isprintable() else " " for letter in text)
    return escaped(" ".join(printable.split()))


def escaped(line: str) -> str:
    """Return *line* with markup, links and mentions escaped."""
    return _LINKED.sub("\\1\u200b", _SPECIAL.sub(r"\\\1", line))


def cell(text: str) -> str:
    """Return *text* as a cell of a table; its line ends stay."""
    return "<br>".join(plain(line) for line in text.split("\n"))


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """
    Return a table; a column whose heading begins with ``>`` is aligned to the right, as
    `console.table` has it.
    """
    head = " | ".join(plain(column.removeprefix(">")) or " " for column in columns)
    marks = " | ".join("---:" if column.startswith(">") else "---" for column in columns)
    lines = [f"| {' | '.join(map(cell, row))} |" for row in rows]
    return "\n".join(
        [*([f"**{cell(title)}**", ""] if title else []), f"| {head} |", f"| {marks} |", *lines, ""]
    )


def block(lines: Sequence[str]) -> str:
    """Return *lines* in a code block that none of them can end."""
    longest = max((len(run) for line in lines for run in re.findall("`+", line)), default=0)
    fence = "`" * max(3, longest + 1)
    printable = [
        "".join(letter if letter.isprintable() or letter == "\t" else "?" for letter in line)
        for line in lines
    ]
    return "\n".join([f"{fence}text", *printable, fence, ""])


def run_url() -> str:
    """
    Return the address of this run of GitHub Actions; empty outside of one.
    """
    server, repository, run = (
        os.environ.get(f"GITHUB_{name}", "") for name in ("SERVER_URL", "REPOSITORY", "RUN_ID")
    )
    return f"{server}/{repository}/actions/runs/{run}" if server and repository and run else ""


def append(text: str) -> None:
    """
    Append *text* to the page of this step, if there is one and it has room; errors are ignored.
    """
    page, data = os.environ.get("GITHUB_STEP_SUMMARY", ""), f"\n{text}".encode(errors="replace")
    with contextlib.suppress(OSError), Path(page).open("ab") as sink:
        if sink.tell() + len(data) <= LARGEST:
            sink.write(data)
