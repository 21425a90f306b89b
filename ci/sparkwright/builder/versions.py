"""
Do the versions fit together: this Python and the locked tools with what the source asks for, the locked forks with what the wheel will
require.
"""

from __future__ import annotations

import platform
import sys
import tomllib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from sparkwright.builder.environment import pylock, toolchain
from sparkwright.builder.source_tree import SourceTree
from sparkwright.builder.wheel.archive import WheelName
from sparkwright.forks.context import Session

if TYPE_CHECKING:
    from packaging.requirements import Requirement

#: Minor versions of Python 3: the oldest whose grammar `ast` knows, and one that does not exist yet.
_OLDEST, _NEWEST = 7, 30


def oldest_python(session: Session, source: SourceTree) -> tuple[int, int]:
    """Return the oldest Python that *source* admits; this one where it does not say."""
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    try:
        admitted = SpecifierSet(str(_project(session, source).get("requires-python", ">=" + platform.python_version())))
    except InvalidSpecifier:
        return sys.version_info[:2]
    return 3, next((minor for minor in range(_OLDEST, _NEWEST) if f"3.{minor}" in admitted), sys.version_info[1])


def _project(session: Session, source: SourceTree) -> dict[str, object]:
    found = _pyproject(session, source).get("project")
    return found if isinstance(found, dict) else {}


def _pyproject(session: Session, source: SourceTree) -> dict[str, object]:
    try:
        return tomllib.loads((session.objects.blob(source.tree, "pyproject.toml") or b"").decode())
    except ValueError:
        return {}


def versions(session: Session, source: SourceTree) -> Iterator[str]:
    """Yield what does not fit together: this Python, the locked tools, and the locked forks that the wheel will require."""
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    wanted, kind = str(_project(session, source).get("requires-python", "")), session.project.fork(source.fork).build
    try:
        if kind != "headers" and platform.python_version() not in SpecifierSet(wanted):
            yield f"pyproject.toml: {source.fork} wants Python {wanted}; this is {platform.python_version()}"
    except InvalidSpecifier:
        yield f"pyproject.toml: requires-python {wanted!r} cannot be read"
    if kind != "headers":
        yield from _tools(session, source)
    requires = toolchain.spec(session.project).forks[source.fork].requires
    yield from forks(session, [text for text in requires.values() if text], "environment.yaml (requires)")


def _tools(session: Session, source: SourceTree) -> Iterator[str]:
    """Yield the build requirements that the locked tools do not meet; a graft needs only those that it has."""
    from packaging.requirements import InvalidRequirement, Requirement
    from packaging.utils import canonicalize_name
    from packaging.version import Version

    system = _pyproject(session, source).get("build-system")
    listed = system.get("requires", []) if isinstance(system, dict) else []
    locked = {canonicalize_name(name): WheelName.of(file).version for name, file, _ in pylock.wheels(session.project)}
    for text in map(str, listed):
        try:
            one = Requirement(text)
        except InvalidRequirement:
            continue
        if one.marker and not one.marker.evaluate():
            continue
        version = locked.get(canonicalize_name(one.name))
        if version is not None and not one.specifier.contains(Version(version), prereleases=True):
            yield f"pyproject.toml: building {source.fork} requires {text}, and pylock.toml has {version}"


def forks(session: Session, requirements: list[str], where: str) -> Iterator[str]:
    """Yield the *requirements* on forks of the stack that the locked state of those does not meet."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    settings = toolchain.spec(session.project).forks
    names = {canonicalize_name(one.distribution): fork for fork, one in settings.items() if one.distribution}
    for requirement in map(Requirement, requirements):
        fork = names.get(canonicalize_name(requirement.name), "")
        version = _version(session, fork) if fork else ""
        if version and not _admits(requirement, f"{version}+{session.project.spec.label}"):
            yield f"{where}: the wheel would require {requirement}, and the stack's {fork} is {version}"


def _version(session: Session, fork: str) -> str:
    """Return upstream's version of a fork, as far as the lock says it in a way that can be compared."""
    from packaging.version import InvalidVersion, Version

    locked = session.lock.forks[fork]
    text = locked.sdist.version if locked.sdist else locked.git.ref.removeprefix("v") if locked.git else ""
    try:
        return str(Version(text))
    except InvalidVersion:
        return ""


def _admits(requirement: Requirement, version: str) -> bool:
    return requirement.specifier.contains(version, prereleases=True)
