"""
``sparkwright notes``: the notes of a published release, or only the answer to "do you still need
this fork?".
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkwright.core.console import console
from sparkwright.core.errors import UsageError
from sparkwright.release.client.install import Wish
from sparkwright.release.notes import published, rendered, whole
from sparkwright.release.notes.published import Published
from sparkwright.release.notes.stock import Stock

if TYPE_CHECKING:
    from sparkwright.forks.context import RunContext


def run(session: Any, arguments: argparse.Namespace) -> int:
    """Write what was asked for; without a file to write, print Markdown here."""
    files: dict[str, Path] = {
        kind: path for kind in ("html", "markdown") if (path := getattr(arguments, kind))
    }
    if len({path.resolve() for path in files.values()}) < len(files):
        raise UsageError("usage", "--html and --markdown name the same file.")
    found = _found(session, arguments)
    if found.yanked:
        console.warn(f"{found.release.name} was yanked: {found.yanked}")
    stock = _stock(session, arguments, found) if arguments.stock else {}
    if arguments.need:
        blocks = whole.need(found.release, found.proof, stock)
    else:
        blocks = whole.blocks(found.release, found.proof, found.before, stock)
    texts = {"markdown": rendered.as_markdown(blocks)}
    if "html" in files:
        texts["html"] = rendered.page(found.release.name, blocks)
    for kind, path in files.items():
        with session.store.replacing(path) as unfinished:
            unfinished.write_text(texts[kind], "utf-8")
        console.result(str(path))
    if not files:
        console.result(texts["markdown"])
    document = {
        "name": found.release.name,
        "release": whole.address(found.release),
        "channel": found.channel,
        "yanked": found.yanked,
    }
    written = {kind: str(path) for kind, path in files.items()}
    console.document(
        {
            **document,
            "signature checked": found.checked,
            "written": written,
            "markdown": texts["markdown"],
        }
    )
    return 0


def _found(session: Any, arguments: argparse.Namespace) -> Published:
    if arguments.release.endswith(".json"):
        return published.of_file(Path(arguments.release))
    wish = Wish(
        arguments.index,
        tuple(arguments.key),
        arguments.signed_for,
        "candidate",
        arguments.stack or "",
        arguments.release,
    )
    return published.of_index(session, wish)


def _stock(session: RunContext, arguments: argparse.Namespace, found: Published) -> Stock:
    """
    Read the official wheels, which needs a checkout: its policy says how device code is counted.
    """
    from sparkwright.release.notes import official

    return official.of(session, found.release.forks, arguments.stock)
