"""A tree's submodules: what it pins, and where ``.gitmodules`` says that it lies."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from sparkwright.core.git import EXECUTABLE, REGULAR, SUBMODULE
from sparkwright.core.git_store import Objects
from sparkwright.forks.errors import SourceError
from sparkwright.forks.vendored.declared import Vendored, plain

FILE = ".gitmodules"


def read(objects: Objects, tree: str, paths: dict[str, tuple[str, str]], url: str) -> tuple[Vendored, ...]:
    """
    Return the submodules of *tree*; one that ``.gitmodules`` does not know has no address.

    Args:
        paths: What `Objects.paths` says of the tree.
        url: Where the tree itself comes from; relative addresses start there.

    Raises:
        declaration-unsafe: The file cannot be read by git, contradicts itself, or an address in it is none.
    """
    links = {path: pin for path, (mode, pin) in paths.items() if mode == SUBMODULE}
    if not links:
        return ()
    known = paths.get(FILE, ("", ""))[0] in (REGULAR, EXECUTABLE)
    urls = _urls(objects, tree) if known else {}
    lines = (objects.blob(tree, FILE) or b"").decode("utf-8", "replace").splitlines() if known else []
    return tuple(
        Vendored(plain(path, FILE), "submodule", resolved(urls.get(path, ""), url), pin, FILE, _line(lines, path))
        for path, pin in sorted(links.items())
    )


def _urls(objects: Objects, tree: str) -> dict[str, str]:
    """Return the submodules' addresses by their paths, as git itself reads the file."""
    words = ["config", "--blob", f"{tree}:{FILE}", "--no-includes", "--null", "--list"]
    status, out, said = objects.run(words, check=False)
    if status:
        raise SourceError("declaration-unsafe", f"git cannot read {FILE} of tree {tree}.", details=said.strip().splitlines()[-5:])
    sections: dict[str, dict[str, str]] = {}
    for entry in out.decode("utf-8", "replace").split("\0"):
        key, _, value = entry.partition("\n")
        section, _, field = key.rpartition(".")
        wanted = section.startswith("submodule.") and field in ("path", "url")
        if wanted and sections.setdefault(section, {}).setdefault(field, value) != value:
            raise _contradiction(f"{key} twice")
    pairs = [(fields["path"].rstrip("/"), fields.get("url", "")) for fields in sections.values() if "path" in fields]
    urls = dict(pairs)
    if len(urls) != len(pairs):
        raise _contradiction("two addresses for one path")
    return urls


def _contradiction(what: str) -> SourceError:
    return SourceError("declaration-unsafe", f"{FILE} has {what}.", details=["git takes the one or the other, depending on who asks."])


def _line(lines: list[str], path: str) -> int:
    pattern = re.compile(rf"\s*path\s*=\s*\"?{re.escape(path)}/?\"?\s*", re.IGNORECASE)
    return next((number for number, line in enumerate(lines, 1) if pattern.fullmatch(line)), 0)


def resolved(address: str, base: str) -> str:
    """
    Return the absolute form of a submodule's *address*, by git's own rules (git-submodule(1), add).

    Args:
        base: Where the tree lies; with none, a relative address stays unknown.

    Raises:
        declaration-unsafe: It climbs out of the host, or is no address.
    """
    plain(address, FILE)
    if not address.startswith(("./", "../")):
        return address
    if not base:
        return ""
    left, rest, colon = base.rstrip("/"), address, False
    while rest.startswith(("./", "../")):
        if rest.startswith("../"):
            left, colon = _parent(left, address)
        rest = rest.partition("/")[2]
    result = f"{left}{':' if colon else '/'}{rest}".rstrip("/")
    if urlsplit(result)[:2] != urlsplit(base)[:2]:
        raise _climbs(address)
    return result


def _parent(address: str, whole: str) -> tuple[str, bool]:
    """Return *address* less its last part, and whether a colon was before that (``host:project``)."""
    for mark in "/:":
        head, found, _ = address.rpartition(mark)
        if found:
            return head, mark == ":"
    raise _climbs(whole)


def _climbs(address: str) -> SourceError:
    return SourceError("declaration-unsafe", f"{FILE} has an address that climbs out of its host.", details=[f"{address!r}"])
