"""The table "needed up to": every patch idea on every release of its package, and what that comes to."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from sparkwright.cherry_picks import patch_probes, upstream_revisions
from sparkwright.cherry_picks.patch_probes import Finding, NeededUpTo, Package
from sparkwright.cherry_picks.upstream_revisions import Release
from sparkwright.core.console import console
from sparkwright.forks import package_index
from sparkwright.forks.context import Session
from sparkwright.forks.errors import SourceError


class Row(msgspec.Struct, frozen=True):
    """An idea, the package whose releases were asked, what they come to, and what each of them said."""

    package: str
    idea: NeededUpTo
    verdict: str
    findings: tuple[Finding, ...]


def releases(session: Session, name: str, package: Package, upto: str = "") -> list[Release]:
    """
    Return the releases of the package *name* that are asked, in order, downloaded or not.

    Args:
        upto: The last version of a package that has sdists; empty for the newest.

    Raises:
        source-unreachable: The index does not answer, or lacks a wheel that the data names.
    """
    from packaging.version import Version

    if not package.wheels:
        found = upstream_revisions.known_releases(session, name)
        return [
            one for one in found if Version(one.version) >= Version(package.since) and not (upto and Version(one.version) > Version(upto))
        ]
    return [_wheel(version, filename, package.folder) for version, filename in package.wheels.items()]


def _wheel(version: str, filename: str, folder: str) -> Release:
    project = filename.split("-", maxsplit=1)[0].replace("_", "-")
    return Release(project, version, filename, package_index.find(project, filename).sha256, folder=folder)


def derive(session: Session, upto: Sequence[tuple[str, str]] = ()) -> list[Row]:
    """
    Return a row per idea, in the order of the file.

    Args:
        upto: Packages and the last version of each that is asked.

    Raises:
        not-provided: A package of an idea has no releases to ask.
        offline, source-unreachable, source-mismatch: A release cannot be had.
    """
    book, last = patch_probes.book(session.project.root), dict(upto)
    wanted = dict.fromkeys(idea.package for idea in book.ideas)
    trees: dict[str, list[tuple[str, str]]] = {}
    for name in wanted:
        found = releases(session, name, book.packages.get(name, Package()), last.get(name, ""))
        if not found:
            raise SourceError(
                "not-provided",
                f"No release of {name} can be asked.",
                todo="Run this with a connection once; the releases stay in the store.",
            )
        with console.progress(f"releases of {name}", len(found)) as progress:
            trees[name] = []
            for number, one in enumerate(found):
                trees[name].append((one.version, upstream_revisions.of_release(session, one).tree))
                progress.update(number + 1, one.version)
    rows = []
    for idea in book.ideas:
        findings = [patch_probes.examine(session.objects, tree, idea, version) for version, tree in trees[idea.package]]
        came = patch_probes.needed_up_to(findings)
        rows.append(Row(idea.package, came, came.verdict, tuple(findings)))
    return rows
