"""``sparkwright publish``: wheels whose verdicts allow it become a release of an index."""

from __future__ import annotations

import argparse

from sparkwright.cli import publishing
from sparkwright.core.console import console, size
from sparkwright.core.errors import UsageError
from sparkwright.forks.context import RunContext
from sparkwright.release.publish import sequence
from sparkwright.release.publish.sequence import Asked, Published


def run(session: RunContext, arguments: argparse.Namespace) -> int:
    """Decide, and publish or refuse."""
    kind, _, repository = arguments.files.partition(":")
    if (kind, bool(repository)) not in (("folder", False), ("github", True)):
        raise UsageError(
            "usage", f"--files {arguments.files!r} is neither folder nor github:OWNER/REPO."
        )
    wheels = tuple(path.absolute() for path in arguments.wheels)
    if missing := [str(path) for path in wheels if not path.is_file()]:
        raise UsageError("usage", "There is no such wheel.", details=missing)
    who = publishing.publisher(session, arguments)
    asked = Asked(
        wheels,
        arguments.channel,
        arguments.verdicts,
        repository,
        arguments.url,
        arguments.reason,
        arguments.dry_run,
    )
    _show(sequence.publish(who, asked), dry=arguments.dry_run)
    return 0


def _show(done: Published, *, dry: bool) -> None:
    rows = [["sent", place.rpartition("/")[2]] for place in done.sent] + [
        ["was there", place.rpartition("/")[2]] for place in done.there
    ]
    rows += [["removed", place] for place in done.removed]
    rows += [
        ["missing", f"{name}: {one.rung}: {one.state} ({one.reference})"]
        for name, lacks in done.missing.items()
        for one in lacks
    ]
    state = (
        "would be published"
        if dry
        else "was published before"
        if done.already
        else f"published, {size(done.size)} sent"
    )
    console.table(f"{done.release} in {done.channel}: {state}", ["what", "of"], rows, result=True)
    if not dry:
        console.note(f"manifest {done.serial} of {done.url}")
    console.document({"published": done, "dry_run": dry})
