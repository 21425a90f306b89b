"""
The wheels of a locked set (``pylock.toml``, PEP 751), read as hostile.

Only wheels with a sha256 at an address are accepted; archives, directories, repositories, extras
and whatever else the format has are refused.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

import msgspec

from sparkwright.client.errors import ClientError

if TYPE_CHECKING:
    from packaging.markers import Environment
    from packaging.pylock import Package, PackageWheel, Pylock
    from packaging.tags import Tag

_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+!-]{0,254}\.whl")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class LockedWheel(msgspec.Struct, frozen=True, order=True):
    """
    A wheel of a locked set.

    Attributes:
        project: The normalised name.
        url: Absolute, or relative to the root of the index.
        size: In bytes; 0 if the lock does not state it.
    """

    project: str
    version: str
    name: str
    url: str
    sha256: str
    size: int = 0


def read(data: bytes, what: str) -> Pylock:
    """
    Return the lock in *data*; *what* names it in messages.

    Raises:
        lock-invalid: It is not one, or holds something else than wheels with hashes and addresses.
    """
    from packaging.pylock import Pylock, PylockValidationError

    try:
        lock = Pylock.from_dict(tomllib.loads(data.decode("utf-8")))
    except (ValueError, PylockValidationError, RecursionError, TypeError, AttributeError) as error:
        raise ClientError(
            "lock-invalid", f"{what} is no pylock.toml.", details=[str(error)[:1000]]
        ) from error
    faults = [fault for package in lock.packages for fault in _faults(package)]
    if lock.extras or lock.dependency_groups or lock.default_groups:
        faults.append("it leaves a choice: extras or groups")
    if faults:
        raise ClientError(
            "lock-invalid", f"{what} is no lock of wheels with hashes.", details=faults[:20]
        )
    return lock


def _faults(package: Package) -> Iterator[str]:
    if package.version is None or not package.wheels or package.sdist or package.is_direct:
        yield f"{package.name}: no wheel with a version, or something beside wheels"
        return
    for wheel in package.wheels:
        name, address = _name(wheel), urlsplit(wheel.url or "")
        if not _FILE.fullmatch(name):
            yield f"{package.name}: {name!r:.200} is no name of a wheel"
        if not _SHA256.fullmatch(wheel.hashes.get("sha256", "")):
            yield f"{name}: no sha256"
        if wheel.path or not wheel.url or address.scheme not in ("https", "http", ""):
            yield f"{name}: no address that could be asked: {wheel.path or wheel.url!r:.200}"
        elif address.username or address.password:
            yield f"{name}: credentials in its address"
        elif not address.scheme and (address.netloc or ".." in re.split(r"[/\\]", address.path)):
            yield f"{name}: its address leaves the index: {wheel.url!r:.200}"
        if wheel.size is not None and wheel.size < 0:
            yield f"{name}: {wheel.size} bytes"


def _name(wheel: PackageWheel) -> str:
    return wheel.name or unquote(urlsplit(wheel.url or "").path.rpartition("/")[2])


def select(
    lock: Pylock, tags: Sequence[Tag], markers: Environment, what: str
) -> tuple[LockedWheel, ...]:
    """
    Return one wheel of each package that the lock selects for a Python, by project.

    Args:
        tags: The wheel tags that this Python accepts, best first.
        markers: The values of environment markers (PEP 508).

    Raises:
        release-unknown: The lock is not for this Python, or has no wheel of a package for it.
    """
    from packaging.markers import UndefinedComparison, UndefinedEnvironmentName
    from packaging.pylock import PackageWheel, PylockSelectError
    from packaging.utils import canonicalize_name

    try:
        chosen = list(lock.select(environment=markers, tags=list(tags)))
    except (PylockSelectError, UndefinedComparison, UndefinedEnvironmentName, KeyError) as error:
        raise ClientError(
            "release-unknown",
            f"{what} has no set for Python {markers.get('python_full_version')} on this machine.",
            details=[str(error)],
            todo="Name another with --python; `sparkwright list` shows those that it is for.",
        ) from error
    wheels = [
        LockedWheel(
            canonicalize_name(package.name),
            str(package.version),
            _name(wheel),
            wheel.url or "",
            wheel.hashes["sha256"],
            wheel.size or 0,
        )
        for package, wheel in chosen
        if isinstance(wheel, PackageWheel)
    ]
    return tuple(sorted(wheels, key=lambda wheel: wheel.project))
