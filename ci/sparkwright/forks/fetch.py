"""
Sources: three kinds, one interface (DESIGN §4).

Whatever the kind, the result is a tree in the object database whose id equals the lock's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from sparkwright.core import digest
from sparkwright.core.console import console
from sparkwright.core.errors import FileError
from sparkwright.core.http import redact_credentials
from sparkwright.forks import archive, download
from sparkwright.forks.context import RunContext
from sparkwright.forks.errors import SourceError
from sparkwright.forks.lock import UNRESOLVED, FileLock, ForkLock, GitLock, VendoredLock
from sparkwright.forks.stack import KINDS, SourceKind


class FetchedSource(msgspec.Struct, frozen=True):
    """
    A fork's source, in the object database.

    Attributes:
        origin: What people call it: a file name, or ``url @ commit``.
        pin: The commit or sha256 that determines it.
        tree: The git tree id of its content.
        resolved: Whether the lock names both beyond doubt; only then may it reach the channel
            ``verified``.
    """

    fork: str
    kind: SourceKind
    origin: str
    pin: str
    tree: str
    resolved: bool


def fetch(session: RunContext, fork: str) -> FetchedSource:
    """
    Bring the source of *fork* into the object database, verified.

    Raises:
        not-provided: The lock has no such kind of source for the fork.
        source-mismatch, source-unreachable, source-unresolved, offline, archive-unsafe: See there.
    """
    return fetch_locked(session, fork, session.lock.forks[fork])


def fetch_locked(session: RunContext, fork: str, locked: ForkLock) -> FetchedSource:
    """Bring what *locked* says, which need not be what the lock file says yet; see `fetch`."""
    ignored = sorted(session.project.fork(fork).ignored)
    key = digest.key(
        "source",
        {
            "lock": locked,
            "source": _asked(session, fork, locked),
            "mirrors": dict(session.mirrors),
            "ignored": ignored,
        },
    )
    known = session.store.get("source", key, FetchedSource)
    if known and session.objects.whole(known.tree):
        return known
    with console.step(f"fetch {fork}"), session.store.lock("objects"):
        fetched = _fetch_kind(session, fork, locked, choose(session, fork, locked))
        console.note(
            f"{fetched.origin}: tree {fetched.tree[:12]}, "
            f"verified{'' if fetched.resolved else ' (the lock leaves it unresolved)'}"
        )
    session.store.put("source", key, fetched)
    return fetched


def choose(session: RunContext, fork: str, locked: ForkLock) -> SourceKind:
    """
    Return the kind of source to take; ``auto`` takes git when commit and tree are locked and
    reachable, and says why not.

    Raises:
        not-provided: The run is for this fork, and the lock has no source of the kind that was
            asked for.
    """
    have, asked = _kinds(locked), _asked(session, fork, locked)
    if asked != "auto":
        if asked not in have:
            raise SourceError(
                "not-provided",
                f"{fork} has no source of kind {asked}.",
                details=[f"locked: {', '.join(have)}"],
            )
        return asked
    if session.source not in ("auto", *have):
        console.note(
            f"{fork}: it has no source of kind {session.source} and is only needed by another "
            f"fork, so any other kind will do"
        )
    if locked.git and len(have) > 1 and not (locked.whole and _reachable(session, locked.git)):
        why = "is not reachable from here" if locked.whole else "is not resolved in the lock"
        console.note(f"{fork}: taking the {have[1]}, because the git source {why}")
        have.remove("git")
    return have[0]


def _kinds(locked: ForkLock) -> list[SourceKind]:
    return [kind for kind in KINDS if getattr(locked, kind)]


def _asked(session: RunContext, fork: str, locked: ForkLock) -> Literal["auto"] | SourceKind:
    """
    Return which kind of source the run asks for; of a fork that it merely needs, and that has none
    of that kind, any.
    """
    return session.source if fork in session.forks or session.source in _kinds(locked) else "auto"


def _reachable(session: RunContext, locked: GitLock) -> bool:
    if session.objects.has(f"{locked.commit}^{{commit}}"):
        return True
    try:
        return not session.offline and session.mirror(locked.url).ref(locked.ref) is not None
    except SourceError as error:
        if error.reference != "source-unreachable":
            raise
        return False


def _fetch_kind(
    session: RunContext, fork: str, locked: ForkLock, kind: Literal["git", "sdist", "wheel"]
) -> FetchedSource:
    if kind == "git":
        assert locked.git is not None
        return _fetch_git(session, fork, locked.git, locked.vendored)
    file = locked.sdist if kind == "sdist" else locked.wheel
    assert file is not None
    if not (file.tree and session.objects.whole(file.tree)):
        tree = import_file(session, file)
        if file.tree != tree:
            raise SourceError(
                "source-mismatch",
                f"The content of {file.filename} is not the tree that the lock names.",
                details=[f"lock: {file.tree}", f"tree: {tree}"],
            )
    return FetchedSource(
        fork,
        kind,
        file.filename + (f" ({file.folder})" if file.folder else ""),
        file.sha256,
        file.tree,
        True,
    )


def import_file(session: RunContext, file: FileLock) -> str:
    """
    Bring the content of an archive of the package index into the object database and return its
    tree id.
    """
    path = download.obtain(
        session.store, file.name, file.filename, file.sha256, offline=session.offline
    )
    members = (
        archive.wheel_members(path, file.folder) if file.folder else archive.sdist_members(path)
    )
    return session.objects.store_files(
        (member.path, member.mode, member.data) for member in members
    )


def _fetch_git(
    session: RunContext, fork: str, locked: GitLock, vendored: Mapping[str, VendoredLock]
) -> FetchedSource:
    commit = full_commit(session, fork, locked)
    tree = verified_tree(session, locked.url, commit, locked.tree)
    tree = _reduced(session, locked.url, tree, locked.without)
    if (
        ignored := session.objects.submodules(tree).keys()
        & session.project.fork(fork).ignored.keys()
    ):
        tree = session.objects.without_paths(tree, sorted(ignored))
    tree = with_submodules(session, fork, tree, vendored)
    return FetchedSource(fork, "git", f"{locked.url} @ {commit}", commit, tree, locked.resolved)


def verified_tree(session: RunContext, url: str, commit: str, expected: str) -> str:
    """
    Return the tree of *commit*, brought without its files.

    Raises:
        source-mismatch: It is another one than *expected*, which may be `UNRESOLVED`.
        offline, source-unreachable: See `Mirror.commit`.
    """
    session.mirror(url).commit(commit)
    tree = session.objects.resolve(f"{commit}^{{tree}}")
    if expected not in (UNRESOLVED, tree):
        raise SourceError(
            "source-mismatch",
            f"Commit {commit} of {redact_credentials(url)} has another tree than the lock names.",
            details=[f"lock:   {expected}", f"commit: {tree}"],
        )
    return tree


def with_submodules(
    session: RunContext, fork: str, tree: str, vendored: Mapping[str, VendoredLock]
) -> str:
    """
    Return *tree* with the locked sources in place of its submodules.

    Raises:
        source-unresolved: A submodule is not in the lock, or another commit of it is.
    """
    links = session.objects.submodules(tree)
    wrong = [
        f"{path} @ {pin}"
        for path, pin in links.items()
        if path not in vendored or vendored[path].commit != pin
    ]
    if wrong:
        raise SourceError(
            "source-unresolved",
            f"{fork} has submodules that the lock does not name.",
            details=wrong,
            todo="Run `sparkwright lock`, or take the release archive, which carries them: "
            "--source sdist.",
        )
    folders = {path: vendored_tree(session, fork, path, vendored) for path in links}
    return session.objects.with_folders(tree, folders) if folders else tree


def vendored_tree(
    session: RunContext, fork: str, name: str, vendored: Mapping[str, VendoredLock]
) -> str:
    """
    Return the tree of the locked source *name*, its files brought, with the sources in place that
    lie below it in turn.

    Raises:
        source-mismatch, source-unresolved, source-unreachable, offline: See `verified_tree`,
        `full_commit` and `with_submodules`.
    """
    entry = vendored[name]
    commit = full_commit(session, f"{fork}/{name}", entry)
    tree = _reduced(
        session, entry.url, verified_tree(session, entry.url, commit, entry.tree), entry.without
    )
    nested = {
        path.removeprefix(f"{name}/"): lock
        for path, lock in vendored.items()
        if path.startswith(f"{name}/")
    }
    if entry.kind == "fetchcontent" and entry.resolved:
        # The lock then names every submodule that the build takes.
        tree = session.objects.without_paths(
            tree, [path for path in session.objects.submodules(tree) if path not in nested]
        )
    return with_submodules(session, f"{fork}/{name}", tree, nested)


def _reduced(session: RunContext, url: str, tree: str, without: Sequence[str]) -> str:
    """
    Return *tree*, its files brought, less the paths *without*, each of which must be there to be
    left out.
    """
    if idle := [path for path in without if not session.objects.has(f"{tree}:{path}")]:
        what = f"{redact_credentials(url)} has nothing of what `without` leaves out."
        raise FileError(
            "file-invalid", what, details=idle, todo="Take it out of stack.yaml, and lock again."
        )
    return session.mirror(url).tree(tree, without)


def full_commit(session: RunContext, fork: str, locked: GitLock) -> str:
    """
    Return the 40 digits of the locked commit; a prefix counts when the locked ref names a commit
    that begins with it.

    Raises:
        source-unresolved: The lock has no commit, or the ref names another one.
        source-unreachable: A prefix is locked and the host does not answer.
    """
    if len(locked.commit) == 40:
        return locked.commit
    if locked.commit == UNRESOLVED:
        raise SourceError(
            "source-unresolved", f"The lock names no commit for {fork} ({locked.ref})."
        )
    if session.offline:
        raise SourceError(
            "offline",
            f"Only the beginning {locked.commit} of {fork}'s commit is locked, and --offline "
            f"forbids asking for the rest.",
        )
    named = session.mirror(locked.url).ref(locked.ref)
    if named is None or not named.startswith(locked.commit):
        raise SourceError(
            "source-mismatch",
            f"{locked.ref} of {fork} is not the locked commit.",
            details=[f"lock: {locked.commit}…", f"host: {named or 'no such ref'}"],
        )
    return named
