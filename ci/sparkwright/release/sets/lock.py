"""
A set's ``pylock.toml`` (PEP 751), read as hostile and written by us.

Only wheels are in it, each with its sha256 and an address; whatever else the format knows (archives, directories, repositories, indexes to
ask) is refused. Needs nothing but `packaging`, as an installer on a Spark has no more.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec

from sparkwright.forks.stack import SourceError
from sparkwright.release.errors import ReleaseError

if TYPE_CHECKING:
    from packaging.markers import Environment
    from packaging.pylock import Package, PackageWheel, Pylock
    from packaging.tags import Tag

#: Bytes of a lock, and packages in it; vLLM's set has about two hundred.
LARGEST, MOST = 16 * 1024**2, 5000
#: Options of pip and uv for `requirements`: the set is whole, and may override what a package asks for (ci/release.yaml).
BY_HASH = "--no-deps --require-hashes -r"
SCHEMES = ("https", "http", "file", "")

_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+!-]{0,254}\.whl")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class Pinned(msgspec.Struct, frozen=True):
    """A wheel of a set: *url* is absolute, or relative to the index; *size* in bytes, 0 where the lock does not say."""

    name: str
    version: str
    filename: str
    url: str
    sha256: str
    size: int = 0


class SetLock(msgspec.Struct, frozen=True):
    """A lock that was read and found to hold wheels with hashes only; *what* names it for people."""

    lock: Pylock
    what: str

    @property
    def versions(self) -> dict[str, str]:
        """Normalised name → version of every package."""
        return {str(package.name): str(package.version) for package in self.lock.packages}


def read(data: bytes, what: str) -> SetLock:
    """
    Return the lock in *data*; *what* names it for people.

    Raises:
        lock-invalid: It is none, or has something in it that is no wheel with a sha256 at an address.
    """
    from packaging.pylock import Pylock, PylockValidationError

    if len(data) > LARGEST:
        raise ReleaseError("lock-invalid", f"{what} is larger than {LARGEST} bytes.")
    try:
        lock = Pylock.from_dict(tomllib.loads(data.decode("utf-8")))
    except (ValueError, PylockValidationError, RecursionError, TypeError, AttributeError) as error:
        raise ReleaseError("lock-invalid", f"{what} is no pylock.toml.", details=[str(error)[:1000]]) from error
    faults = [fault for package in lock.packages[:MOST] for fault in _faults(package)]
    if len(lock.packages) > MOST:
        faults.append(f"it names {len(lock.packages)} packages")
    if lock.extras or lock.dependency_groups or lock.default_groups:
        faults.append("it leaves a choice: extras or groups")
    if faults:
        raise ReleaseError("lock-invalid", f"{what} is no lock of wheels with hashes.", details=faults[:20])
    return SetLock(lock, what)


def _faults(package: Package) -> Iterator[str]:
    if package.version is None or not package.wheels or package.sdist or package.is_direct:
        yield f"{package.name}: no wheel with a version, or something beside wheels"
        return
    for wheel in package.wheels:
        name = _name(wheel)
        address = urlsplit(wheel.url or "")
        if not _FILE.fullmatch(name):
            yield f"{package.name}: {name!r:.200} is no name of a wheel"
        if not _SHA256.fullmatch(wheel.hashes.get("sha256", "")):
            yield f"{name}: no sha256"
        if wheel.path or not wheel.url or address.scheme not in SCHEMES or address.username or address.password:
            yield f"{name}: no address that could be asked: {wheel.path or wheel.url!r:.200}"
        elif not address.scheme and (address.netloc or ".." in address.path.split("/")):
            yield f"{name}: its address leaves the index: {wheel.url!r:.200}"
        if wheel.size is not None and wheel.size < 0:
            yield f"{name}: {wheel.size} bytes"


def _name(wheel: PackageWheel) -> str:
    try:
        return str(wheel.filename)
    # The format lets a wheel say neither name nor address.
    except (ValueError, TypeError, AttributeError):
        return ""


def select(read_lock: SetLock, tags: Sequence[Tag], environment: Mapping[str, str]) -> list[Pinned]:
    """
    Return what the lock selects for a Python: one wheel of each package that it needs there, by name.

    Args:
        tags: The wheel tags that it accepts, best first. *environment*: what markers are evaluated with (PEP 508).

    Raises:
        not-provided: The lock is not for that Python, or has no wheel of a package that it accepts.
    """
    from packaging.markers import UndefinedComparison, UndefinedEnvironmentName
    from packaging.pylock import PylockSelectError

    given: Environment = dict(environment)  # type: ignore[assignment]  # the names are those of the format
    try:
        chosen = list(read_lock.lock.select(environment=given, tags=list(tags)))
    except (PylockSelectError, UndefinedComparison, UndefinedEnvironmentName, KeyError) as error:
        where = f"Python {environment.get('python_full_version', '?')} on {environment.get('platform_machine', '?')}"
        raise SourceError(
            "not-provided", f"{read_lock.what} has no set for {where}.", details=[str(error)], todo="See which Python it is for."
        ) from error
    return sorted((_pinned(package, wheel) for package, wheel in chosen), key=lambda one: one.name)


def _pinned(package: Package, wheel: object) -> Pinned:
    own = next(one for one in package.wheels or () if one is wheel)
    return Pinned(str(package.name), str(package.version), _name(own), own.url or "", own.hashes["sha256"], own.size or 0)


def write(pinned: Mapping[Pinned, Sequence[str]], *, machine: str, pythons: Sequence[str]) -> bytes:
    """
    Return the lock of a set: equal sets give equal bytes.

    Args:
        pinned: Wheel → the Python versions that need it.
        pythons: All that the lock is for, such as ``3.12``.
    """
    ordered = sorted(pythons, key=_number)
    major, minor = _number(ordered[-1])
    lines = ['lock-version = "1.0"', f"environments = [{', '.join(_text(_marker(machine, one)) for one in ordered)}]"]
    lines += [f"requires-python = {_text(f'>={ordered[0]},<{major}.{minor + 1}')}", 'created-by = "sparkwright"']
    groups: dict[tuple[str, str], dict[Pinned, Sequence[str]]] = {}
    for one, needed in sorted(pinned.items(), key=lambda item: (item[0].name, item[0].filename)):
        groups.setdefault((one.name, one.version), {})[one] = needed
    for (name, version), wheels in groups.items():
        lines += ["", "[[packages]]", f"name = {_text(name)}", f"version = {_text(version)}"]
        needed = sorted({python for some in wheels.values() for python in some}, key=_number)
        if needed != ordered:
            lines.append(f"marker = {_text(' or '.join(f'python_version == {python!r}' for python in needed))}")
        lines += ["wheels = [", *(f"  {_wheel(one)}," for one in wheels), "]"]
    return ("\n".join(lines) + "\n").encode()


def requirements(pinned: Mapping[Pinned, Sequence[str]], *, machine: str, pythons: Sequence[str]) -> bytes:
    """Return the same set for ``pip install`` with `BY_HASH`: direct addresses, so that no index is asked."""
    lines = [f"# {machine}, Python {', '.join(sorted(pythons, key=_number))}: pip install {BY_HASH}"]
    for one, needed in sorted(pinned.items(), key=lambda item: (item[0].name, item[0].filename)):
        marker = " or ".join(f"python_version == {python!r}" for python in sorted(needed, key=_number))
        rest = f" ; {marker}" if set(needed) != set(pythons) else ""
        lines.append(f"{one.name} @ {one.url}{rest} --hash=sha256:{one.sha256}")
    return ("\n".join(lines) + "\n").encode()


def _number(python: str) -> tuple[int, ...]:
    return tuple(map(int, python.split(".")))


def _marker(machine: str, python: str) -> str:
    return f"sys_platform == 'linux' and platform_machine == '{machine}' and python_version == '{python}'"


def _wheel(one: Pinned) -> str:
    size = f", size = {one.size}" if one.size else ""
    return f"{{ name = {_text(one.filename)}, url = {_text(one.url)}{size}, hashes = {{ sha256 = {_text(one.sha256)} }} }}"


def _text(text: str) -> str:
    """Return *text* as a basic string of TOML, whose escapes are those of JSON."""
    return msgspec.json.encode(text).decode()
