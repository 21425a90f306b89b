"""The commands on an environment: ``install``, ``list``, ``rollback`` and ``uninstall``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from sparkwright.cli import options
from sparkwright.core.console import console, size
from sparkwright.core.errors import UsageError
from sparkwright.release import environment
from sparkwright.release.client import back, caches, health, listing, state
from sparkwright.release.client import install as installation
from sparkwright.release.errors import InstallError

#: Files of pipx and uv in environments that belong to one program.
TOOLS = ("pipx_metadata.json", "uv-receipt.toml")
#: Package names shown in one cell of a table.
SHOWN = 12


def add_arguments(parsers: Mapping[str, argparse.ArgumentParser]) -> None:
    """Add the arguments of the commands on an environment."""
    functions = {"install": install, "list": show_releases, "rollback": rollback}
    for name, run in {**functions, "uninstall": uninstall}.items():
        options.add_environment(parsers[name])
        parsers[name].set_defaults(run=run)
    for name in ("install", "list"):
        options.add_index(parsers[name])
        options.add_channel(parsers[name])
    add = parsers["install"].add_argument
    add(
        "--version",
        dest="release",
        default="",
        metavar="NAME",
        help="this release, by its full name; also a yanked one",
    )
    add(
        "--replace",
        action="store_true",
        help="replace packages of the set that something else installed",
    )
    add(
        "--repair",
        action="store_true",
        help="restore the files of the installed set that were changed",
    )
    add(
        "--dry-run",
        action="store_true",
        help="check everything, show what would be done, and change nothing",
    )
    add(
        "--built",
        type=Path,
        metavar="DIR",
        help="make an environment for the gates, with the unpublished wheels of this folder",
    )
    add(
        "--stock",
        action="store_true",
        help="make an environment with the official wheel under the graft, as a baseline",
    )
    add(
        "--onsite",
        action="store_true",
        help="apply only the stack's onsite.yaml (wheels and edits); needs no index",
    )
    add(
        "--restore",
        action="store_true",
        help="with --onsite: restore the unedited files of the pinned wheels",
    )


def chosen(into: Path | None) -> Path:
    """
    Return the environment *into*, else the active one, else the one that this program runs in.

    Raises:
        UsageError: There is none, or pipx or uv made it for this program alone.
    """
    if into is not None:
        return into
    if active := os.environ.get("VIRTUAL_ENV"):
        return Path(active)
    own = Path(sys.prefix)
    if sys.prefix == sys.base_prefix or any((own / name).exists() for name in TOOLS):
        raise UsageError(
            "usage",
            "No environment is active.",
            todo="Name one with --into, or make one with `python3 -m venv` and activate it.",
        )
    return own


def install(arguments: argparse.Namespace) -> dict[str, Any]:
    """Install a release, unpublished wheels, the stock wheel, or the on-site part alone."""
    special = arguments.onsite or arguments.stock or arguments.built
    options.refuse(
        (arguments.restore and not arguments.onsite, "--restore belongs to --onsite."),
        (arguments.stock and arguments.built, "Either --built or --stock makes an environment."),
        (special and arguments.into is None, "--built, --stock and --onsite need --into."),
    )
    if arguments.onsite:
        return _onsite(arguments)
    if arguments.built or arguments.stock:
        from sparkwright.operate import trial

        context = options.checkout(arguments)
        if arguments.built:
            return _show(trial.built(context, arguments.built, arguments.into))
        prefix = str(trial.stock(context, arguments.into.absolute()))
        console.result(prefix)
        return {"stock": prefix}
    wish = installation.Wish(
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
    return _show(installation.install(options.standalone(arguments), chosen(arguments.into), wish))


def _show(done: installation.Done) -> dict[str, Any]:
    titles = {
        "installed": f"{done.name} is installed in {done.into}",
        "back": f"{done.name} is back in {done.into}",
        "there already": f"{done.name} is in {done.into} already, untouched",
        "would install": f"{done.name} would be installed in {done.into}; nothing was changed",
    }
    changes = (("new", done.came), ("removed", done.went), ("unchanged", done.stayed))
    rows = [[what, str(len(names)), _shortened(names)] for what, names in changes if names]
    rows += [["edited", "", f"{edit.name}: {edit.file}, {edit.state}"] for edit in done.edits]
    gates = ", ".join(dict.fromkeys(item.gate for item in done.missing))
    rows += [["not proved", "", gates]] if gates else []
    # The table loads rich, for which nothing to do leaves no time.
    if done.state == "there already" or not rows:
        console.result(titles[done.state])
    else:
        console.table(titles[done.state], ["", ">packages", ""], rows, result=True)
    return {"installed": done}


def _shortened(names: Sequence[str]) -> str:
    """Return the first of *names*, and how many more there are; ``--json`` has them all."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _onsite(arguments: argparse.Namespace) -> dict[str, Any]:
    """Do what the stack's ``onsite.yaml`` asks for, or with ``--restore`` undo it."""
    from sparkwright.release import onsite, spec

    context = options.checkout(arguments)
    wanted = spec.load(context.project)
    if wanted is None:
        console.result(f"Stack {context.project.stack} has nothing to do on site.")
        return {"installed": None}
    console.note(f"why on site: {wanted.reason}; the wheels themselves are not installed")
    done = onsite.install(
        context.store, wanted, arguments.into, offline=context.offline, restore=arguments.restore
    )
    rows = [["wheel", name, sha256[:12], ""] for name, sha256 in done.wheels.items()]
    rows += [
        [
            "shared",
            f"{item.upper} over {item.lower}",
            "",
            f"{item.files} files, {item.differ} differ",
        ]
        for item in done.shared
    ]
    rows += [
        ["edit", f"{edit.name}: {edit.file}", edit.sha256[:12], edit.state] for edit in done.edits
    ]
    title = f"{done.written} of {done.files} files written"
    console.table(title, ["", "what", "sha256", ""], rows, result=True)
    return {"installed": done}


