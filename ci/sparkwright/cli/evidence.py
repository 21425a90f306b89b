"""
``sparkwright evidence``: what is claimed of a wheel at hand, by whom, and whether it holds, from an
index or a folder.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from sparkwright.core.console import console
from sparkwright.core.errors import SparkwrightError, UsageError
from sparkwright.forks.context import StandaloneContext
from sparkwright.gates.ladder import RUNGS
from sparkwright.release.errors import TrustError
from sparkwright.release.evidence import check, inside
from sparkwright.release.evidence.check import Checked
from sparkwright.release.evidence.gathered import Folder
from sparkwright.release.manifest.records import Missing, Proved, Speed, Wheel
from sparkwright.release.signing import trust


class Told(msgspec.Struct, frozen=True):
    """
    What holds of a wheel.

    Attributes:
        release, channel, yanked: As the index lists it; empty where a folder was asked.
        signers: Statement → who signed it.
        rungs: State of each, computed from the checks behind it. *missing*: what it lacks for
            ``verified``.
    """

    file: str
    sha256: str
    signers: dict[str, str]
    rungs: dict[str, str]
    missing: tuple[Missing, ...]
    speeds: tuple[Speed, ...]
    release: str = ""
    channel: str = ""
    yanked: str = ""


def run(session: StandaloneContext, arguments: argparse.Namespace) -> int:
    """Check each wheel, show what holds, and fail with the first that does not."""
    if arguments.folder and (arguments.at or arguments.signed_for):
        raise UsageError(
            "usage",
            "--from looks at a folder of files, --at and --signed-for at an index; give one of "
            "them.",
        )
    look = _from_folder(arguments) if arguments.folder else _from_index(session, arguments)
    told: list[Told] = []
    failures: list[SparkwrightError] = []
    for path in arguments.wheels:
        try:
            with console.step(f"check {path.name}"):
                found = list(look(path))
        except SparkwrightError as error:
            failures.append(error)
            console.result(f"{path.name}: {error.reference}")
        else:
            told += found
            for one in found:
                _show(one)
    console.document(
        {"wheels": told, "failed": {error.what: error.reference for error in failures}}
    )
    if failures:
        raise failures[0]
    return 0


def _from_index(session: StandaloneContext, arguments: argparse.Namespace) -> Any:
    from sparkwright.release.client import install

    index = install.opened(
        session, install.Wish(arguments.at, tuple(arguments.key), arguments.signed_for)
    )

    def look(path: Path) -> Iterator[Told]:
        at_hand = inside.wheel_at(path)
        # The newest first: what is asked about is mostly what was published last, and promoting
        # gives a release another proof.
        for entry in reversed(index.manifest.entries):
            release = index.release(entry)
            wheel = next((one for one in release.wheels if one.sha256 == at_hand.sha256), None)
            if wheel is None:
                continue
            if wheel.filename != path.name:
                raise TrustError(
                    "evidence-invalid",
                    f"{path.name} is published under another name.",
                    details=[wheel.filename],
                )
            about = [one for one in index.proof(entry).wheels if one.wheel == wheel.sha256]
            if len(about) != 1:
                raise TrustError(
                    "evidence-invalid",
                    f"The proof of {entry.name} says nothing of {path.name}, or twice.",
                )
            fork = next((one for one in release.forks if one.name == wheel.fork), None)
            found = check.checked(wheel, fork, about[0], index.evidence, index.trust)
            inside.check(path, found)
            yield msgspec.structs.replace(
                _told(wheel, about[0], found),
                release=entry.name,
                channel=entry.channel,
                yanked=entry.yanked,
            )
            return
        raise TrustError(
            "evidence-invalid",
            f"The index {index.manifest.url} holds nothing of {path.name}.",
            details=[f"sha256 {at_hand.sha256}"],
            todo="Ask the index that it came from, or take it for what it is: a file that nobody "
            "vouches for.",
        )

    return look


def _from_folder(arguments: argparse.Namespace) -> Any:
    carried = trust.carried()
    believed = trust.find(
        carried.index if carried else arguments.folder.absolute().as_uri(), arguments.key
    )
    folder = Folder(arguments.folder, believed)

    def look(path: Path) -> Iterator[Told]:
        for wheel, proved in folder.proofs(inside.wheel_at(path)):
            found = check.checked(wheel, None, proved, folder.read, believed)
            inside.check(path, found)
            yield _told(wheel, proved, found)

    return look


def _told(wheel: Wheel, proved: Proved, found: Checked) -> Told:
    return Told(
        wheel.filename,
        wheel.sha256,
        found.signers,
        dict(found.rungs),
        proved.missing,
        proved.speeds,
    )


def _show(one: Told) -> None:
    rows = [[kind, "holds", signer] for kind, signer in one.signers.items()]
    rows += [[name, state, RUNGS.get(name, "")] for name, state in one.rungs.items()]
    rows += [
        [f"missing: {lack.rung}", f"{lack.state} ({lack.reference})", lack.says]
        for lack in one.missing
    ]
    console.table(
        f"{one.file}  sha256 {one.sha256}",
        ["what", "state", "by whom, or what it is"],
        rows,
        result=True,
    )
    where = (
        f"{one.release}, {one.channel}{f', yanked: {one.yanked}' if one.yanked else ''}: "
        if one.release
        else ""
    )
    lacks = f"{len(one.missing)} thing(s)" if one.missing else "nothing"
    console.result(f"{where}lacks {lacks} for verified")
