"""What patches are tried on besides the locked source: releases of the package index, and commits of the upstream repository."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import msgspec

from sparkwright import digest
from sparkwright.cherry_picks import history
from sparkwright.cherry_picks.patch import Patch
from sparkwright.cherry_picks.upstream import Base
from sparkwright.console import console
from sparkwright.errors import NotProvided, SourceUnreachable
from sparkwright.forks import download, packageindex, sources
from sparkwright.forks.lock import FileLock
from sparkwright.forks.mirror import Mirror
from sparkwright.forks.session import Session


class Release(msgspec.Struct, frozen=True):
    """A release on the package index, not downloaded yet."""

    project: str
    version: str
    filename: str
    sha256: str


class _Imported(msgspec.Struct, frozen=True):
    tree: str


def releases(project: str, *, after: str = "", upto: str = "") -> list[Release]:
    """
    Return the final releases of *project* that have an sdist, oldest first.

    Args:
        after, upto: Versions that bound the list; *upto* is part of it.

    Raises:
        SourceUnreachable: The index does not answer, or has no such project.
    """
    from packaging.utils import InvalidSdistFilename, parse_sdist_filename
    from packaging.version import Version

    found = {}
    for file in packageindex.files(project):
        try:
            _, version = parse_sdist_filename(file.name)
        except InvalidSdistFilename:
            continue
        if file.name.endswith(".tar.gz") and file.sha256 and not version.is_prerelease:
            found[version] = Release(project, str(version), file.name, file.sha256)
    lowest, highest = Version(after) if after else None, Version(upto) if upto else None
    return [found[one] for one in sorted(found) if (lowest is None or one > lowest) and (highest is None or one <= highest)]


def of_release(session: Session, release: Release) -> Base:
    """
    Return the base of *release*, in the object database.

    Raises:
        Offline, SourceUnreachable, SourceMismatch, ArchiveUnsafe: It cannot be had.
    """
    key = digest.key("release", {"sha256": release.sha256})
    known = session.store.get("release", key, _Imported)
    if not known or not session.objects.has(f"{known.tree}^{{tree}}"):
        with console.step(f"release {release.project} {release.version}"), session.store.lock("objects"):
            known = _Imported(sources.import_file(session, FileLock(release.project, release.version, release.filename, release.sha256, 0)))
        session.store.put("release", key, known)
    return Base(release.version, known.tree)


def of_commit(session: Session, mirror: Mirror, name: str, commit: str, patches: Collection[Patch]) -> Base:
    """
    Return the base of the upstream *commit*: its trees, and of its files those that *patches* touch.

    Raises:
        Offline, SourceUnreachable: The repository may not be asked, or does not have them.
    """
    mirror.commit(commit)
    tree = session.objects.resolve(f"{commit}^{{tree}}")
    wanted = {path for one in patches for path in one.files}
    mirror.files({blob for path, (_, blob) in session.objects.paths(tree).items() if path in wanted})
    return Base(name, tree, commit)


def of_source(session: Session, fork: str) -> Base:
    """Return the locked source of *fork* as a base."""
    fetched = sources.fetch(session, fork)
    locked = session.lock.forks[fork]
    version = locked.sdist.version if locked.sdist else locked.git.ref if locked.git else ""
    return Base(version or fork, fetched.tree, fetched.pin if fetched.kind == "git" else "")


def named(session: Session, fork: str, mirror: Mirror | None, name: str, patches: Collection[Patch]) -> Base:
    """
    Return what *name* means: a version on the index, or a branch, tag or commit of the upstream repository.

    Raises:
        NotProvided: It means nothing of the kind.
        Offline, SourceUnreachable: Nobody could be asked.
    """
    spec = session.project.fork(fork).sources.sdist
    if spec and (found := [one for one in _releases_or_none(spec.name) if one.version == name]):
        return of_release(session, found[0])
    if mirror is not None:
        whole = len(name) == 40 and set(name) <= set("0123456789abcdef")
        commit = name if whole else mirror.history(name, newest=not session.offline)
        if commit:
            return of_commit(session, mirror, name, commit, patches)
    raise NotProvided(f"{name} is neither a release nor a branch, tag or commit of {fork}.")


def _releases_or_none(project: str) -> list[Release]:
    try:
        return releases(project)
    except SourceUnreachable as error:
        console.note(error.what)
        return []


def later(session: Session, fork: str, mirror: Mirror | None, branch: str, patches: Collection[Patch], *, every: bool) -> Iterator[Base]:
    """
    Yield what came after the locked source: the newest release (or *every* one), then the tip of the upstream branch.

    What cannot be reached is left out, and that is said.
    """
    sdist = session.lock.forks[fork].sdist
    if sdist:
        found = _releases_or_none(sdist.name)
        newer = [one for one in found if one in releases_after(found, sdist.version)]
        for release in newer if every else newer[-1:]:
            yield of_release(session, release)
    if mirror is not None:
        try:
            tip = mirror.history(branch, newest=True)
            if tip:
                name = f"{branch} {history.commit(session.objects, tip).date}"
                yield of_commit(session, mirror, name, tip, patches)
        except SourceUnreachable as error:
            console.note(f"{branch} of {fork} is left out: {error.what}")


def releases_after(found: Collection[Release], version: str) -> list[Release]:
    """Return those of *found* that are newer than *version*."""
    from packaging.version import Version

    return [one for one in found if Version(one.version) > Version(version)]
