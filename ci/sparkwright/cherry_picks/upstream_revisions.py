"""
The revisions of an upstream on which patches are tried: the locked source, releases on the package
index, commits.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterator
from functools import cached_property

import msgspec

from sparkwright.cherry_picks import history, ledger
from sparkwright.cherry_picks.ledger import Ledger
from sparkwright.cherry_picks.patch import Patch
from sparkwright.core import digest
from sparkwright.core.console import console
from sparkwright.forks import fetch, package_index
from sparkwright.forks.context import RunContext
from sparkwright.forks.errors import SourceError
from sparkwright.forks.lock import FileLock
from sparkwright.forks.mirror import Mirror


class Base(msgspec.Struct, frozen=True):
    """
    A tree on which patches are tried.

    Attributes:
        name: The release, branch or commit, for people.
        commit: Empty if only the tree is known, as from an sdist.
    """

    name: str
    tree: str
    commit: str = ""


class Release(msgspec.Struct, frozen=True):
    """
    A release on the package index.

    Attributes:
        day: Of its upload (UTC), if the index states it.
        folder: Of a wheel, the folder inside it that is read; an sdist is read whole.
    """

    project: str
    version: str
    filename: str
    sha256: str
    day: str = ""
    folder: str = ""


@dataclasses.dataclass(frozen=True)
class Upstream:
    """
    The upstream of a fork: its ledger, and the mirror of the repository that the ledger names.

    Attributes:
        draft: A ledger that is not written yet, in place of the checkout's.
    """

    session: RunContext
    fork: str
    draft: Ledger | None = None

    @cached_property
    def book(self) -> Ledger | None:
        """The ledger of the fork, if there is one."""
        return self.draft or ledger.load(self.session.project.root, self.fork)

    @cached_property
    def mirror(self) -> Mirror | None:
        """The mirror of the repository, if there is a ledger."""
        return self.session.mirror(self.book.url) if self.book else None

    @property
    def tip(self) -> str:
        """
        The newest commit of the branch that is in the store; empty if its history is not there.
        """
        return (self.mirror.known(self.book.branch) or "") if self.mirror and self.book else ""

    def locked(self) -> Base:
        """Return the locked source of the fork."""
        source, locked = fetch.fetch(self.session, self.fork), self.session.lock.forks[self.fork]
        version = locked.sdist.version if locked.sdist else locked.git.ref if locked.git else ""
        return Base(version or self.fork, source.tree, source.pin if source.kind == "git" else "")

    def at_commit(self, name: str, commit: str, patches: Collection[Patch]) -> Base:
        """
        Return the base of an upstream commit, whose trees and files that *patches* change are then
        in the store.

        Raises:
            offline, source-unreachable: The repository may not be asked, or does not have them.
        """
        assert self.mirror
        self.mirror.commit(commit)
        tree = self.session.objects.resolve(f"{commit}^{{tree}}")
        wanted = {path for patch in patches for path in patch.files}
        self.mirror.files(
            {blob for path, (_, blob) in self.session.objects.paths(tree).items() if path in wanted}
        )
        return Base(name, tree, commit)

    def commit(self, name: str) -> str:
        """
        Return the commit that *name* (a branch, a tag, or the beginning of a commit id) means;
        empty if there is none.
        """
        if not self.mirror:
            return ""
        if re.fullmatch(r"[0-9a-f]{7,40}", name):
            words = ["rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}"]
            status, out, _ = self.session.objects.run(words, check=False)
            if status == 0 or len(name) == 40:
                return out.decode().strip() or name
        return self.mirror.history(name, newest=not self.session.offline) or ""

    def named(self, name: str, patches: Collection[Patch]) -> Base:
        """
        Return the base that *name* means: a release, or a branch, tag or commit of the repository.

        Raises:
            not-provided: There is none.
            offline, source-unreachable: The index or the repository may not be asked, or does not
                answer.
        """
        spec = self.session.project.fork(self.fork).sources.sdist
        known = releases(self.session, spec.name, optional=True) if spec else []
        if release := next((release for release in known if release.version == name), None):
            return of_release(self.session, release)
        if commit := self.commit(name):
            return self.at_commit(name, commit, patches)
        raise SourceError(
            "not-provided",
            f"{name} is neither a release nor a branch, tag or commit of {self.fork}.",
        )

    def later_releases(self, *, optional: bool = False) -> list[Release]:
        """Return the releases after the locked one, oldest first; see `releases`."""
        from packaging.version import Version

        sdist = self.session.lock.forks[self.fork].sdist
        known = releases(self.session, sdist.name, optional=optional) if sdist else []
        return [
            release
            for release in known
            if sdist and Version(release.version) > Version(sdist.version)
        ]

    def later(self, patches: Collection[Patch], *, every: bool) -> Iterator[Base]:
        """
        Yield the newest release (or *every* one) after the locked source, and the branch's tip;
        skip the unreachable ones.
        """
        newer, tip = self.later_releases(optional=True), self._newest(patches)
        for release in newer if every else newer[-1:]:
            if tip and release.day > tip.name.rpartition(" ")[2]:
                yield tip
                tip = None
            try:
                yield of_release(self.session, release)
            except SourceError as error:
                if error.reference != "source-unreachable":
                    raise
                console.warn(f"{release.project} {release.version} is left out: {error.what}")
        if tip:
            yield tip

    def _newest(self, patches: Collection[Patch]) -> Base | None:
        if not self.mirror or not self.book:
            return None
        try:
            commit = self.mirror.history(self.book.branch, newest=not self.session.offline)
            day = history.commit(self.session.objects, commit).date if commit else ""
            return self.at_commit(f"{self.book.branch} {day}", commit, patches) if commit else None
        except SourceError as error:
            if error.reference not in {"offline", "source-unreachable"}:
                raise
            console.note(f"{self.book.branch} of {self.mirror.url} is left out: {error.what}")
            return None


def of_release(session: RunContext, release: Release) -> Base:
    """
    Return the base of *release*, in the object database.

    Raises:
        offline, source-unreachable, source-mismatch, archive-unsafe: It cannot be fetched.
    """
    tree = _stored(session, release)
    if not tree:
        file = FileLock(
            release.project, release.version, release.filename, release.sha256, 0, release.folder
        )
        with (
            console.step(f"release {release.project} {release.version}"),
            session.store.lock("objects"),
        ):
            tree = fetch.import_file(session, file)
        session.store.put("release", _key(release), tree)
    return Base(release.version, tree)


def _stored(session: RunContext, release: Release) -> str:
    tree = session.store.get("release", _key(release), str)
    return tree if tree and session.objects.has(f"{tree}^{{tree}}") else ""


def _key(release: Release) -> str:
    return digest.key("release", {"sha256": release.sha256, "folder": release.folder})


def releases(session: RunContext, project: str, *, optional: bool = False) -> list[Release]:
    """
    Return the final releases of *project* that have an sdist, oldest first; with --offline, those
    that are in the store.

    Args:
        optional: Return none if the index does not answer.

    Raises:
        source-unreachable: The index does not answer, or has no such project.
    """
    from packaging.utils import InvalidSdistFilename, parse_sdist_filename

    key = digest.key("releases", project)
    if session.offline:
        return [
            release
            for release in session.store.get("releases", key, list[Release]) or ()
            if _stored(session, release)
        ]
    found = {}
    try:
        for file in package_index.files(project):
            try:
                version = parse_sdist_filename(file.name)[1]
            except InvalidSdistFilename:
                continue
            if file.name.endswith(".tar.gz") and file.sha256 and not version.is_prerelease:
                found[version] = Release(project, str(version), file.name, file.sha256, file.day)
    except SourceError as error:
        if error.reference != "source-unreachable" or not optional:
            raise
        console.note(error.what)
        return []
    listed = [found[version] for version in sorted(found)]
    session.store.put("releases", key, listed)
    return listed


def between(session: RunContext, project: str, start: str, end: str) -> list[Release]:
    """
    Return the releases of *project* from *start* to *end* (empty: the newest), oldest first; see
    `releases`.

    Raises:
        not-provided: An end is no release, or the ends are in the wrong order.
        source-unreachable: The index does not answer.
    """
    listed = releases(session, project)
    names = [release.version for release in listed]
    if unknown := [name for name in (start, end) if name and name not in names]:
        where, details = (
            "in the store" if session.offline else "on the package index",
            [f"there are: {', '.join(names) or 'none'}"],
        )
        raise SourceError(
            "not-provided", f"There is no release {project} {unknown[0]} {where}.", details=details
        )
    if end and names.index(start) > names.index(end):
        todo = "Choose ends with --from and --to."
        raise SourceError("not-provided", f"{project} {start} is later than {end}.", todo=todo)
    return listed[names.index(start) : names.index(end) + 1 if end else None]