def show_releases(arguments: argparse.Namespace) -> dict[str, Any]:
    """Show the releases of the index, and which one is installed."""
    wish = installation.Wish(
        arguments.index,
        tuple(arguments.key),
        arguments.signed_for,
        arguments.channel,
        arguments.stack or "",
    )
    index = installation.opened(options.standalone(arguments), wish)
    rows = listing.rows(index, wish, listing.present(arguments.into))
    manifest = index.manifest
    title = (
        f"{manifest.url}, serial {manifest.serial}\n"
        f"signed by {index.by} (known from {index.trust.said}) on {manifest.made[:10]}, "
        f"good until {manifest.expires[:10]}"
    )
    cells = [
        [
            ("* " if row.installed else "  ") + row.name,
            row.channel,
            row.made[:10],
            "\n".join(f"{name} {version}" for name, version in row.versions.items()),
            size(row.size),
            ", ".join(row.missing),
            f"yanked: {row.yanked}" if row.yanked else "" if row.fits else "not for this machine",
        ]
        for row in rows
    ]
    columns = ["  release", "channel", "made", "versions", ">size", "not proved", ""]
    console.table(title, columns, cells, result=True)
    if not rows and manifest.entries:
        console.note(
            "No such release is verified; `--channel candidate` lists the candidates and the gates "
            "that they lack."
        )
    return {
        "index": manifest.url,
        "serial": manifest.serial,
        "signed_by": index.by,
        "releases": rows,
    }


def rollback(arguments: argparse.Namespace) -> dict[str, Any]:
    """Bring back the set that was installed before."""
    return _show(back.rollback(options.standalone(arguments), chosen(arguments.into)))


def uninstall(arguments: argparse.Namespace) -> dict[str, Any]:
    """Remove the set of the environment, its caches and its records."""
    gone = back.uninstall(options.standalone(arguments), chosen(arguments.into))
    changes = (("removed", gone.removed), ("kept", gone.kept))
    rows = [[what, _shortened(names)] for what, names in changes if names]
    console.table(f"{gone.name} is uninstalled", ["", "packages"], rows, result=True)
    return {"uninstalled": gone}


def check(into: Path, *, deep: bool) -> dict[str, Any]:
    """
    Show which set is installed in *into* and whether something changed it, and return the document.

    Raises:
        nothing-installed: There is no set.
        environment-broken: It was changed, or an installation was interrupted.
    """
    target = environment.probe(into)
    if unfinished := state.installing(target):
        name = unfinished.chosen.name if unfinished.chosen else "the removal of everything"
        before = unfinished.before.chosen.name if unfinished.before else "nothing"
        raise InstallError(
            "environment-broken",
            f"{target.prefix} is half installed: {name} was interrupted.",
            details=[f"there was before: {before}"],
            data={"state": "half installed"},
            todo="Run the same `sparkwright install` (or `uninstall`) again to finish, or "
            "`sparkwright rollback` to undo it.",
        )
    record = state.required(target)
    release = record.chosen
    with console.step("reading every byte" if deep else "looking at sizes and times"):
        faults = health.look(target, record, deep=deep)
    kernels = state.folder(target) / "caches" / record.caches.get(release.release, "")
    rows = [
        ["set", release.name],
        ["channel", release.channel],
        ["release", release.release],
        ["index", release.index],
        ["packages", str(len(record.placed))],
        ["earlier sets", ", ".join(old.name for old in reversed(record.history)) or "none"],
        ["compiled kernels", str(kernels)],
    ]
    console.table(str(target.prefix), ["", ""], rows, result=True)
    if faults:
        raise InstallError(
            "environment-broken",
            f"{release.name} in {target.prefix} was changed.",
            details=[str(fault) for fault in faults],
            data={"state": "broken", "faults": msgspec.to_builtins(faults)},
        )
    console.result(
        "intact: every byte is as it was installed"
        if deep
        else "intact: no size, time or RECORD differs (--deep reads every byte)"
    )
    return {
        "state": "intact",
        "set": release.name,
        "release": release.release,
        "read": "every byte" if deep else "sizes and times",
        "caches": caches.present(target),
    }
