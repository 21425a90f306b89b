"""
Vendored sources: what CMake's FetchContent would download while it configures.

The sources that a build reads come from the lock, verified, and are handed to FetchContent as
folders. The trace of the configure shows every source that CMake asked for; one that the lock does
not pin is refused. Nothing is evaluated here: a declaration that CMake does not reach is not a
finding.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from sparkwright.builder.configure import DEPS, DOWNLOADS, Call
from sparkwright.core.console import console
from sparkwright.core.http import redact_credentials
from sparkwright.forks import fetch as sources
from sparkwright.forks import resolve
from sparkwright.forks.context import RunContext
from sparkwright.forks.errors import SourceError
from sparkwright.forks.lock import UNRESOLVED, ForkLock, VendoredLock
from sparkwright.forks.vendored import require_safe

#: FetchContent asks no host, and takes every source from the folder named by
#: FETCHCONTENT_SOURCE_DIR_<NAME>.
DISCONNECTED = {
    "FETCHCONTENT_FULLY_DISCONNECTED": "ON",
    "FETCHCONTENT_BASE_DIR": f"{{build}}/{DEPS}",
}
#: Where FetchContent itself would put a source, in the build folder.
FOLDER = f"{DEPS}/%s-src"

#: Options of a declaration that take exactly one value (ExternalProject(3)).
_SINGLE = frozenset(
    (
        "GIT_REPOSITORY",
        "GIT_TAG",
        "HG_REPOSITORY",
        "HG_TAG",
        "SVN_REPOSITORY",
        "SVN_REVISION",
        "CVS_REPOSITORY",
        "CVS_TAG",
        "URL",
        "URL_HASH",
        "URL_MD5",
        "SOURCE_DIR",
        "DOWNLOAD_COMMAND",
        "BINARY_DIR",
        "SUBBUILD_DIR",
    )
)
_OTHER_METHODS = ("URL", "HG_REPOSITORY", "SVN_REPOSITORY", "CVS_REPOSITORY", "DOWNLOAD_COMMAND")
_KEYWORD = re.compile(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)*")
_COMMIT = re.compile(r"[0-9a-f]{40}")


class Declaration(msgspec.Struct, frozen=True):
    """
    A source that CMake asked for.

    Attributes:
        name: The name that FetchContent knows it by; of another download its address.
        url, ref: The git repository and the tag, branch or commit; *ref* is empty for any other
        kind of download. origin: ``file:line`` of the call. modules: The submodules that the build
        takes; None for all. pinnable: Can the lock name it, and the build take it from a folder?
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
        if call.command not in DOWNLOADS:
            continue
        # CMake expands a list in place only when it runs the command, after it was traced.
        arguments = [value for argument in call.arguments for value in argument.split(";")]
        declaration = _declaration(call, arguments)
        if declaration:
            # FetchContent takes the first declaration of a name (FetchContent(3)).
            declared.setdefault(declaration.name.lower(), declaration)
    return tuple(declared.values())


def _declaration(call: Call, arguments: Sequence[str]) -> Declaration | None:
    origin = f"{call.file}:{call.line}"
    if call.command == "file":
        if arguments[:1] != ["DOWNLOAD"]:
            return None
        url = require_safe("".join(arguments[1:2]), origin)
        return Declaration(url, url, "", origin, pinnable=False)
    options = _options(arguments[1:])
    method = next((method for method in _OTHER_METHODS if any(options.get(method, ()))), None)
    if method is None and "GIT_REPOSITORY" not in options:
        # The first argument of any other call may be anything.
        return None
    name = require_safe("".join(arguments[:1]), origin)
    # FetchContent_Populate takes a folder in place of a download only where the source was
    # declared.
    declared = call.command == "fetchcontent_declare"
    if "DOWNLOAD_COMMAND" not in options and "GIT_REPOSITORY" in options:
        url = require_safe("".join(options["GIT_REPOSITORY"]), origin)
        ref = require_safe("".join(options.get("GIT_TAG", ["master"])), origin)
        modules = (
            tuple(filter(None, options["GIT_SUBMODULES"])) if "GIT_SUBMODULES" in options else None
        )
        return Declaration(name, url, ref, origin, modules, declared)
    return (
        Declaration(name, require_safe(options[method][0], origin), "", origin, pinnable=False)
        if method
        else None
    )


