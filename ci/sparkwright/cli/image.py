"""
``sparkwright image``: a serving image of a published release, and its digest once it is pushed.
"""

from __future__ import annotations

import argparse
from typing import Any

from sparkwright.builder import container
from sparkwright.cli import publishing
from sparkwright.core.console import console, size
from sparkwright.core.errors import UsageError
from sparkwright.forks.context import RunContext
from sparkwright.operate.image import made, picked, recorded, registry
from sparkwright.operate.image.made import Asked, Made
from sparkwright.operate.image.picked import PLATFORMS, Picked
from sparkwright.operate.image.recorded import ImageRecord
from sparkwright.release.client.install import Wish
from sparkwright.release.publish.prepare import Publisher
from sparkwright.release.signing.keys import public_path


def run(session: RunContext, arguments: argparse.Namespace) -> int:
    """Check, build, tag and push, as far as was asked for."""
    asked, publisher = _asked(arguments), _publisher(session, arguments)
    repository = registry.checked(arguments.push) if arguments.push else ""
    tag = registry.split(arguments.tag) if arguments.tag else None
    base = container.pinned_base(session, asked.base)
    found = picked.pick(session, asked.wish, PLATFORMS[asked.platform])
    if publisher:
        recorded.check(publisher, found.entry.release)
    if found.entry.yanked:
        console.warn(f"{found.entry.name} was yanked: {found.entry.yanked}")
    for one in found.missing:
        console.warn(f"not proved: {one.rung}: {one.state}: {one.says}")
    if arguments.dry_run:
        return _show(found, base, asked.platform, None, repository)
    if repository:
        recorded.ready(session.output)
    done = made.make(session, asked, found, base)
    if tag:
        registry.tagged(done, *tag)
    kept = _pushed(session, publisher, done, found, repository) if repository else None
    return _show(found, base, asked.platform, done, repository, kept)


def _asked(arguments: argparse.Namespace) -> Asked:
    """Return what is asked for; without --index, the index of --at is meant."""
    index, keys = arguments.index, tuple(arguments.key)
    if arguments.at and not index:
        # Whoever signs for an index believes it.
        index, keys = (
            str(arguments.at),
            keys or ((public_path(arguments.signing_key),) if arguments.signing_key else ()),
        )
    wish = Wish(
        index,
        keys,
        arguments.signed_for,
        arguments.channel,
        stack=arguments.stack or "",
        release=arguments.release,
    )
    return Asked(wish, arguments.platform, arguments.base)


def _publisher(session: RunContext, arguments: argparse.Namespace) -> Publisher | None:
    if arguments.at is None:
        if arguments.signing_key or arguments.identity:
            raise UsageError("usage", "--signing-key and --identity belong to --at.")
        return None
    if not arguments.push:
        raise UsageError(
            "usage", "--at keeps the record of what --push pushed, and nothing is pushed."
        )
    given: dict[str, Any] = {**vars(arguments), "key": arguments.signing_key, "predecessor": []}
    return publishing.publisher(session, argparse.Namespace(**given))


def _pushed(
    session: RunContext, publisher: Publisher | None, done: Made, found: Picked, repository: str
) -> ImageRecord:
    tag = registry.tag_of(found.entry.name, done.platform)
    kept = recorded.record(done, found, repository, tag, registry.push(done, repository, tag))
    console.note(f"recorded as {recorded.written(session.output, kept)}")
    if publisher:
        console.note(f"signed as {publisher.root / recorded.published(publisher, kept)}")
    return kept


def _show(
    found: Picked,
    base: str,
    platform: str,
    done: Made | None,
    repository: str,
    kept: ImageRecord | None = None,
) -> int:
    state = "would be built" if done is None else "was there already" if done.already else "built"
    rows = [
        ["release", f"{found.entry.name} ({found.entry.channel}), {found.entry.release}"],
        ["base", base],
        ["platform", platform],
    ]
    rows += [
        [wheel.project, f"{wheel.version}, {size(wheel.size)}, {wheel.sha256}"]
        for wheel in found.wheels
    ]
    rows += (
        [["not proved", ", ".join(dict.fromkeys(one.rung for one in found.missing))]]
        if found.missing
        else []
    )
    rows += [["image", f"{done.name}, {done.id}"]] if done else []
    if repository and kept is None:
        rows += [["push to", f"{repository}:{registry.tag_of(found.entry.name, platform)}"]]
    rows += [["pushed", f"{kept.repository}:{kept.tag}@sha256:{kept.digest}"]] if kept else []
    console.table(f"serving image of {found.entry.name}: {state}", ["", ""], rows, result=True)
    console.document(
        {
            "image": done,
            "state": state,
            "release": found.entry,
            "missing": found.missing,
            "base": base,
            "pushed": kept,
        }
    )
    return 0
