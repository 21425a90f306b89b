"""
Vendored sources: the downloads of CMake's FetchContent while it configures.

The sources of a build come from the lock, verified, and are handed to FetchContent as folders. The
trace of the configure shows every source that CMake asked for; one that the lock does not pin is
refused. No CMake is evaluated here: a declaration that CMake does not reach is not a finding.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping

import msgspec

from sparkwright.builder.configure import DEPS, DOWNLOADS, Call
from sparkwright.core.console import console
from sparkwright.core.http import redact_credentials
from sparkwright.forks import fetch as sources
from sparkwright.forks.context import RunContext
from sparkwright.forks.lock import ForkLock, VendoredLock
from sparkwright.forks.resolve import require_safe
from sparkwright.forks.stack import SourceError

#: The folder of a source in the build folder, which FetchContent itself would choose.
FOLDER = f"{DEPS}/%s-src"

#: The options of a declaration that name a download (ExternalProject(3)).
_METHODS = (
    "GIT_REPOSITORY",
    "URL",
    "HG_REPOSITORY",
    "SVN_REPOSITORY",
    "CVS_REPOSITORY",
    "DOWNLOAD_COMMAND",
)
_KEYWORD = re.compile(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)*")
_COMMIT = re.compile(r"[0-9a-f]{40}")


class Declaration(msgspec.Struct, frozen=True):
    """
    A source that CMake asked for.

    Attributes:
        name: Its name for FetchContent; of another download its address.
        url: The git repository, or the address of another download.
        ref: The tag, branch or commit; empty for another download.
        origin: ``file:line`` of the call.
        modules: The submodules that the build takes; None for all.
        pinnable: Whether the lock can name it, and the build take it from a folder.
    """

    name: str
    url: str
    ref: str
    origin: str
    modules: tuple[str, ...] | None = None
    pinnable: bool = True


def declarations(calls: Iterable[Call]) -> tuple[Declaration, ...]:
    """
    Return the sources that the traced *calls* would download.

    Raises:
        declaration-unsafe: An address or a ref could be an option or a program.
    """
    declared: dict[str, Declaration] = {}
    for call in calls:
        if call.command in DOWNLOADS and (declaration := _declaration(call)):
            # FetchContent takes the first declaration of a name (FetchContent(3)).
            declared.setdefault(declaration.name.lower(), declaration)
    return tuple(declared.values())


def _declaration(call: Call) -> Declaration | None:
    origin = f"{call.file}:{call.line}"
    # CMake expands a list in place only when it runs the command, after it was traced.
    name, *values = [part for argument in call.arguments for part in argument.split(";")] or [""]
    following = dict(zip(reversed(values), reversed([*values[1:], ""]), strict=False))
    if call.command == "file":
        url = require_safe("".join(values[:1]), origin)
        return Declaration(url, url, "", origin, pinnable=False) if name == "DOWNLOAD" else None
    # The first argument of any other call may be anything.
    methods = {key: require_safe(following[key], origin) for key in _METHODS if following.get(key)}
    if not methods:
        return None
    url, ref = next(iter(methods.values())), ""
    modules: tuple[str, ...] | None = None
    if list(methods) == ["GIT_REPOSITORY"]:
        ref = require_safe(following.get("GIT_TAG", "master"), origin)
    if "GIT_SUBMODULES" in values:
        rest = values[values.index("GIT_SUBMODULES") + 1 :]
        taken = itertools.takewhile(lambda value: not _KEYWORD.fullmatch(value), rest)
        modules = tuple(filter(None, taken))
    # FetchContent_Populate takes a folder in place of a download only if the source was declared.
    pinnable = bool(ref) and call.command == "fetchcontent_declare"
    return Declaration(require_safe(name, origin), url, ref, origin, modules, pinnable)


def check(
    fork: str,
    declared: Iterable[Declaration],
    locked: ForkLock,
    ignored: Mapping[str, str],
    *,
    complete: bool,
) -> None:
    """
    Require that the lock pins every source that CMake asked for.

    Args:
        ignored: Sources that no build needs, with the reason.
        complete: Every target was configured, so that an entry that CMake did not ask for has no
            effect.

    Raises:
        source-unlocked: A source is neither locked nor ignored, or is locked otherwise; or an entry
            has no effect.
    """
    sources = {declaration.name: declaration for declaration in declared}
    faults = [
        f"{declaration.origin}: {name}: {fault}"
        for name, declaration in sources.items()
        if name not in ignored and (fault := mismatch(declaration, locked.fetched.get(name)))
    ]
    # An entry with a slash is a submodule, which CMake does not declare.
    entries = [("lock", name) for name in locked.fetched]
    entries += [("ignored", name) for name in {*ignored} - {*locked.vendored} if "/" not in name]
    faults += [
        f"{where}: {name}: CMake asks for no such source"
        for where, name in entries
        if complete and name not in sources
    ]
    if faults:
        what = f"The lock does not pin the sources that CMake asks for in {fork}."
        raise SourceError("source-unlocked", what, details=faults)


def mismatch(declaration: Declaration, entry: VendoredLock | None) -> str:
    """Return how *declaration* differs from the lock's *entry*; empty if it is pinned."""
    url, ref = redact_credentials(declaration.url), declaration.ref
    if not declaration.pinnable:
        return f"{url} is a download that the lock cannot pin"
    if entry is None:
        return f"{url} at {ref} is not in the lock"
    pinned_commit = entry.commit if _COMMIT.fullmatch(ref) else ref
    if (entry.url, entry.ref, pinned_commit) != (declaration.url, ref, ref):
        locked = f"{redact_credentials(entry.url)} at {entry.ref} ({entry.commit})"
        return f"CMake asks for {url} at {ref}; the lock names {locked}"
    return ""


