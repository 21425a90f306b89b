"""
Fetch sources of the three kinds: git, sdist and wheel.

Whatever the kind, the result is a tree in the object database whose id equals the lock's.
"""

from collections.abc import Collection, Mapping

import msgspec

from sparkwright.core.console import console
from sparkwright.core.errors import FileError
from sparkwright.core.files import content_key
from sparkwright.core.http import redact_credentials
from sparkwright.forks import package_index, resolve
from sparkwright.forks.context import RunContext
from sparkwright.forks.stack import (
    UNRESOLVED,
    ForkLock,
    ForkSpec,
    GitLock,
    Project,
    SourceError,
    SourceKind,
    SourceSpecs,
    SourceUnreachable,
    VendoredLock,
)

#: Raise it when `FetchedSource` changes.
FORM = 6
#: The one reason for a host that does not answer and for one that must not be asked (offline), so
#: that both leave the same text in a wheel.
SILENT = "source-unreachable"


class FetchedSource(msgspec.Struct, frozen=True):
    """
    A fork's source, in the object database.

    Attributes:
        origin: What people call it: a file name, or ``url @ commit``.
        pin: The commit or sha256 that determines it.
        tree: The git tree id of its content.
        resolved: Whether the lock names both beyond doubt; only then may it reach the channel
            ``verified``.
        submodules: Of a git source, and theirs, by path.
        git_error: The reference of the error of git, if an archive was taken because of one; else
            empty.
    """

    fork: str
    kind: SourceKind
    origin: str
    pin: str
    tree: str
    resolved: bool
    submodules: dict[str, VendoredLock] = {}
    git_error: str = ""


def fetch(
    context: RunContext, fork: str, locked: ForkLock | None = None, *, again: bool = False
) -> FetchedSource:
    """
    Fetch the source of *fork* into the object database, and verify it.

    Args:
        locked: In place of what the lock file says.
        again: Try once more a git source in whose place an earlier run took an archive.

    Raises:
        not-provided: The run is for this fork, and the lock has no source of the kind that was
            asked for.
        source-mismatch, source-unreachable, source-unresolved, offline, archive-unsafe: The source
            is not what the lock names, or cannot be had.
        sdist-differs: See `resolve.prove`.
        git-failed: The object database is damaged, of which no archive is the remedy.
    """
    locked, spec = locked or context.lock.forks[fork], context.project.fork(fork)
    if context.source not in ("auto", *locked.kinds) and fork in context.forks:
        raise SourceError(
            "not-provided",
            f"{fork} has no source of kind {context.source}.",
            details=[f"locked: {', '.join(locked.kinds)}"],
        )
    stored = recorded(context, fork, locked)
    if stored and context.objects.is_complete(stored.tree):
        in_place = context.source not in locked.kinds and stored.kind != locked.kinds[0]
        if not (again and in_place):
            return stored
    with console.step(f"fetch {fork}"), context.store.lock("objects"):
        fetched = _fetch(context, fork, spec, locked)
        state = "" if fetched.resolved else " (the lock leaves it unresolved)"
        console.note(f"{fetched.origin}: tree {fetched.tree[:12]}, verified{state}")
    context.store.put("source", _key(context, fork, locked), fetched)
    return fetched


def _fetch(context: RunContext, fork: str, spec: ForkSpec, locked: ForkLock) -> FetchedSource:
    """
    Return the source of the kind that the run asks for, if the fork has it, else git; or the
    archive if that fails, or if the lock does not resolve git and no archive proves it.
    """
    kind = context.source if context.source in locked.kinds else locked.kinds[0]
    archives = [other for other in locked.kinds if other != "git"]
    trusted = context.source == "git" or locked.is_resolved or spec.sources.proof
    if kind == "git" and archives and not trusted:
        console.note(f"{fork}: taking the {archives[0]}: the lock does not resolve git")
        kind = archives[0]
    if kind != "git":
        return _from_archive(context, fork, kind, locked)
    try:
        return _from_git(context, fork, spec, locked)
    except SourceError as error:
        if not archives:
            raise
        if context.source == "git":
            error.todo += f" Or take the locked archive: --source {archives[0]}."
            raise
        why = " · ".join([error.what, *error.details[:3]])
        console.warn(
            f"{fork}: taking the {archives[0]}, because the git source fails "
            f"({error.reference}; `sparkwright fetch` tries it again): {why}"
        )
        fetched = _from_archive(context, fork, archives[0], locked)
        git_error = error.reference
        if isinstance(error, SourceUnreachable):
            # An archive that determines the files gives the same wheel with and without the host.
            git_error = "" if spec.sources.pinned_by_archive else SILENT
        return msgspec.structs.replace(fetched, git_error=git_error)


