"""Turn refs into hashes: ``sparkwright lock``, which needs the network."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Collection
from fnmatch import fnmatchcase
from urllib.parse import urlsplit

import msgspec

from sparkwright.core.console import console
from sparkwright.core.git import SUBMODULE, Objects
from sparkwright.core.http import redact_credentials
from sparkwright.forks import package_index
from sparkwright.forks.context import RunContext
from sparkwright.forks.stack import (
    UNRESOLVED,
    FileLock,
    ForkLock,
    ForkSpec,
    GitLock,
    GitSpec,
    Lock,
    Project,
    SdistProof,
    SdistSpec,
    SourceError,
    SourceUnreachable,
    VendoredLock,
    WheelSpec,
)

MODULES = ".gitmodules"

#: git runs a program named before two colons (gitremote-helpers(7)); a leading dash is an option of
#: git's.
_HELPER = re.compile(r"-|[A-Za-z0-9][A-Za-z0-9+.-]*::")
_LONGEST = 2048
#: Files that the error of a proof names at most.
SHOWN = 20


def resolve(context: RunContext, earlier: Lock | None = None) -> Lock:
    """
    Return the lock of the stack as the upstreams stand now.

    A source whose host does not answer stays as stack.yaml names it, or ``unresolved``, and a base
    wheel that the index does not offer is left out (`unresolved` lists both).

    Args:
        earlier: Names the sources that FetchContent downloads, which only a configure can tell
            (`sparkwright.cli.stages`); they are pinned again.

    Raises:
        source-unreachable: The index does not offer a source that the stack names.
    """
    spec, forks = context.project.spec, earlier.forks if earlier else {}
    with context.store.lock("objects"):
        locked = {
            name: resolve_fork(context, name, fork, forks.get(name))
            for name, fork in spec.forks.items()
        }
    return Lock(1, spec.stack, locked)


def resolve_fork(
    context: RunContext, name: str, fork: ForkSpec, earlier: ForkLock | None = None
) -> ForkLock:
    """Return the lock of one fork, as `resolve` makes it."""
    with console.step(f"lock {name}"):
        specs, bases = fork.sources, dict[str, FileLock]()
        git = _git(context, specs.git) if specs.git else None
        sdist = _file(context, specs.sdist) if specs.sdist else None
        wheel = _file(context, specs.wheel) if specs.wheel else None
        for machine, spec in fork.bases.items():
            try:
                bases[machine] = _file(context, spec)
            except SourceUnreachable as error:
                console.warn(f"{error.what} Left unresolved.")
        sources = _pin_submodules(context, fork, git) if git else {}
        earlier = earlier or ForkLock()
        for declared, entry in earlier.fetched.items():
            below = [path.removeprefix(f"{declared}/") for path in earlier.vendored]
            sources |= pin(context, fork, declared, entry, below if entry.resolved else None)
        locked = ForkLock(git, sdist, wheel, bases, dict(sorted(sources.items())))
        if specs.sdist and specs.sdist.generated and locked.whole:
            locked = msgspec.structs.replace(
                locked, proof=prove(context, name, locked, specs.sdist.generated)
            )
        return locked


def pin_commit(
    context: RunContext, fork: ForkSpec, locked: ForkLock, git: GitLock, commit: str
) -> ForkLock:
    """
    Return *locked* with the tree of *commit* of its source *git*, and the submodules that the tree
    names; those that are locked stay.

    Raises:
        offline, source-unreachable: The commit cannot be had.
    """
    tree = context.mirror(git.url).commit(commit)
    git = msgspec.structs.replace(git, commit=commit, tree=tree)
    return msgspec.structs.replace(
        locked, git=git, vendored={**_pin_submodules(context, fork, git), **locked.vendored}
    )


def pin(
    context: RunContext,
    fork: ForkSpec,
    name: str,
    source: VendoredLock,
    modules: Collection[str] | None = None,
) -> dict[str, VendoredLock]:
    """
    Return the lock of the vendored source *name*, and of the submodules below it, unresolved where
    a host does not answer.

    Args:
        source: Its kind, address and ref; commit and tree are asked for.
        modules: The submodules that the build takes; None for all.
    """
    without = fork.vendored[name].without if name in fork.vendored else ()
    commit = source.ref if len(source.ref) == 40 else ""
    git = _git(context, GitSpec(source.url, source.ref, commit, without))
    entry = VendoredLock(git.url, git.ref, git.commit, git.tree, without, kind=source.kind)
    return {name: entry, **_pin_submodules(context, fork, git, f"{name}/", modules)}


def _pin_submodules(
    context: RunContext,
    fork: ForkSpec,
    git: GitLock,
    parent: str = "",
    modules: Collection[str] | None = None,
) -> dict[str, VendoredLock]:
    """Return the locks of the submodules of *git*, by *parent* and their paths, as `pin`."""
    locked = dict[str, VendoredLock]()
    if not git.resolved or not context.objects.submodules(git.tree):
        return locked
    paths = context.objects.paths(git.tree)
    context.mirror(git.url).files({paths[MODULES][1]} if MODULES in paths else set())
    for module, (url, commit) in submodules(context.objects, git.tree, git.url).items():
        path = parent + module
        wanted = path not in fork.ignored and (modules is None or module in modules)
        # Without an address it stays unlocked, and is an error where it is fetched.
        if url and wanted:
            entry = VendoredLock(url, commit, UNRESOLVED, UNRESOLVED, kind="submodule")
            locked |= pin(context, fork, path, entry)
    return locked


def submodules(objects: Objects, tree: str, base: str) -> dict[str, tuple[str, str]]:
    """
    Return the submodules of *tree*, whose ``.gitmodules`` is in the object database: path →
    (address, commit). The address is empty where the file does not state an absolute one.

    Args:
        base: Address of the tree's own repository, from which relative addresses start; may be
            empty.

    Raises:
        declaration-unsafe: git cannot read the file, or an address in it is unsafe.
    """
    status, out, _ = objects.run(
        ["config", "--blob", f"{tree}:{MODULES}", "--no-includes", "--null", "--list"], check=False
    )
    if status and objects.blob(tree, MODULES) is not None:
        raise SourceError("declaration-unsafe", f"git cannot read {MODULES} of tree {tree}.")
    entries = (entry.partition("\n") for entry in out.decode("utf-8", "replace").split("\0"))
    fields = {key: value for key, _, value in entries}
    urls = {
        value.rstrip("/"): fields.get(f"{key.removesuffix('path')}url", "")
        for key, value in fields.items()
        if key.startswith("submodule.") and key.endswith(".path")
    }
    return {
        require_safe(path, MODULES): (absolute(urls.get(path, ""), base), commit)
        for path, commit in sorted(objects.submodules(tree).items())
    }


def absolute(address: str, base: str) -> str:
    """
    Return the absolute form of a submodule's *address* (git-submodule(1), add); empty where *base*
    does not allow one.

    Raises:
        declaration-unsafe: It leaves the host of *base*, or is unsafe.
    """
    parts = urlsplit(base)
    if not require_safe(address, MODULES).startswith(("./", "../")):
        return address
    if parts.scheme and address.split("/").count("..") > parts.path.strip("/").count("/") + 1:
        raise SourceError(
            "declaration-unsafe",
            f"{MODULES} has an address that leaves its host.",
            details=[f"{address!r}"],
        )
    path = posixpath.normpath(posixpath.join(parts.path, address))
    return parts._replace(path=path).geturl() if parts.scheme else ""


def require_safe(text: str, origin: str) -> str:
    """
    Return *text*, an address or a ref that *origin* names.

    Raises:
        declaration-unsafe: git could take it for an option or a program, or a terminal for a
            control sequence.
    """
    if _HELPER.match(text) or len(text) > _LONGEST or not text.isprintable():
        raise SourceError(
            "declaration-unsafe",
            f"{origin} names a source by an address that may run a command.",
            details=[f"{text[:_LONGEST]!r}"],
        )
    return text


def prove(
    context: RunContext, fork: str, locked: ForkLock, generated: Collection[str]
) -> SdistProof | None:
    """
    Compare the locked source distribution with the locked commit, and say so; None if the lock has
    no source distribution.

    Args:
        generated: Patterns (`fnmatch`) of files that the release process writes.

    Raises:
        sdist-differs: A file of the source distribution is not the commit's or a submodule's, and
            not generated.
        source-mismatch, source-unreachable, offline, archive-unsafe: The file cannot be had.
    """
    objects, git, file = context.objects, locked.git, locked.sdist
    if not git or not file:
        return None
    trees = {
        f"{path}/": objects.resolve(f"{entry.commit}^{{tree}}")
        for path, entry in locked.submodules.items()
        if objects.has(f"{entry.commit}^{{commit}}")
    }
    commit = {
        folder + path: blob
        for folder, tree in {"": git.tree, **trees}.items()
        for path, (mode, blob) in objects.paths(tree).items()
        if mode != SUBMODULE
    }
    released = objects.paths(package_index.import_file(context, file))
    differing = {
        path: "differs" if path in commit else "is not in the commit"
        for path, (_, blob) in released.items()
        if commit.get(path) != blob
    }
    wrong = [
        f"{path} {fault}"
        for path, fault in differing.items()
        if not any(fnmatchcase(path, pattern) for pattern in generated)
    ]
    if wrong:
        raise SourceError(
            "sdist-differs",
            f"{len(wrong)} files of the source distribution of {fork} are not the commit's.",
            details=wrong[:SHOWN],
        )
    proof = SdistProof(
        equal=len(released) - len(differing),
        generated=tuple(sorted(differing)),
        absent=len(commit.keys() - released.keys()),
    )
    console.note(
        f"{proof.equal:,} of {len(released):,} files of {file.filename} are the commit's, "
        f"{len(differing)} are generated, {proof.absent:,} of the commit are not in it"
    )
    return proof


def unresolved(project: Project, lock: Lock) -> list[str]:
    """Return, a line each, what *lock* could not pin."""
    lines = []
    for name, fork in lock.forks.items():
        sources = {"": fork.git} if fork.git else {}
        sources |= {f"{inner}, ": entry for inner, entry in fork.vendored.items()}
        lines += [
            f"{name}: {inner}{entry.ref} of {entry.url}"
            for inner, entry in sources.items()
            if not entry.resolved
        ]
        lines += [
            f"{name}: base wheel for {machine}"
            for machine in sorted(project.fork(name).bases.keys() - fork.bases.keys())
        ]
    return lines


def _git(context: RunContext, spec: GitSpec) -> GitLock:
    """Return the lock of a git source, unresolved if the host does not answer."""
    mirror, commit = context.mirror(spec.url), spec.commit
    try:
        # The mirror of a few commits need not have the tags; a full commit needs none.
        if spec.ref != commit:
            commit = mirror.ref(spec.ref) or (commit if len(commit) == 40 else "")
        if not commit:
            raise SourceUnreachable(
                "source-unreachable",
                f"{spec.ref} of {redact_credentials(mirror.address)} is not there.",
            )
        if not commit.startswith(spec.commit):
            raise SourceError(
                "source-mismatch",
                f"{spec.ref} of {redact_credentials(mirror.address)} names another commit.",
                details=[f"stack.yaml: {spec.commit}", f"host: {commit}"],
            )
        tree = mirror.commit(commit)
    except SourceUnreachable as error:
        why = " · ".join([error.what, *error.details[-1:]])
        console.warn(f"left unresolved: {redact_credentials(why)}")
        return GitLock(spec.url, spec.ref, spec.commit or UNRESOLVED, UNRESOLVED, spec.without)
    console.note(f"{spec.ref}: commit {commit}, tree {tree}")
    return GitLock(spec.url, spec.ref, commit, tree, spec.without)


def _file(context: RunContext, spec: SdistSpec | WheelSpec) -> FileLock:
    """Return the lock of a file of the package index."""
    suffix = f"-{spec.tag}.whl" if isinstance(spec, WheelSpec) else ".tar.gz"
    wanted = f"{spec.name}-{spec.version}{suffix}".replace("-", "_").lower()
    offers = [
        file
        for file in package_index.files(spec.name)
        if file.name.replace("-", "_").lower() == wanted
    ]
    if not offers or not offers[0].sha256:
        raise SourceUnreachable(
            "source-unreachable",
            f"The index offers no {spec.name} {spec.version} as *{suffix} with a sha256.",
        )
    name, sha256 = offers[0].name, offers[0].sha256
    size = package_index.obtain(context.store, spec.name, name, sha256).stat().st_size
    folder = spec.folder if isinstance(spec, WheelSpec) else ""
    file = FileLock(spec.name, spec.version, name, sha256, size, folder)
    if folder or isinstance(spec, SdistSpec):
        file = msgspec.structs.replace(file, tree=package_index.import_file(context, file))
    console.note(f"{name}: sha256 {sha256[:16]}…{f', tree {file.tree}' if file.tree else ''}")
    return file
