"""What patches are tried on besides the locked source: releases of the package index, and commits of the upstream repository."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import msgspec

from sparkwright.cherry_picks import history
from sparkwright.cherry_picks.already_upstream import Base
from sparkwright.cherry_picks.patch import Patch
from sparkwright.core import digest
from sparkwright.core.console import console
from sparkwright.forks import fetch, package_index
from sparkwright.forks.context import Session
from sparkwright.forks.errors import SourceError
from sparkwright.forks.lock import FileLock
from sparkwright.forks.mirror import Mirror


class Release(msgspec.Struct, frozen=True):
    """
    A release on the package index, not downloaded yet.

    Attributes:
        day: Of its upload (UTC), where the index tells.
        folder: Of a wheel, the folder inside it that is read; an sdist is read whole.
    """

    project: str
    version: str
    filename: str
    sha256: str
    day: str = ""
    folder: str = ""


class _Imported(msgspec.Struct, frozen=True):
    tree: str


class _Listed(msgspec.Struct, frozen=True):
    releases: tuple[Release, ...]


def releases(project: str, *, after: str = "", upto: str = "") -> list[Release]:
    """
    Return the final releases of *project* that have an sdist, oldest first.

    Args:
        after, upto: Versions that bound the list; *upto* is part of it.

    Raises:
        source-unreachable: The index does not answer, or has no such project.
    """
    from packaging.utils import InvalidSdistFilename, parse_sdist_filename
    from packaging.version import Version

    found = {}
    for file in package_index.files(project):
        try:
            _, version = parse_sdist_filename(file.name)
        except InvalidSdistFilename:
            continue
        if file.name.endswith(".tar.gz") and file.sha256 and not version.is_prerelease:
            found[version] = Release(project, str(version), file.name, file.sha256, file.day)
    lowest, highest = Version(after) if after else None, Version(upto) if upto else None
    return [found[one] for one in sorted(found) if (lowest is None or one > lowest) and (highest is None or one <= highest)]


def of_release(session: Session, release: Release) -> Base:
    """
    Return the base of *release*, in the object database.

    Raises:
        offline, source-unreachable, source-mismatch, archive-unsafe: It cannot be had.
    """
    known = _imported(session, release)
    if not known:
        file = FileLock(release.project, release.version, release.filename, release.sha256, 0, release.folder)
        with console.step(f"release {release.project} {release.version}"), session.store.lock("objects"):
            known = _Imported(fetch.import_file(session, file))
        session.store.put("release", _key(release), known)
    return Base(release.version, known.tree)


def _imported(session: Session, release: Release) -> _Imported | None:
    known = session.store.get("release", _key(release), _Imported)
    return known if known and session.objects.has(f"{known.tree}^{{tree}}") else None


def _key(release: Release) -> str:
    return digest.key("release", {"sha256": release.sha256, "folder": release.folder})


def of_commit(session: Session, mirror: Mirror, name: str, commit: str, patches: Collection[Patch]) -> Base:
    """
    Return the base of the upstream *commit*: its trees, and of its files those that *patches* touch.

    Raises:
        offline, source-unreachable: The repository may not be asked, or does not have them.
    """
    mirror.commit(commit)
    tree = session.objects.resolve(f"{commit}^{{tree}}")
    wanted = {path for one in patches for path in one.files}
    mirror.files({blob for path, (_, blob) in session.objects.paths(tree).items() if path in wanted})
    return Base(name, tree, commit)


def of_source(session: Session, fork: str) -> Base:
    """Return the locked source of *fork* as a base."""
    fetched = fetch.fetch(session, fork)
    locked = session.lock.forks[fork]
    version = locked.sdist.version if locked.sdist else locked.git.ref if locked.git else ""
    return Base(version or fork, fetched.tree, fetched.pin if fetched.kind == "git" else "")


def named(session: Session, fork: str, mirror: Mirror | None, name: str, patches: Collection[Patch]) -> Base:
    """
    Return what *name* means: a version on the index, or a branch, tag or commit of the upstream repository.

    Raises:
        not-provided: It means nothing of the kind.
        offline, source-unreachable: Nobody could be asked.
    """
    spec = session.project.fork(fork).sources.sdist
    if spec and (found := [one for one in known_releases(session, spec.name) if one.version == name]):
        return of_release(session, found[0])
    if mirror is not None:
        whole = len(name) == 40 and set(name) <= set("0123456789abcdef")
        commit = name if whole else mirror.history(name, newest=not session.offline)
        if commit:
            return of_commit(session, mirror, name, commit, patches)
    raise SourceError("not-provided", f"{name} is neither a release nor a branch, tag or commit of {fork}.")


def known_releases(session: Session, project: str) -> list[Release]:
    """Return the releases of *project* as `listed`; none where the index does not answer."""
    try:
        return listed(session, project)
    except SourceError as error:
        if error.reference != "source-unreachable":
            raise
        console.note(error.what)
        return []


def listed(session: Session, project: str) -> list[Release]:
    """Return the releases of *project*; where the index may not be asked, those that are in the store, of which it told last time."""
    key = digest.key("releases", project)
    if session.offline:
        known = session.store.get("releases", key, _Listed)
        return [one for one in known.releases if _imported(session, one)] if known else []
    found = releases(project)
    session.store.put("releases", key, _Listed(tuple(found)))
    return found


def between(session: Session, project: str, start: str, end: str) -> list[Release]:
    """
    Return the releases of *project* from *start* to *end*, or to the newest, oldest first; with --offline, those that are in the store.

    Raises:
        not-provided: An end is no release, or they are the wrong way round.
        source-unreachable: The index does not answer.
    """
    found = listed(session, project)
    names = [one.version for one in found]
    if unknown := [name for name in (start, end) if name and name not in names]:
        where = "in the store" if session.offline else "on the package index"
        raise SourceError(
            "not-provided", f"There is no release {project} {unknown[0]} {where}.", details=[f"there are: {', '.join(names) or 'none'}"]
        )
    if end and names.index(start) > names.index(end):
        raise SourceError("not-provided", f"{project} {start} is later than {end}.", todo="Choose ends with --from and --to.")
    return found[names.index(start) : names.index(end) + 1 if end else None]


def later(session: Session, fork: str, mirror: Mirror | None, branch: str, patches: Collection[Patch], *, every: bool) -> Iterator[Base]:
    """
    Yield what came after the locked source, oldest first: the newest release (or *every* one), and the tip of the upstream branch.

    What cannot be reached is left out, and that is said.
    """
    sdist = session.lock.forks[fork].sdist
    newer = releases_after(known_releases(session, sdist.name), sdist.version) if sdist else []
    tip = _tip(session, mirror, branch, patches) if mirror is not None else None
    for release in newer if every else newer[-1:]:
        if tip and release.day > tip.name.removeprefix(f"{branch} "):
            yield tip
            tip = None
        try:
            yield of_release(session, release)
        except SourceError as error:
            if error.reference != "source-unreachable":
                raise
            console.warn(f"{release.project} {release.version} is left out: {error.what}")
    if tip:
        yield tip


def _tip(session: Session, mirror: Mirror, branch: str, patches: Collection[Patch]) -> Base | None:
    try:
        commit = mirror.history(branch, newest=not session.offline)
        day = history.commit(session.objects, commit).date if commit else ""
        return of_commit(session, mirror, f"{branch} {day}", commit, patches) if commit else None
    except SourceError as error:
        if error.reference not in {"offline", "source-unreachable"}:
            raise
        console.note(f"{branch} of {mirror.url} is left out: {error.what}")
        return None


def releases_after(found: Collection[Release], version: str) -> list[Release]:
    """Return those of *found* that are newer than *version*."""
    from packaging.version import Version

    return [one for one in found if Version(one.version) > Version(version)]
