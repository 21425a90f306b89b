"""
Vendored sources: all that a build of a tree would download or take from a submodule, found by reading the tree.

Reading cannot see everything (a ``setup.py`` may do what it likes), so builds run without a network as well. What it does see is in the
lock, or under `ignored` with a reason, or an error.
"""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping

from sparkwright.core.git import EXECUTABLE, REGULAR
from sparkwright.core.git_store import Objects
from sparkwright.forks.errors import SourceError
from sparkwright.forks.lock import VendoredLock
from sparkwright.forks.package_index import shown
from sparkwright.forks.vendored import fetchcontent, gitmodules
from sparkwright.forks.vendored.declared import Vendored, plain

_CMAKE = re.compile(r"(?:.*/)?(?:CMakeLists\.txt|[^/]+\.cmake)(?:\.in)?")
_CARGO = re.compile(r"(?:.*/)?Cargo\.lock")
_COMMIT = re.compile(r"[0-9a-f]{40}")


def files(objects: Objects, tree: str) -> dict[str, str]:
    """Return the files whose bytes `find` reads, by path: their blob ids, for a store that has not brought them yet."""
    return _files(objects.paths(tree))


def _files(paths: Mapping[str, tuple[str, str]]) -> dict[str, str]:
    wanted = (path for path, (mode, _) in paths.items() if mode in (REGULAR, EXECUTABLE))
    return {path: paths[path][1] for path in wanted if path == gitmodules.FILE or _CMAKE.fullmatch(path) or _CARGO.fullmatch(path)}


def find(objects: Objects, tree: str, url: str = "") -> tuple[Vendored, ...]:
    """
    Return every source that *tree* declares, in the order of its files; tests and examples are among them.

    Args:
        url: Where the tree comes from; without it, a submodule's relative address is unknown.

    Raises:
        declaration-unsafe: An address may run a command, or ``.gitmodules`` contradicts itself.
    """
    paths = objects.paths(tree)
    texts = dict(objects.contents(_files(paths)))
    found: list[Vendored] = []
    for file, text in sorted(texts.items()):
        if _CARGO.fullmatch(file):
            found += _crates(file, text)
        elif _CMAKE.fullmatch(file) and fetchcontent.WORDS.search(text):
            others = [other for name, other in texts.items() if name != file]
            found += fetchcontent.read(file, text, functools.partial(_sets, others))
    return (*found, *gitmodules.read(objects, tree, paths, url))


def _sets(texts: Iterable[bytes], variable: str) -> bool:
    pattern = re.compile(rb"\bset\s*\(\s*\"?" + re.escape(variable.encode("utf-8", "surrogateescape")) + rb"\"?[\s)]", re.IGNORECASE)
    return any(pattern.search(text) for text in texts)


def _crates(file: str, text: bytes) -> Iterator[Vendored]:
    """Yield what cargo would download by its own lock: each repository, and the registry as one, which that lock pins by hash."""
    try:
        packages = tomllib.loads(text.decode()).get("package", [])
        sources = {str(package["source"]): str(package["name"]) for package in reversed(packages) if "source" in package}
    except (ValueError, AttributeError, TypeError, KeyError):
        yield Vendored(file, "cargo", "", "", file)
        return
    for source, name in sorted(sources.items()):
        kind, _, address = source.partition("+")
        url, _, commit = address.partition("#")
        called, ref = (name, commit) if kind == "git" else (file, "in the file")
        yield Vendored(called, "cargo", plain(url.partition("?")[0], file), plain(ref, file), file)


def check(fork: str, found: Iterable[Vendored], locked: Mapping[str, VendoredLock], ignored: Mapping[str, str]) -> None:
    """
    Require that the lock names all that was found, as the tree has it.

    Args:
        ignored: What the build does not reach, with the reason: a name, or ``name@ref`` where the tree names several by one name.

    Raises:
        source-unlocked: A source is neither locked nor ignored, or is locked otherwise than the tree says it; or the lock or the list of
            the ignored has an entry for which there is none.
    """
    found = tuple(found)
    left = [one for one in found if not any(ignored.get(key, "").strip() for key in _keys(one))]
    wrong = [f"{one.place}: {one.name}: {fault}" for one in left if (fault := _fault(one, locked.get(one.name)))]
    names = {one.name for one in left}
    for name, entry in locked.items():
        # An sdist carries its submodules as files, and what lies below another entry is named by that one's tree.
        below = any(name.startswith(f"{other}/") for other in locked)
        if entry.kind == "fetchcontent" and name not in names and not below:
            wrong.append(f"lock: {name}: the tree names no such source")
    keys = {key for one in found for key in _keys(one)}
    submodules = any(one.kind == "submodule" for one in found)
    # A release archive may leave all of that out; a tree that names some sources must name these, too.
    idle = [key for key in ignored if keys and key not in keys and (submodules or "/" not in key)]
    wrong += [f"ignored: {key}: the tree names no such source" for key in idle]
    if wrong:
        raise SourceError("source-unlocked", f"The lock and the tree of {fork} do not name the same sources.", details=wrong)


def _keys(one: Vendored) -> tuple[str, str]:
    return one.name, f"{one.name}@{one.ref}"


def _fault(one: Vendored, entry: VendoredLock | None) -> str:
    """Return what is wrong with the lock's *entry* for a source; empty when nothing is."""
    under = f", under {one.condition}" if one.condition else ""
    if not one.url or not one.ref:
        return f"the tree does not say {'where from' if not one.url else 'which state'} in a way that can be read{under}"
    if one.kind not in ("submodule", "fetchcontent"):
        return f"{shown(one.url)} at {one.ref} is of a kind that no lock can name ({one.kind}){under}"
    if entry is None:
        return f"{shown(one.url)} at {one.ref} is not in the lock{under}"
    pinned = _COMMIT.fullmatch(one.ref) and entry.commit != one.ref
    if (entry.kind, entry.url, entry.ref) != (one.kind, one.url, one.ref) or pinned:
        return f"the tree says {shown(one.url)} at {one.ref}{under}, the lock {shown(entry.url)} at {entry.ref} ({entry.commit})"
    return ""
