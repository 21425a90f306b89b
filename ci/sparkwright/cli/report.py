"""
``sparkwright report``: results of the throughput gate as a page, as Markdown, or in the terminal.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from sparkwright.core.console import console
from sparkwright.core.errors import UsageError
from sparkwright.forks.context import RunContext
from sparkwright.release.report import markdown, page, read, terminal, words


def run(session: RunContext, arguments: argparse.Namespace) -> int:
    """
    Read the files and write what was asked for; without a file to write, show each result here.
    """
    given: list[Path] = arguments.files
    results = [read.read(path) for path in given]
    made: dict[str, Path] = {
        kind: path for kind in ("html", "markdown") if (path := getattr(arguments, kind))
    }
    for path in made.values():
        if path.resolve() in [one.resolve() for one in given]:
            raise UsageError("usage", f"{path} is one of the results, and would be written over.")
    if len({path.resolve() for path in made.values()}) < len(made):
        raise UsageError("usage", "--html and --markdown name the same file.")
    if "html" in made:
        with console.progress("drawing the page, %", 100) as progress:
            _write(
                session,
                made["html"],
                page.render(results, lambda share: progress.update(round(100 * share))),
            )
    if "markdown" in made:
        _write(session, made["markdown"], markdown.render(results))
    for result in results if not made else ():
        terminal.show(result)
    told = [
        {
            "file": str(path),
            "kind": one.kind,
            "state": one.state,
            "says": one.says,
            "culprits": one.culprits,
        }
        for path, one in zip(given, results, strict=True)
    ]
    console.document(
        {
            "results": told,
            **{kind: str(made[kind]) if kind in made else None for kind in ("html", "markdown")},
        }
    )
    for path, one in zip(given, results, strict=True) if made else ():
        console.note(f"{path}: {words.verdict(one)[1]}: {words.clean(one.says)}")
    for path in made.values():
        console.result(str(path))
    return 0


def _write(session: RunContext, path: Path, text: str) -> None:
    """Write *text* to *path*, whole or not at all."""
    with session.store.replacing(path) as unfinished:
        unfinished.write_text(text, "utf-8")
