"""
The commands on installations: ``install list rollback uninstall doctor run``.

`add_arguments` adds their arguments for whichever program has them; `main` is the program of the
distribution `sparkwright-install`.
"""

import argparse
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import platformdirs

from sparkwright import __version__
from sparkwright.client import COMMANDS, ClientError, install as installation
from sparkwright.client.environment import Marker, Prefix, default_prefix
from sparkwright.client.folders import without_links
from sparkwright.client.index import Index, newest_first, open_index, seen_states
from sparkwright.client.records import CHANNELS
from sparkwright.core.console import console
from sparkwright.core.errors import CommandError, FileError, UsageError
from sparkwright.core.files import list_folder
from sparkwright.core.process import cache_variables
from sparkwright.core.program import execute, run_parsed


def nonempty(text: str) -> str:
    """Return *text*; an option without a value is a mistake."""
    if not text:
        raise argparse.ArgumentTypeError("it is empty")
    return text


def add_index(parser: argparse.ArgumentParser) -> None:
    """Add the options that name an index and its first root."""
    parser.add_argument(
        "--index",
        type=nonempty,
        metavar="URL",
        default=os.environ.get("SPARKWRIGHT_INDEX") or None,
        help="the index of releases, a URL or a folder (SPARKWRIGHT_INDEX)",
    )
    parser.add_argument(
        "--trust",
        type=nonempty,
        metavar="FINGERPRINT",
        help="sha256 of the first root of a new index, as its publisher states it",
    )


#: Commands → the words and options of an argument that they have.
_ARGUMENTS: tuple[tuple[Collection[str], str, dict[str, Any]], ...] = (
    (
        ("install", "list"),
        "--channel",
        {"choices": CHANNELS, "default": "verified", "help": "default: %(default)s"},
    ),
    (
        ("install", "list"),
        "--stack",
        {
            "type": nonempty,
            "help": "only releases of this stack; `install` stays with the current one's",
        },
    ),
    (
        ("install",),
        "--version",
        {"type": nonempty, "metavar": "NAME", "help": "this release, even if it was yanked"},
    ),
    (
        ("install",),
        "--dry-run",
        {
            "action": "store_true",
            "help": "download and check everything, and create no environment",
        },
    ),
    (
        ("install",),
        "--warm",
        {
            "type": nonempty,
            "metavar": "RECIPE",
            "help": "also fetch what the gates compiled for this recipe, for a faster first start",
        },
    ),
    (("rollback",), "--yes", {"action": "store_true", "help": "even if that release was yanked"}),
    (
        ("uninstall",),
        "name",
        {"type": nonempty, "nargs": "?", "metavar": "NAME", "help": "default: the current one"},
    ),
    (("doctor",), "--deep", {"action": "store_true", "help": "read every file"}),
    (
        ("run",),
        "program",
        {
            "nargs": argparse.REMAINDER,
            "metavar": "-- PROGRAM ...",
            "help": "and its arguments",
        },
    ),
)


def add_arguments(parsers: Mapping[str, argparse.ArgumentParser]) -> None:
    """Add the arguments of the commands in *parsers*."""
    functions = {
        "install": install,
        "list": show_releases,
        "rollback": rollback,
        "uninstall": uninstall,
        "doctor": doctor,
        "run": run_program,
    }
    for command, parser in parsers.items():
        parser.set_defaults(run=functions[command])
        parser.add_argument(
            "--prefix",
            type=nonempty,
            metavar="DIR",
            default=str(default_prefix()),
            help="the folder of the installations (SPARKWRIGHT_PREFIX; %(default)s)",
        )
        if command in ("install", "list"):
            add_index(parser)
        for commands, name, options in _ARGUMENTS:
            if command in commands:
                parser.add_argument(name, **options)


def _open_index(arguments: argparse.Namespace, prefix: Prefix) -> Index:
    marker = prefix.marker(prefix.current) or next(iter(prefix.installed().values()), None)
    address = arguments.index or (marker.index if marker else "")
    return open_index(prefix.root / "trust", address, arguments.trust or "")


def _yanked(prefix: Prefix, marker: Marker) -> str:
    """
    Return why the release of *marker* was yanked, as this machine last saw its index; empty if it
    was not.
    """
    try:
        states = seen_states(prefix.root / "trust", marker.index)
    except (FileError, ClientError) as error:
        console.warn(f"whether {marker.name} was yanked is not known: {error.what}")
        return ""
    return states[marker.name].yanked if marker.name in states else ""


def install(arguments: argparse.Namespace) -> dict[str, Any]:
    """Install a release."""
    prefix = Prefix(Path(arguments.prefix))
    cache = without_links(
        Path(
            os.environ.get("SPARKWRIGHT_CACHE_DIR") or platformdirs.user_cache_path("sparkwright"),
            "client",
        )
    )
    index = _open_index(arguments, prefix)
    result = _show(
        installation.install(
            prefix,
            cache,
            index,
            channel=arguments.channel,
            stack=arguments.stack or "",
            version=arguments.version or "",
            dry_run=arguments.dry_run,
        )
    )
    if not arguments.warm or arguments.dry_run:
        return result
    packs = installation.add_packs(prefix, cache, index, arguments.warm)
    for pack in packs:
        console.result(f"  warm pack: {pack.text}")
    return {**result, "packs": packs}


