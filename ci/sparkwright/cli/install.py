"""
``sparkwright install``: a release into an environment; with ``--onsite``, only what a checkout
installs and edits on the machine.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from sparkwright.cli import environments
from sparkwright.core.console import console, size
from sparkwright.core.errors import UsageError
from sparkwright.forks.context import StandaloneContext
from sparkwright.release.client import install, listing
from sparkwright.release.client.install import Wish

if TYPE_CHECKING:
    from sparkwright.forks.context import RunContext

#: The rest of an installation is a matter of uv or pip.
SCOPE = (
    "this covers only what may not be shipped as a wheel; install the wheels themselves from "
    "dist/ with uv or pip"
)


def run(session: Any, arguments: argparse.Namespace) -> int:
    """Install, list, or do the on-site part alone."""
    if arguments.onsite:
        return _onsite(session, arguments)
    if arguments.stock or arguments.built:
        return _trial(session, arguments)
    if arguments.restore:
        raise UsageError("usage", "--restore belongs to --onsite.")
    wish = Wish(
        arguments.index,
        tuple(arguments.key),
        arguments.signed_for,
        arguments.channel,
        arguments.stack or "",
        arguments.release,
        arguments.replace,
        arguments.repair,
        arguments.dry_run,
    )
    if arguments.list:
        return _list(session, arguments, wish)
    done = install.install(session, environments.chosen(arguments.into), wish)
    environments.show(done)
    console.document({"installed": done})
    return 0


def _trial(session: RunContext, arguments: argparse.Namespace) -> int:
    """
    Make an environment to gate in: around wheels that nobody published, or with the stock wheel.
    """
    from sparkwright.operate import trial

    if arguments.into is None or (arguments.stock and arguments.built):
        raise UsageError(
            "usage",
            "An environment to gate in is named by --into, and holds either wheels of yours or "
            "the stock one.",
        )
    if arguments.stock:
        kept = trial.stock(session, arguments.into.absolute())
        console.result(str(kept))
        console.document({"stock": str(kept)})
        return 0
    done = trial.built(session, arguments.built, arguments.into)
    environments.show(done)
    console.document({"installed": done})
    return 0


def _list(session: StandaloneContext, arguments: argparse.Namespace, wish: Wish) -> int:
    index = install.opened(session, wish)
    rows = listing.rows(index, wish, listing.present(arguments.into))
    table = [_cells(row) for row in rows]
    manifest = index.manifest
    signed = (
        f"signed by {index.by} (known from {index.trust.said}) on {manifest.made[:10]}, "
        f"good until {manifest.expires[:10]}"
    )
    title = f"{manifest.url}, serial {manifest.serial}\n{signed}"
    console.table(
        title,
        ["  release", "channel", "made", "versions", ">size", "not proved", ""],
        table,
        result=True,
    )
    if not rows and manifest.entries:
        console.note(
            "Nothing of this kind is verified; `--channel candidate` shows what is not, and what "
            "it lacks."
        )
    console.document(
        {"index": manifest.url, "serial": manifest.serial, "signed_by": index.by, "releases": rows}
    )
    return 0


def _cells(row: listing.Row) -> list[str]:
    versions = "\n".join(f"{name} {version}" for name, version in row.versions.items())
    fits = "" if row.fits else "not for this machine"
    last = f"yanked: {row.yanked}" if row.yanked else fits
    mark = "* " if row.installed else "  "
    return [
        mark + row.name,
        row.channel,
        row.made[:10],
        versions,
        size(row.size),
        _lacking(row),
        last,
    ]


def _lacking(row: listing.Row) -> str:
    """Return what is missing of a release, one line for each state."""
    states: dict[str, list[str]] = {}
    for one in row.missing:
        rung, _, state = one.partition(": ")
        states.setdefault(state, []).append(rung)
    return "\n".join(f"{state}: {', '.join(rungs)}" for state, rungs in states.items())


def _onsite(session: RunContext, arguments: argparse.Namespace) -> int:
    """
    Bring the environment to what the stack's ``onsite.yaml`` asks for, or with ``--restore`` to the
    unedited wheels.
    """
    from sparkwright.release import onsite, spec

    if arguments.into is None:
        raise UsageError("usage", "--onsite needs --into.")
    wanted = spec.load(session.project)
    console.note(SCOPE)
    if wanted is None:
        console.result(f"Stack {session.project.stack} has nothing to do on site.")
        console.document({"installed": None})
        return 0
    console.note(f"why on site: {wanted.reason}")
    done = onsite.install(
        session.store, wanted, arguments.into, offline=session.offline, restore=arguments.restore
    )
    rows = [["wheel", name, sha256[:12], ""] for name, sha256 in done.wheels.items()]
    rows += [
        ["shared", f"{one.upper} over {one.lower}", "", f"{one.files} files, {one.differ} differ"]
        for one in done.shared
    ]
    rows += [["edit", f"{one.name}: {one.file}", one.sha256[:12], one.state] for one in done.edits]
    console.table(
        f"{done.written} of {done.files} files written",
        ["", "what", "sha256", ""],
        rows,
        result=True,
    )
    console.document({"installed": done})
    return 0
