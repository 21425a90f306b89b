"""
Fetch sources of the three kinds: git, sdist and wheel.

Whatever the kind, the result is a tree in the object database whose id equals the lock's.
"""

from __future__ import annotations

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
    GitLock,
    Project,
    SourceError,
    SourceKind,
    SourceUnreachable,
    VendoredLock,
)

#: Raise it when `FetchedSource` changes: 2 added the submodules.
FORM = 2


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
    """

    fork: str
    kind: SourceKind
    origin: str
    pin: str
    tree: str
    resolved: bool
    submodules: dict[str, VendoredLock] = {}


def fetch(context: RunContext, fork: str, locked: ForkLock | None = None) -> FetchedSource:
    """
    Fetch the source of *fork* into the object database, and verify it.

    Args:
        locked: In place of what the lock file says.

    Raises:
        not-provided: The run is for this fork, and the lock has no source of the kind that was
            asked for.
        source-mismatch, source-unreachable, source-unresolved, offline, archive-unsafe: The source
            is not what the lock names, or cannot be had.
        sdist-differs: See `resolve.prove`.
    """
    locked = locked or context.lock.forks[fork]
    if context.source not in ("auto", *locked.kinds) and fork in context.forks:
        raise SourceError(
            "not-provided",
            f"{fork} has no source of kind {context.source}.",
            details=[f"locked: {', '.join(locked.kinds)}"],
        )
    spec = context.project.fork(fork)
    ignored, generated = spec.ignored, spec.sources.sdist.generated if spec.sources.sdist else ()
    key = content_key(
        "source",
        {
            "lock": locked,
            "source": context.source,
            "mirrors": dict(context.mirrors),
            "ignored": sorted(ignored),
            "generated": generated,
            "form": FORM,
        },
    )
    stored = context.store.get("source", key, FetchedSource)
    if stored and context.objects.whole(stored.tree):
        return stored
    with console.step(f"fetch {fork}"), context.store.lock("objects"):
        provable = bool(locked.sdist and generated)
        kind = choose(context, fork, locked, provable=provable)
        if kind == "git" and (git := locked.git):
            commit, proven = full_commit(context, fork, git), git.resolved
            if provable and not proven:
                locked = resolve.pin_commit(context, spec, locked, git, commit)
            tree = _git_tree(context, fork, git, locked.vendored, ignored)
            if provable and not proven:
                proven = bool(resolve.prove(context, fork, locked, generated))
            origin = f"{git.url} @ {commit}"
            fetched = FetchedSource(fork, kind, origin, commit, tree, proven, locked.submodules)
        elif file := locked.sdist if kind == "sdist" else locked.wheel:
            tree = package_index.import_file(context, file)
            if file.tree != tree:
                raise SourceError(
                    "source-mismatch",
                    f"The content of {file.filename} is not the tree that the lock names.",
                    details=[f"lock: {file.tree}", f"tree: {tree}"],
                )
            origin = f"{file.filename} ({file.folder})" if file.folder else file.filename
            fetched = FetchedSource(fork, kind, origin, file.sha256, tree, True)
        state = "" if fetched.resolved else " (the lock leaves it unresolved)"
        console.note(f"{fetched.origin}: tree {fetched.tree[:12]}, verified{state}")
    context.store.put("source", key, fetched)
    return fetched


def deviation(project: Project, source: FetchedSource) -> str:
    """
    Return that *source* is another release than upstream pins, and why that is accepted; empty if
    it is not another.
    """
    specs = project.fork(source.fork).sources
    if source.kind != "wheel" or not specs.wheel or not specs.git or not specs.wheel.release:
        return ""
    wheel = specs.wheel
    return (
        f"{source.fork} {wheel.release} of the official {wheel.name} {wheel.version} wheel, "
        f"although upstream pins {specs.git.ref}; accepted, because {wheel.accepted.strip()}"
    )


def choose(
    context: RunContext, fork: str, locked: ForkLock, *, provable: bool = False
) -> SourceKind:
    """
    Return the kind of source to take: the one that the run asks for, if the fork has it, else git
    when it is reachable, and its commit and tree are locked or *provable* by the source
    distribution; say why not.
    """
    if context.source in locked.kinds:
        return context.source
    named = locked.whole or (provable and locked.git and locked.git.commit != UNRESOLVED)
    if locked.git and len(locked.kinds) > 1 and not (named and _reachable(context, locked.git)):
        why = "is not reachable from here" if named else "is not resolved in the lock"
        console.note(f"{fork}: taking the {locked.kinds[1]}, because the git source {why}")
        return locked.kinds[1]
    return locked.kinds[0]


def _reachable(context: RunContext, locked: GitLock) -> bool:
    objects, commit = context.objects, f"{locked.commit}^{{commit}}"
    try:
        if objects.has(commit):
            # `lock` brings commits without their files.
            tree = objects.resolve(f"{locked.commit}^{{tree}}")
            if objects.whole(objects.without_paths(tree, locked.without)):
                return True
        mirror = context.mirror(locked.url)
        named = mirror.ref(locked.ref)
        # A host may have the commit without the tag.
        if len(locked.commit) == 40:
            mirror.commit(locked.commit)
        return len(locked.commit) == 40 or named is not None
    except SourceUnreachable:
        return False


def vendored_tree(
    context: RunContext, fork: str, name: str, vendored: Mapping[str, VendoredLock]
) -> str:
    """
    Return the tree of the locked source *name*, its files brought, with the sources in place that
    lie below it in turn.

    Raises:
        source-mismatch, source-unresolved, source-unreachable, offline: As `fetch`.
    """
    entry, below = vendored[name], f"{name}/"
    nested = {
        path.removeprefix(below): lock for path, lock in vendored.items() if path.startswith(below)
    }
    return _git_tree(context, f"{fork}/{name}", entry, nested)


def _git_tree(
    context: RunContext,
    name: str,
    locked: GitLock,
    vendored: Mapping[str, VendoredLock],
    ignored: Collection[str] = (),
) -> str:
    """
    Return the tree of the locked commit, its files brought, with the *vendored* sources in place of
    its submodules.
    """
    commit, url = full_commit(context, name, locked), redact_credentials(locked.url)
    mirror, objects = context.mirror(locked.url), context.objects
    tree = mirror.commit(commit)
    if locked.tree not in (UNRESOLVED, tree):
        raise SourceError(
            "source-mismatch",
            f"Commit {commit} of {url} has another tree than the lock names.",
            details=[f"lock:   {locked.tree}", f"commit: {tree}"],
        )
    if idle := [path for path in locked.without if not objects.has(f"{tree}:{path}")]:
        raise FileError(
            "file-invalid",
            f"{url} has nothing of what `without` leaves out.",
            details=idle,
            todo="Take it out of stack.yaml, and lock again.",
        )
    tree = mirror.tree(tree, locked.without)
    links = objects.submodules(tree)
    fetchcontent = isinstance(locked, VendoredLock) and locked.kind == "fetchcontent"
    # The lock of a resolved FetchContent source names every submodule that the build takes.
    dropped = (
        links.keys() - vendored if fetchcontent and locked.resolved else links.keys() & ignored
    )
    if dropped:
        tree = objects.without_paths(tree, dropped)
    links = {path: pin for path, pin in links.items() if path not in dropped}
    wrong = [
        f"{path} @ {pin}"
        for path, pin in links.items()
        if path not in vendored or vendored[path].commit != pin
    ]
    if wrong:
        raise SourceError(
            "source-unresolved",
            f"{name} has submodules that the lock does not name.",
            details=wrong,
            todo="Run `sparkwright lock`, or take the release archive, which carries them: "
            "--source sdist.",
        )
    folders = {path: vendored_tree(context, name, path, vendored) for path in links}
    return objects.with_folders(tree, folders) if folders else tree


def full_commit(context: RunContext, fork: str, locked: GitLock) -> str:
    """
    Return the 40 digits of the locked commit; a prefix counts when the locked ref names a commit
    that begins with it.

    Raises:
        source-unresolved: The lock has no commit.
        source-mismatch: A prefix is locked, and the ref names a commit that does not begin with it.
        offline, source-unreachable: A prefix is locked, and the host may not be asked, does not
            answer, or lacks the ref.
    """
    if len(locked.commit) == 40:
        return locked.commit
    if locked.commit == UNRESOLVED:
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
    if not named.startswith(locked.commit):
        raise SourceError(
            "source-mismatch",
            f"{locked.ref} of {fork} is not the locked commit.",
            details=[f"lock: {locked.commit}…", f"host: {named}"],
        )
    return named