def _show(result: dict[str, Any]) -> dict[str, Any]:
    done = {
        "there already": "is installed already, untouched",
        "would install": "would be installed; nothing was created",
        "would switch": "would be current; nothing was changed",
        "installed": "is installed, and current",
        "switched": "is current",
    }[result["state"]]
    console.result(f"{result['name']} {done}: {result['folder']}")
    added, removed = len(result["added"]), len(result["removed"])
    console.result(f"  packages: {added} added, {removed} removed, {result['unchanged']} unchanged")
    return {"release": result}


def show_releases(arguments: argparse.Namespace) -> dict[str, Any]:
    """Show the releases of the index."""
    prefix = Prefix(Path(arguments.prefix))
    index, installed = _open_index(arguments, prefix), prefix.installed()
    states = {
        name: index.states[name]
        for name in newest_first(index.states)
        if arguments.stack in (None, index.states[name].stack)
        and arguments.channel in ("candidate", index.states[name].channel)
    }
    console.table(
        str(index),
        ["  release", "channel", "made", "Python", "machine", "missing for verified", ""],
        [
            [
                ("* " if name == prefix.current else "  ") + name,
                state.channel,
                state.made[:10],
                " ".join(state.pythons),
                " ".join(state.machines),
                ", ".join(state.missing),
                f"yanked: {state.yanked}" if state.yanked else "installed" * (name in installed),
            ]
            for name, state in states.items()
        ],
        result=True,
    )
    if others := len(index.states) - len(states):
        console.note(f"{others} more with --channel candidate, or another --stack")
    return {
        "index": str(index),
        "releases": states,
        "installed": sorted(installed),
        "current": prefix.current,
    }


def rollback(arguments: argparse.Namespace) -> dict[str, Any]:
    """Go back to the release before."""
    prefix = Prefix(Path(arguments.prefix))
    return _show(installation.rollback(prefix, confirmed=arguments.yes, yanked=_yanked))


def uninstall(arguments: argparse.Namespace) -> dict[str, Any]:
    """Remove a release."""
    name = installation.uninstall(Prefix(Path(arguments.prefix)), arguments.name or "")
    console.result(f"{name} is removed")
    return {"removed": name}


def doctor(arguments: argparse.Namespace) -> dict[str, Any]:
    """Show the condition of the installed releases."""
    prefix = Prefix(Path(arguments.prefix))
    installed = prefix.installed()
    releases, rows, faults = dict[str, dict[str, Any]](), [], list[str]()
    for folder in list_folder(prefix.root / "releases", "[!.]*"):
        name, current = folder.name, folder.name == prefix.current
        yanked = _yanked(prefix, installed[name]) if name in installed else ""
        changes = installation.find_changes(prefix, name, deep=arguments.deep)
        releases[name] = {"current": current, "yanked": yanked, "faults": changes}
        rows.append(
            [
                f"{'*' if current else ' '} {name}",
                f"yanked: {yanked}" if yanked else "",
                "; ".join(changes[:3]) or "intact",
            ]
        )
        faults += [f"{name}: {change}" for change in changes]
    console.table(str(prefix.root), ["  release", "", "condition"], rows, result=True)
    if faults:
        raise ClientError(
            "environment-broken",
            "An installed release is not as it was made.",
            details=faults[:20],
            data={"releases": releases},
        )
    return {"releases": releases}


def run_program(arguments: argparse.Namespace) -> int:
    """Replace this process by a program of the current release."""
    prefix, words = Prefix(Path(arguments.prefix)), arguments.program
    words = words[1:] if words[:1] == ["--"] else words
    if not words:
        raise UsageError("usage", "No program is named.", todo="sparkwright run -- vllm serve ...")
    if not prefix.marker(prefix.current):
        raise ClientError(
            "nothing-installed",
            f"{prefix.root} has no current release.",
            todo="Run `sparkwright install`, or `sparkwright rollback` to another one.",
        )
    folder = prefix.environment_folder(prefix.current)
    caches, releases = cache_variables(folder), f"{prefix.root}/releases/"
    inherited = {
        name: value
        for name, value in os.environ.items()
        # A shell may have the caches.env of another release.
        if name not in ("PYTHONHOME", "PYTHONPATH")
        and not (name in caches and value.startswith(releases))
    }
    environment = {**caches, **inherited, "VIRTUAL_ENV": str(folder)}
    environment["PATH"] = f"{folder / 'bin'}:{environment.get('PATH', '/usr/bin:/bin')}"
    try:
        os.execvpe(words[0], words, environment)  # noqa: S606  it is the user's command
    except OSError as error:
        raise CommandError(
            "tool-missing",
            f"{words[0]} cannot be started; it was looked for in {folder / 'bin'} and in PATH.",
            details=[str(error)],
        ) from error


def run(words: Sequence[str]) -> int:
    """Run the command line *words*; expected failures are raised as exceptions."""
    parser = argparse.ArgumentParser(
        prog="sparkwright", description="Install releases of patched, audited wheels."
    )
    parser.add_argument("--version", action="version", version=f"sparkwright-install {__version__}")
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--json", action="store_true", help="print one JSON document")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    add_arguments(
        {
            name: commands.add_parser(name, help=summary, parents=[shared])
            for name, summary in COMMANDS.items()
        }
    )
    return run_parsed(parser.parse_args(words))


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line, and return the exit code."""
    return execute(run, words)


if __name__ == "__main__":
    sys.exit(main())
