"""
``sparkwright site``: static pages of what was published, measured, carried and tried, from the
evidence alone.
"""

from __future__ import annotations

import argparse
import datetime
from urllib.parse import urlsplit

import msgspec

from sparkwright.core.console import console, size
from sparkwright.core.errors import UsageError
from sparkwright.forks.context import RunContext
from sparkwright.operate.errors import LabError
from sparkwright.operate.site import making
from sparkwright.operate.site.making import Asked
from sparkwright.release.client.install import Wish


def run(session: RunContext, arguments: argparse.Namespace) -> int:
    """Read everything, write what changed, and say what could not be taken."""
    if urlsplit(arguments.link).scheme not in ("", "http", "https"):
        raise UsageError("usage", f"{arguments.link!r} is no address of an index.")
    wish = Wish(arguments.index, tuple(arguments.key), arguments.signed_for)
    today = arguments.day or f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}"
    drift, status, nights = tuple(arguments.drift), arguments.status, arguments.nights
    found = making.read(
        session, Asked(wish, bool(arguments.index), today, nights, drift, status, arguments.link)
    )
    written = making.make(session, found, arguments.output)
    wrong = found.problems
    for one in wrong:
        console.warn(f"{one.name}: {one.reference}: {one.says}")
    if found.books is None:
        console.note("no index was given, so nothing is said of releases")
    figures = sum(len(one.spots) for one in found.histories)
    counts = {
        "releases": len(found.releases),
        "nights": len(found.nights.nights),
        "histories": len(found.histories),
        "figures": figures,
        "changes": sum(len(one.found.changes) for one in found.histories),
        "drift": len(found.drifted.reports),
    }
    console.note(", ".join(f"{count} {name}" for name, count in counts.items()))
    console.note(
        f"{written.files} files, {size(written.size)}; {written.written} written, "
        f"{written.removed} removed"
    )
    console.result(str(arguments.output / "index.html"))
    checked = found.books.checked if found.books else None
    problems = msgspec.to_builtins(wrong)
    told = {
        "output": str(arguments.output),
        "day": today,
        "signature checked": checked,
        "problems": problems,
    }
    console.document({**told, **counts, "site": msgspec.to_builtins(written)})
    if wrong and arguments.strict:
        details = [f"{one.name}: {one.reference}" for one in wrong[:50]]
        raise LabError("site-partial", f"{len(wrong)} records could not be taken.", details=details)
    return 0
