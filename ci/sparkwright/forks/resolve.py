"""Turn refs into hashes: ``sparkwright lock``, which needs the network."""

from __future__ import annotations

from collections.abc import Collection
from urllib.parse import urlsplit

import msgspec

from sparkwright.core import digest
from sparkwright.core.console import console
from sparkwright.core.http import redact_credentials
from sparkwright.forks import fetch, package_index, vendored
from sparkwright.forks.context import RunContext
from sparkwright.forks.errors import SourceError
from sparkwright.forks.lock import UNRESOLVED, FileLock, ForkLock, GitLock, Lock, VendoredLock
from sparkwright.forks.stack import ForkSpec, GitSpec, SdistSpec, WheelSpec


def resolve(context: RunContext, earlier: Lock | None = None) -> Lock:
    """
    Return the lock of the stack as the upstreams stand now.

    A source whose host does not answer stays as stack.yaml names it, or ``unresolved``, and a base
    wheel that the index does not offer is left out (`unresolved` lists both).

    Args:
        earlier: Names the sources that FetchContent downloads, which only a configure can tell
            (`sparkwright.builder.vendored.lock`); they are pinned again.

    Raises:
        source-unreachable: The index does not offer a source that the stack names.
    """
    spec, forks = context.project.spec, dict(earlier.forks) if earlier else {}
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
        specs = fork.sources
        locked = ForkLock(
            git=_git(context, specs.git) if specs.git else None,
            sdist=_file(context, specs.sdist) if specs.sdist else None,
            wheel=_file(context, specs.wheel) if specs.wheel else None,
            bases={
                machine: base
                for machine, wheel in fork.bases.items()
                if (base := _base(context, wheel))
            },
        )
        sources = _pin_submodules(context, fork, locked.git) if locked.git else {}
        for declared, entry in (earlier.fetched if earlier else {}).items():
            below = (
                [path.removeprefix(f"{declared}/") for path in earlier.vendored]
                if earlier and entry.resolved
                else None
            )
            sources |= pin(context, fork, declared, entry, below)
        return msgspec.structs.replace(locked, vendored=dict(sorted(sources.items())))


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
    if not source.url:
        console.warn(f"{name}: .gitmodules names no address: not locked")
        return {}
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
    for module in submodules(context, git.tree, git.url) if git.resolved else ():
        path = parent + module.path
        if path not in fork.ignored and (modules is None or module.path in modules):
            entry = VendoredLock(
                module.url, module.commit, UNRESOLVED, UNRESOLVED, kind="submodule"
            )
            locked |= pin(context, fork, path, entry)
    return locked


def submodules(context: RunContext, tree: str, url: str) -> tuple[vendored.Submodule, ...]:
    """
    Return the submodules of *tree*, a tree of the repository *url* whose files need not be in the
    store.
    """
    if not context.objects.submodules(tree):
        return ()
    paths = context.objects.paths(tree)
    context.mirror(url).files({paths[vendored.FILE][1]} if vendored.FILE in paths else set())
    return vendored.submodules(context.objects, tree, url)


def unresolved(context: RunContext, lock: Lock) -> list[str]:
    """Return, a line each, what *lock* could not pin."""
    lines = []
    for name, fork in lock.forks.items():
        if fork.git and not fork.git.resolved:
            lines.append(f"{name}: {fork.git.ref} of {fork.git.url}")
        lines += [
            f"{name}: {inner}, {entry.ref} of {entry.url}"
            for inner, entry in fork.vendored.items()
            if not entry.resolved
        ]
        bases = context.project.fork(name).bases
        lines += [
            f"{name}: base wheel for {machine}" for machine in bases if machine not in fork.bases
        ]
    return lines


def _base(context: RunContext, spec: WheelSpec) -> FileLock | None:
    try:
        return _file(context, spec)
    except SourceError as error:
        if error.reference != "source-unreachable":
            raise
        console.warn(f"{error.what} Left unresolved.")
        return None


def _git(context: RunContext, spec: GitSpec) -> GitLock:
    unresolved = GitLock(spec.url, spec.ref, spec.commit or UNRESOLVED, UNRESOLVED, spec.without)
    mirror = context.mirror(spec.url)
    address, host = redact_credentials(mirror.address), urlsplit(mirror.address).netloc
    if host in context.silent:
        console.warn(f"{spec.ref} of {address}: the host did not answer before: left unresolved")
        return unresolved
    try:
        # The mirror of a few commits need not have the tags; a full commit needs none.
        commit = (
            spec.commit
            if spec.ref == spec.commit
            else mirror.ref(spec.ref) or (spec.commit if len(spec.commit) == 40 else None)
        )
        if commit is None or not commit.startswith(spec.commit):
            console.warn(
                f"{spec.ref} of {address} is {commit or 'not there'}, not "
                f"{spec.commit or 'a tag or branch'}: left unresolved"
            )
            return unresolved
        mirror.commit(commit)
    except SourceError as error:
        if error.reference != "source-unreachable":
            raise
        context.silent.update({host} - {""})
        reason = redact_credentials(error.details[-1] if error.details else error.what)
        console.warn(f"{address} does not answer ({reason}): left unresolved")
        return unresolved
    tree = context.objects.resolve(f"{commit}^{{tree}}")
    console.note(f"{spec.ref}: commit {commit}, tree {tree}")
    return GitLock(spec.url, spec.ref, commit, tree, spec.without)


def _file(context: RunContext, spec: SdistSpec | WheelSpec) -> FileLock:
    suffix = f"-{spec.tag}.whl" if isinstance(spec, WheelSpec) else ".tar.gz"
    stem = f"{spec.name}-{spec.version}".replace("-", "_").lower()
    offers = [
        file
        for file in package_index.files(spec.name)
        if file.name.lower().replace("-", "_") == (stem + suffix.replace("-", "_")).lower()
    ]
    if not offers or not offers[0].sha256:
        raise SourceError(
            "source-unreachable",
            f"The index offers no {spec.name} {spec.version} as *{suffix} with a sha256.",
        )
    path = package_index.obtain(context.store, spec.name, offers[0].name, offers[0].sha256)
    folder = spec.folder if isinstance(spec, WheelSpec) else ""
    file = FileLock(
        spec.name,
        spec.version,
        offers[0].name,
        digest.sha256_file(path),
        path.stat().st_size,
        folder,
    )
    is_base = isinstance(spec, WheelSpec) and not folder
    tree = "" if is_base else fetch.import_file(context, file)
    console.note(f"{file.filename}: sha256 {file.sha256[:16]}…{f', tree {tree}' if tree else ''}")
    return FileLock(file.name, file.version, file.filename, file.sha256, file.size, folder, tree)
