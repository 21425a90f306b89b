"""Refs into hashes: what `sparkwright lock` does, by hand and with a network. Nothing is taken from memory."""

from __future__ import annotations

from typing import Literal
from urllib.parse import urlsplit

import msgspec

from sparkwright.core import digest
from sparkwright.core.console import console
from sparkwright.forks import download, fetch, package_index, vendored
from sparkwright.forks.context import Session
from sparkwright.forks.errors import SourceError
from sparkwright.forks.lock import UNRESOLVED, FileLock, ForkLock, GitLock, Lock, VendoredLock
from sparkwright.forks.stack import ForkSpec, GitSpec, SdistSpec, WheelSpec
from sparkwright.forks.vendored.declared import Vendored


def resolve(session: Session) -> Lock:
    """
    Return the lock of the stack as the upstreams stand now.

    What a host does not answer stays as the intent has it, or ``unresolved``, and a base wheel that nobody offers is left out
    (`unresolved` lists both).

    Raises:
        source-unreachable: The index does not offer a source that the stack names.
    """
    spec = session.project.spec
    with session.store.lock("objects"):
        return Lock(1, spec.stack, {name: resolve_fork(session, name, fork) for name, fork in spec.forks.items()})


def resolve_fork(session: Session, name: str, fork: ForkSpec) -> ForkLock:
    """Return the lock of one fork, as `resolve` makes it."""
    with console.step(f"lock {name}"):
        specs = fork.sources
        made = ForkLock(
            git=_git(session, specs.git) if specs.git else None,
            sdist=_file(session, specs.sdist) if specs.sdist else None,
            wheel=_file(session, specs.wheel) if specs.wheel else None,
            bases={machine: locked for machine, base in fork.bases.items() if (locked := _base(session, base))},
        )
        return msgspec.structs.replace(made, vendored=_vendored(session, fork, made))


def _vendored(session: Session, fork: ForkSpec, made: ForkLock) -> dict[str, VendoredLock]:
    """Lock what the trees of the fork name, whichever kind of source they come from."""
    url, found = fork.sources.git.url if fork.sources.git else "", dict[str, Vendored]()
    if made.git and made.git.resolved:
        session.mirror(url).files(set(vendored.files(session.objects, made.git.tree).values()))
    for tree in (made.git.tree if made.git and made.git.resolved else "", *(file.tree for file in (made.sdist, made.wheel) if file)):
        if tree:
            found |= {
                one.name: one
                for one in vendored.find(session.objects, tree, url)
                if not {one.name, f"{one.name}@{one.ref}"} & fork.ignored.keys()
            }
    locked: dict[str, VendoredLock] = {}
    for one in found.values():
        if one.kind in ("fetchcontent", "submodule") and one.url and one.ref:
            locked |= _one_vendored(session, fork, one, one.name)
    return dict(sorted(locked.items()))


def _one_vendored(session: Session, fork: ForkSpec, one: Vendored, name: str) -> dict[str, VendoredLock]:
    """Return the lock of a vendored source and of the submodules below it, unresolved as far as its host is out of reach."""
    kind: Literal["submodule", "fetchcontent"] = "submodule" if one.kind == "submodule" else "fetchcontent"
    without = fork.vendored[name].without if name in fork.vendored else ()
    pin = _git(session, GitSpec(one.url, one.ref, one.ref if len(one.ref) == 40 else "", without))
    made = {name: VendoredLock(one.url, one.ref, pin.commit, pin.tree, without, kind=kind, variable=one.variable)}
    if pin.resolved and (links := session.objects.submodules(pin.tree)):
        session.mirror(one.url).files(set(vendored.files(session.objects, pin.tree).values()))
        for inner in vendored.find(session.objects, pin.tree, one.url):
            path, taken = f"{name}/{inner.name}", one.submodules is None or inner.name in one.submodules
            if inner.kind == "submodule" and inner.name in links and taken and path not in fork.ignored:
                made |= _one_vendored(session, fork, inner, path)
    return made


def unresolved(session: Session, made: Lock) -> list[str]:
    """Return, a line each, what *made* could not pin."""
    lines = [f"{name}: {fork.git.ref} of {fork.git.url}" for name, fork in made.forks.items() if fork.git and not fork.git.resolved]
    lines += [
        f"{name}: {inner}, {one.ref} of {one.url}"
        for name, fork in made.forks.items()
        for inner, one in fork.vendored.items()
        if not one.resolved
    ]
    specs = session.project.spec.forks
    return lines + [
        f"{name}: base wheel for {machine}"
        for name, fork in specs.items()
        for machine in fork.bases
        if machine not in made.forks[name].bases
    ]


def _base(session: Session, spec: WheelSpec) -> FileLock | None:
    try:
        return _file(session, spec)
    except SourceError as error:
        if error.reference != "source-unreachable":
            raise
        console.warn(f"{error.what} Left unresolved.")
        return None


def _git(session: Session, spec: GitSpec) -> GitLock:
    unresolved = GitLock(spec.url, spec.ref, spec.commit or UNRESOLVED, UNRESOLVED, spec.without)
    where = package_index.shown(session.mirrored(spec.url))
    host = urlsplit(session.mirrored(spec.url)).netloc
    if host in session.silent:
        console.warn(f"{spec.ref} of {where}: the host did not answer before: left unresolved")
        return unresolved
    mirror = session.mirror(spec.url)
    try:
        # A mirror that was made for a few commits need not have the tags; a whole commit says it all.
        named = spec.commit if spec.ref == spec.commit else mirror.ref(spec.ref) or (spec.commit if len(spec.commit) == 40 else None)
        if named is None or not named.startswith(spec.commit):
            console.warn(f"{spec.ref} of {where} is {named or 'not there'}, not {spec.commit or 'a tag or branch'}: left unresolved")
            return unresolved
        mirror.commit(named)
    except SourceError as error:
        if error.reference != "source-unreachable":
            raise
        session.silent.update({host} - {""})
        console.warn(
            f"{where} does not answer ({package_index.shown(error.details[-1] if error.details else error.what)}): left unresolved"
        )
        return unresolved
    tree = session.objects.resolve(f"{named}^{{tree}}")
    console.note(f"{spec.ref}: commit {named}, tree {tree}")
    return GitLock(spec.url, spec.ref, named, tree, spec.without)


def _file(session: Session, spec: SdistSpec | WheelSpec) -> FileLock:
    suffix = f"-{spec.tag}.whl" if isinstance(spec, WheelSpec) else ".tar.gz"
    stem = f"{spec.name}-{spec.version}".replace("-", "_").lower()
    offers = [
        file for file in package_index.files(spec.name) if file.name.lower().replace("-", "_") == (stem + suffix.replace("-", "_")).lower()
    ]
    if not offers or not offers[0].sha256:
        raise SourceError("source-unreachable", f"The index offers no {spec.name} {spec.version} as *{suffix} with a sha256.")
    path = download.obtain(session.store, spec.name, offers[0].name, offers[0].sha256)
    folder = spec.folder if isinstance(spec, WheelSpec) else ""
    file = FileLock(spec.name, spec.version, offers[0].name, digest.sha256_file(path), path.stat().st_size, folder)
    is_base = isinstance(spec, WheelSpec) and not folder
    tree = "" if is_base else fetch.import_file(session, file)
    console.note(f"{file.filename}: sha256 {file.sha256[:16]}…{f', tree {tree}' if tree else ''}")
    return FileLock(file.name, file.version, file.filename, file.sha256, file.size, folder, tree)