def recorded(
    context: RunContext, fork: str, locked: ForkLock | None = None
) -> FetchedSource | None:
    """Return what the last `fetch` with these arguments recorded; None before the first."""
    locked = locked or context.lock.forks[fork]
    return context.store.get("source", _key(context, fork, locked), FetchedSource)


def _key(context: RunContext, fork: str, locked: ForkLock) -> str:
    spec = context.project.fork(fork)
    return content_key(
        "source",
        {
            "lock": locked,
            "source": context.source,
            "mirrors": dict(context.mirrors),
            "ignored": sorted(spec.ignored),
            "sources": spec.sources,
            "form": FORM,
        },
    )


def _from_archive(
    context: RunContext, fork: str, kind: SourceKind, locked: ForkLock
) -> FetchedSource:
    """Return the locked source distribution or wheel as the source of *fork*."""
    file = locked.sdist if kind == "sdist" else locked.wheel
    if not file:
        raise SourceError(
            "source-unresolved",
            f"The lock names no {kind} of {fork}, which stack.yaml has.",
            todo="Run `sparkwright lock`.",
        )
    tree = package_index.import_file(context, file)
    if file.tree != tree:
        raise SourceError(
            "source-mismatch",
            f"The content of {file.filename} is not the tree that the lock names.",
            details=[f"lock: {file.tree}", f"tree: {tree}"],
        )
    origin = f"{file.filename} ({file.folder})" if file.folder else file.filename
    return FetchedSource(fork, kind, origin, file.sha256, tree, True)


def _from_git(context: RunContext, fork: str, spec: ForkSpec, locked: ForkLock) -> FetchedSource:
    """
    Return the git source of *fork*.

    If stack.yaml names no full commit, the tree is the one of the archive that proves it: a file
    of the commit that the archive lacks is proved by nothing. Its bytes need no host then, if the
    lock records the proof.
    """
    git, sources = locked.git, spec.sources
    assert git
    resolved, tree = git.resolved, ""
    if sources.pinned_by_archive:
        resolved, tree = True, _from_archive(context, fork, sources.proof or "sdist", locked).tree
        try:
            commit = full_commit(context, fork, git, proved=True)
            _commit_tree(context, git, commit)
            locked = resolve.pin_commit(context, spec, locked, git, commit)
            for entry in locked.submodules.values():
                context.mirror(entry.url).commit(entry.commit)
            resolve.prove(context, fork, locked, sources)
        except SourceUnreachable as error:
            if not _proved(sources, locked):
                raise
            commit = git.commit
            console.note(f"{error.what} The lock records that the archive is the commit's.")
    else:
        commit = full_commit(context, fork, git)
        if sources.proof and not resolved:
            locked = resolve.pin_commit(context, spec, locked, git, commit)
        tree = _git_tree(context, fork, git, locked.vendored, spec.ignored)
        if sources.proof and not resolved:
            resolved = bool(resolve.prove(context, fork, locked, sources))
    origin = f"{git.url} @ {commit}"
    return FetchedSource(fork, "git", origin, commit, tree, resolved, locked.submodules)


def _proved(sources: SourceSpecs, locked: ForkLock) -> bool:
    """Return True if the lock records that the archive is the git source."""
    return bool(sources.pinned_by_archive and locked.proof and locked.is_resolved)


def recorded_source(context: RunContext, source: FetchedSource) -> FetchedSource:
    """
    Return *source* as the lock names it: by the archive, if that proves a commit which the lock
    does not record. Another run, which cannot reach the host, makes the same wheel.
    """
    locked, sources = context.lock.forks[source.fork], context.project.fork(source.fork).sources
    if source.kind == "git" and sources.pinned_by_archive and not _proved(sources, locked):
        return _from_archive(context, source.fork, sources.proof or "sdist", locked)
    return source


def deviation(project: Project, source: FetchedSource) -> str:
    """
    Return that *source* is another release than upstream pins, and why that is accepted, or that it
    was taken in place of its git source; empty if neither holds.
    """
    sources, text = project.fork(source.fork).sources, ""
    if sources.git and sources.upstream:
        text = (
            f"{source.fork} {sources.git.ref}, although upstream pins {sources.upstream}; "
            f"accepted, because {sources.accepted.strip()}"
        )
    if source.git_error:
        text = f"{text or source.fork}; from {source.origin} in place of git ({source.git_error})"
    return text