def fetch(context: RunContext, fork: str) -> dict[str, str]:
    """
    Fetch every source that FetchContent would download for *fork*, and return their trees by name.

    Raises:
        source-unresolved: Some are unreachable; every one is named with its reason.
        source-mismatch: One is not the source that the lock names.
    """
    locked, trees, missing = context.lock.forks[fork], dict[str, str](), dict[str, str]()
    title = f"bring {len(locked.fetched)} vendored sources of {fork}"
    with console.step(title), context.store.lock("objects"):
        for name, entry in locked.fetched.items():
            try:
                trees[name] = sources.vendored_tree(context, fork, name, locked.vendored)
            except SourceError as error:
                if error.reference not in {"offline", "source-unreachable", "source-unresolved"}:
                    raise
                reason = " · ".join([error.what, *error.details[:4]])
                missing[name] = f"{name}: {redact_credentials(entry.url)} at {entry.ref}: {reason}"
    if missing:
        raise SourceError(
            "source-unresolved",
            f"{len(missing)} of {len(locked.fetched)} vendored sources of {fork} cannot be had.",
            details=list(missing.values()),
            todo="Run `sparkwright lock` where their hosts are reachable, or give mirrors "
            "(--mirror URL=REPLACEMENT), and lock again. The default targets need none of them: "
            "leave --targets out.",
            data={"missing": list(missing), "present": sorted(trees)},
        )
    return trees


def defines(trees: Iterable[str]) -> dict[str, str]:
    """
    Return the CMake cache entries with which FetchContent asks no host and takes the sources named
    *trees* from their folders.
    """
    folders = {
        f"FETCHCONTENT_SOURCE_DIR_{name.upper()}": f"{{build}}/{FOLDER % name.lower()}"
        for name in trees
    }
    disconnected = {"FETCHCONTENT_FULLY_DISCONNECTED": "ON"}
    return {**disconnected, "FETCHCONTENT_BASE_DIR": f"{{build}}/{DEPS}", **folders}
