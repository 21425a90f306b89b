"""
What the verbs on an environment have in common: which one is meant, what was done there, and how it
is.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from sparkwright.core.console import console
from sparkwright.core.errors import UsageError
from sparkwright.release import environment
from sparkwright.release.client import caches, health, state
from sparkwright.release.client.install import Done
from sparkwright.release.errors import InstallError

#: What pipx and uv leave in the environments that they make for one program.
TOOLS = ("pipx_metadata.json", "uv-receipt.toml")
#: Names of packages in one cell of a table.
FEW = 12


def chosen(into: Path | None) -> Path:
    """
    Return the environment that is meant: ``--into``, else the active one, else the one that this
    program runs in.

    Raises:
        UsageError: None is named, and the program runs in none, or in one that was made for it
            alone.
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


def show(done: Done) -> None:
    """Print what was done."""
    words = {
        "installed": f"{done.name} is installed in {done.into}",
        "back": f"{done.name} is back in {done.into}",
        "there already": f"{done.name} is in {done.into} already, untouched",
        "would install": f"{done.name} would be installed in {done.into}; nothing was changed",
    }
    rows = [
        [what, str(len(names)), few(names)]
        for what, names in (("new", done.came), ("removed", done.went))
        if names
    ]
    rows += [["unchanged", str(len(done.stayed)), ""]] if done.stayed else []
    rows += [["edited", "", f"{edit.name}: {edit.file}, {edit.state}"] for edit in done.edits]
    rows += (
        [["not proved", "", ", ".join(dict.fromkeys(one.rung for one in done.missing))]]
        if done.missing
        else []
    )
    if done.state == "there already" or not rows:
        console.result(words[done.state])
    else:
        console.table(words[done.state], ["", ">packages", ""], rows, result=True)


def few(names: Sequence[str]) -> str:
    """
    Return *names*, or, of more than a person reads, the first of them and how many more; ``--json``
    has them all.
    """
    return (
        ", ".join(names)
        if len(names) <= FEW
        else f"{', '.join(names[:FEW])} and {len(names) - FEW} more"
    )


def doctor(into: Path, *, deep: bool) -> int:
    """
    Say which set is installed, and whether something broke it.

    Raises:
        nothing-installed: None is. environment-broken: Something did, or an installation was cut
            off.
    """
    place = environment.probe(into)
    half = state.installing(place)
    if half is not None:
        name = half.chosen.name if half.chosen else "the removal of everything"
        before = half.before.chosen.name if half.before else "nothing"
        raise InstallError(
            "environment-broken",
            f"{place.prefix} is half installed: {name} was cut off.",
            details=[f"there was before: {before}"],
            data={"state": "half installed"},
            todo="Run the same `sparkwright install` (or `uninstall`) again to finish, or "
            "`sparkwright rollback` to undo it.",
        )
    known = state.required(place)
    with console.step("reading every byte" if deep else "looking at sizes and times"):
        faults = health.look(place, known, deep=deep)
    rows = [
        ["set", known.chosen.name],
        ["channel", known.chosen.channel],
        ["release", known.chosen.release],
        ["index", known.chosen.index],
    ]
    rows += [
        ["packages", str(len(known.placed))],
        ["earlier sets", ", ".join(old.name for old in reversed(known.history)) or "none"],
    ]
    rows += [
        [
            "compiled kernels",
            str(state.folder(place) / "caches" / known.caches.get(known.chosen.release, "")),
        ]
    ]
    console.table(str(place.prefix), ["", ""], rows, result=True)
    document = {
        "state": "broken" if faults else "intact",
        "set": known.chosen.name,
        "release": known.chosen.release,
        "faults": faults,
    }
    console.document(
        {
            **document,
            "read": "every byte" if deep else "sizes and times",
            "caches": caches.present(place),
        }
    )
    if faults:
        data = {"state": "broken", "faults": msgspec.to_builtins(faults)}
        raise InstallError(
            "environment-broken",
            f"{known.chosen.name} in {place.prefix} was changed.",
            details=[str(fault) for fault in faults],
            data=data,
        )
    console.result(
        "intact: every byte is as it was installed"
        if deep
        else "intact: no size, time or RECORD differs (--deep reads every byte)"
    )
    return 0
