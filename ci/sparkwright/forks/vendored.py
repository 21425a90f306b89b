"""Addresses of vendored sources: the submodules of a tree, and the addresses that are refused."""

from __future__ import annotations

import posixpath
import re
from urllib.parse import urlsplit

import msgspec

from sparkwright.core.git_store import Objects
from sparkwright.forks.errors import SourceError

FILE = ".gitmodules"

#: git runs a program named before two colons (gitremote-helpers(7)); a leading dash is an option of
#: git's.
_HELPER = re.compile(r"[A-Za-z0-9][A-Za-z0-9+.-]*::")
_LONGEST = 2048


class Submodule(msgspec.Struct, frozen=True):
    """
    A submodule of a tree; *url* is empty where ``.gitmodules`` does not state an absolute one.
    """

    path: str
    url: str
    commit: str


def require_safe(text: str, origin: str) -> str:
    """
    Return *text*, an address or a ref that *origin* names.

    Raises:
        declaration-unsafe: git could take it for an option or a program, or a terminal for a
            control sequence.
    """
    if (
        text.startswith("-")
        or _HELPER.match(text)
        or len(text) > _LONGEST
        or not text.isprintable()
    ):
        raise SourceError(
            "declaration-unsafe",
            f"{origin} names a source by an address that may run a command.",
            details=[f"{text[:_LONGEST]!r}"],
        )
    return text


def submodules(objects: Objects, tree: str, base: str) -> tuple[Submodule, ...]:
    """
    Return the submodules of *tree*, whose ``.gitmodules`` is in the object database.

    Args:
        base: Address of the tree's own repository, from which relative addresses start; may be
            empty.

    Raises:
        declaration-unsafe: git cannot read the file, it contradicts itself, or an address in it is
            unsafe.
    """
    links = objects.submodules(tree)
    urls = _urls(objects, tree) if links and objects.blob(tree, FILE) is not None else {}
    return tuple(
        Submodule(require_safe(path, FILE), absolute(urls.get(path, ""), base), commit)
        for path, commit in sorted(links.items())
    )


def _urls(objects: Objects, tree: str) -> dict[str, str]:
    """Return the submodules' addresses by path, as git reads the file."""
    command = ["config", "--blob", f"{tree}:{FILE}", "--no-includes", "--null", "--list"]
    status, out, errors = objects.run(command, check=False)
    if status:
        raise SourceError(
            "declaration-unsafe",
            f"git cannot read {FILE} of tree {tree}.",
            details=errors.strip().splitlines()[-5:],
        )
    sections: dict[str, dict[str, str]] = {}
    for entry in out.decode("utf-8", "replace").split("\0"):
        key, _, value = entry.partition("\n")
        section, _, field = key.rpartition(".")
        relevant = section.startswith("submodule.") and field in ("path", "url")
        if relevant and sections.setdefault(section, {}).setdefault(field, value) != value:
            raise SourceError("declaration-unsafe", f"{FILE} states {key} twice.")
    pairs = [
        (fields["path"].rstrip("/"), fields.get("url", ""))
        for fields in sections.values()
        if "path" in fields
    ]
    if len(urls := dict(pairs)) != len(pairs):
        raise SourceError("declaration-unsafe", f"{FILE} has two addresses for one path.")
    return urls


def absolute(address: str, base: str) -> str:
    """
    Return the absolute form of a submodule's *address* (git-submodule(1), add); empty where *base*
    does not allow one.

    Raises:
        declaration-unsafe: It leaves the host of *base*, or is unsafe.
    """
    require_safe(address, FILE)
    if not address.startswith(("./", "../")):
        return address
    parts = urlsplit(base)
    if not parts.scheme:
        return ""
    if address.split("/").count("..") > parts.path.strip("/").count("/") + 1:
        raise SourceError(
            "declaration-unsafe",
            f"{FILE} has an address that leaves its host.",
            details=[f"{address!r}"],
        )
    return parts._replace(path=posixpath.normpath(posixpath.join(parts.path, address))).geturl()