def vendored_tree(
    context: RunContext,
    fork: str,
    name: str,
    vendored: Mapping[str, VendoredLock],
    ignored: Collection[str],
) -> str:
    """
    Return the tree of the locked source *name*, its files brought, with the sources in place that
    lie below it in turn.

    Args:
        ignored: Names of sources that no build needs.

    Raises:
        source-mismatch, source-unresolved, source-unreachable, offline: As `fetch`.
    """
    return _git_tree(context, fork, vendored[name], vendored, ignored, name)


def _git_tree(
    context: RunContext,
    fork: str,
    locked: GitLock,
    vendored: Mapping[str, VendoredLock],
    ignored: Collection[str],
    name: str = "",
) -> str:
    """
    Return the tree of the locked commit, its files brought, with the *vendored* sources in place of
    its submodules; those that are ignored, or that FetchContent does not take, are left out.

    Args:
        name: Of the vendored source whose commit it is; empty for that of the fork.
    """
    title, below = (f"{fork}/{name}", f"{name}/") if name else (fork, "")
    commit = full_commit(context, title, locked)
    mirror, objects = context.mirror(locked.url), context.objects
    tree = _commit_tree(context, locked, commit)
    if idle := [path for path in locked.without if not objects.has(f"{tree}:{path}")]:
        raise FileError(
            "file-invalid",
            f"{redact_credentials(locked.url)} has nothing of what `without` leaves out.",
            details=idle,
            todo="Take it out of stack.yaml, and lock again.",
        )
    tree = mirror.tree(tree, locked.without)
    links = objects.submodules(tree)
    modules = locked.modules if isinstance(locked, VendoredLock) else None
    dropped = {
        path
        for path in links
        if below + path in ignored or (modules is not None and path not in modules)
    }
    if dropped:
        tree = objects.without_paths(tree, dropped)
    links = {path: pin for path, pin in links.items() if path not in dropped}
    wrong = [
        f"{path} @ {pin}"
        for path, pin in links.items()
        if below + path not in vendored or vendored[below + path].commit != pin
    ]
    if wrong:
        raise SourceError(
            "source-unresolved",
            f"{title} has submodules that the lock does not name.",
            details=wrong,
            todo="Run `sparkwright lock`, or take the release archive, which carries them: "
            "--source sdist.",
        )
    folders = {
        path: vendored_tree(context, fork, below + path, vendored, ignored) for path in links
    }
    return objects.with_folders(tree, folders) if folders else tree


def _commit_tree(context: RunContext, locked: GitLock, commit: str) -> str:
    """Return the tree of *commit*; raise `source-mismatch` if the lock names another."""
    tree = context.mirror(locked.url).commit(commit)
    if locked.tree not in (UNRESOLVED, tree):
        raise SourceError(
            "source-mismatch",
            f"Commit {commit} of {redact_credentials(locked.url)} has another tree than the lock "
            "names.",
            details=[f"lock:   {locked.tree}", f"commit: {tree}"],
        )
    return tree


def full_commit(context: RunContext, fork: str, locked: GitLock, *, proved: bool = False) -> str:
    """
    Return the 40 digits of the locked commit; a prefix counts when the locked ref names a commit
    that begins with it.

    Args:
        proved: An archive tells whether the commit is the right one: the ref alone will do.

    Raises:
        source-unresolved: The lock has no commit.
        source-mismatch: A prefix is locked, and the ref names a commit that does not begin with it.
        offline, source-unreachable: A prefix is locked, and the host may not be asked, does not
            answer, or lacks the ref.
    """
    if len(locked.commit) == 40:
        return locked.commit
    if locked.commit == UNRESOLVED and not proved:
        raise SourceError(
            "source-unresolved", f"The lock names no commit for {fork} ({locked.ref})."
        )
    mirror = context.mirror(locked.url)
    named = mirror.ref(locked.ref)
    if named is None:
        raise SourceUnreachable(
            "source-unreachable",
            f"{redact_credentials(mirror.address)} does not offer {locked.ref} of {fork}.",
            todo="Give a mirror that has it (--mirror), or take another kind of source (--source).",
        )
    if locked.commit != UNRESOLVED and not named.startswith(locked.commit):
        raise SourceError(
            "source-mismatch",
            f"{locked.ref} of {fork} is not the locked commit.",
            details=[f"lock: {locked.commit}…", f"host: {named}"],
        )
    return named