def _options(values: Iterable[str]) -> dict[str, list[str]]:
    options: dict[str, list[str]] = {}
    key, rest = "", iter(values)
    for value in rest:
        if value in _SINGLE:
            options[value] = [next(rest, "")]
        elif _KEYWORD.fullmatch(value):
            key = value
            options[key] = []
        elif key:
            options[key].append(value)
    return options


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
            has no effect. The
            error's data hold the declarations.
    """
    declared = tuple(declared)
    faults = [
        f"{declaration.origin}: {declaration.name}: {fault}"
        for declaration in declared
        if declaration.name not in ignored
        and (fault := _fault(declaration, locked.fetched.get(declaration.name)))
    ]
    if complete:
        names = {declaration.name for declaration in declared}
        faults += [
            f"lock: {name}: CMake asks for no such source"
            for name in locked.fetched
            if name not in names
        ]
        faults += [
            f"ignored: {name}: CMake asks for no such source"
            for name in ignored
            if name not in names and "/" not in name and name not in locked.vendored
        ]
    if faults:
        raise SourceError(
            "source-unlocked",
            f"The lock does not pin the sources that CMake asks for in {fork}.",
            details=faults,
            data={"declarations": msgspec.to_builtins(declared)},
        )


def _fault(declaration: Declaration, entry: VendoredLock | None) -> str:
    url, ref = redact_credentials(declaration.url), declaration.ref
    if not declaration.pinnable or not ref:
        return f"{url} is a download that the lock cannot pin"
    if entry is None:
        return f"{url} at {ref} is not in the lock"
    if (entry.url, entry.ref) != (declaration.url, ref) or (
        _COMMIT.fullmatch(ref) and entry.commit != ref
    ):
        return (
            f"CMake asks for {url} at {ref}; the lock names {redact_credentials(entry.url)} "
            f"at {entry.ref} ({entry.commit})"
        )
    return ""


def fetch(session: RunContext, fork: str) -> dict[str, str]:
    """
    Bring every source that FetchContent would download for *fork*, and return their trees by name.

    Raises:
        source-unresolved: Some cannot be had; every one is named with its reason.
        source-mismatch: One is not the source that the lock names.
    """
    locked = session.lock.forks[fork]
    trees: dict[str, str] = {}
    missing: dict[str, str] = {}
    with (
        console.step(f"bring {len(locked.fetched)} vendored sources of {fork}"),
        session.store.lock("objects"),
    ):
        for name, entry in locked.fetched.items():
            try:
                trees[name] = sources.vendored_tree(session, fork, name, locked.vendored)
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
            "(--mirror URL=REPLACEMENT), and "
            "lock again. The default targets need none of them: leave --targets out.",
            data={"missing": list(missing), "present": sorted(trees)},
        )
    return trees


def defines(trees: Iterable[str]) -> dict[str, str]:
    """Return the CMake cache entries that hand the sources named *trees* to FetchContent."""
    folders = {
        f"FETCHCONTENT_SOURCE_DIR_{name.upper()}": f"{{build}}/{FOLDER % name.lower()}"
        for name in trees
    }
    return {**DISCONNECTED, **folders}


def pinned(session: RunContext, fork: str, declared: Sequence[Declaration]) -> ForkLock:
    """
    Return the lock of *fork* with exactly the sources *declared* in place of those that
    FetchContent would download.
    """
    spec, locked = session.project.fork(fork), session.lock.forks[fork]
    entries = {
        name: entry
        for name, entry in locked.vendored.items()
        if entry.kind == "submodule" and not _below(name, locked)
    }
    for declaration in declared:
        if declaration.name in spec.ignored or not declaration.pinnable:
            continue
        if _fault(declaration, locked.fetched.get(declaration.name)):
            source = VendoredLock(declaration.url, declaration.ref, UNRESOLVED, UNRESOLVED)
            entries |= resolve.pin(session, spec, declaration.name, source, declaration.modules)
        else:
            prefix = f"{declaration.name}/"
            entries |= {
                name: entry
                for name, entry in locked.vendored.items()
                if f"{name}/".startswith(prefix)
            }
    return msgspec.structs.replace(locked, vendored=dict(sorted(entries.items())))


def _below(name: str, locked: ForkLock) -> bool:
    return any(name.startswith(f"{other}/") for other in locked.fetched)
