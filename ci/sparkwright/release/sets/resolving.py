"""
From wheels of ours to the whole set: uv resolves what they require on the user's package index, one Python after the other.

Nothing but wheels is taken, and nothing but the wheels at hand and that one index is asked: no configuration, no further index, no build.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

import msgspec

from sparkwright.builder import pylock
from sparkwright.core import process
from sparkwright.core.console import console
from sparkwright.core.errors import CommandError, WheelError
from sparkwright.core.files import sha256_file
from sparkwright.release.errors import ReleaseError
from sparkwright.release.sets import lock
from sparkwright.release.sets.lock import Pinned

if TYPE_CHECKING:
    from packaging.tags import Tag

    from sparkwright.forks.stack import Project
    from sparkwright.release.decide.policy import ReleasePolicy

#: From the oldest Python that the program itself runs on to the newest for which the package index has every wheel of the stacks.
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
#: Times that versions are brought together; each time at least one more package is decided.
ROUNDS = 8
#: Lines of uv's explanation that are shown.
SHOWN = 12
#: What one build of must be for all: extensions are compiled against it.
TORCH = "torch"

#: As uv writes it.
Package = dict[str, Any]


class Resolved(msgspec.Struct, frozen=True):
    """A set: the bytes of its lock and of its hashed requirements, and what is in it: normalised name → version."""

    lock: bytes
    requirements: bytes
    packages: dict[str, str]


class Asked(msgspec.Struct, frozen=True):
    """
    What is asked of the resolver, beside the Python.

    Attributes:
        wheels: Project → its wheel.
        requires: Requirements beside them. *overrides*: in place of what packages require. *pins*: what is decided already.
        cache: uv's; empty for the user's own.
    """

    wheels: dict[str, Path]
    machine: str
    index_url: str
    requires: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    pins: tuple[str, ...] = ()
    cache: str = ""


def of_stack(
    project: Project, policy: ReleasePolicy, wheels: Sequence[Path], machine: str, *, index_url: str, urls: Mapping[str, str],
    cache: Path | None = None,
) -> Resolved:  # fmt: skip
    """
    Return the set of *wheels* as the stack's rule in ci/release.yaml wants it, with the torch that the stack was built with.

    Raises:
        As `resolve`.
    """
    rule = policy.sets.get(project.stack)
    return resolve(
        wheels, machine, python=rule.pythons if rule else PYTHONS, index_url=index_url, urls=urls, requires=rule.requires if rule else (),
        overrides=[one.requirement for one in rule.overrides] if rule else (), torch=torch_of(project.build_folder / "pylock.toml"),
        cache=cache,
    )  # fmt: skip


def torch_of(path: Path) -> str:
    """Return the version of torch that the build's lock at *path* names; empty where there is no such lock, or no torch in it."""
    try:
        packages = tomllib.loads(path.read_text("utf-8")).get("packages", [])
    except (OSError, tomllib.TOMLDecodeError):
        return ""
    return next((str(one["version"]) for one in packages if one.get("name") == TORCH), "")


def resolve(
    wheels: Sequence[Path], machine: str, *, index_url: str, urls: Mapping[str, str], python: str | Sequence[str] = PYTHONS,
    overrides: Iterable[str] = (), requires: Iterable[str] = (), torch: str = "", cache: Path | None = None,
) -> Resolved:  # fmt: skip
    """
    Return the set of *wheels* and all that they require, locked for *machine*.

    Every package has one version, whatever the Python; the wheel may be another.

    Args:
        urls: File name of a wheel → its address in our index.
        python: Versions that it is for (``3.12``).
        overrides: Requirements in place of those that packages state. *requires*: further ones.
        torch: The version that the wheels were compiled against; empty where it does not matter.
        cache: A folder for uv's cache; the user's own by default.

    Raises:
        set-unresolved: No set satisfies all requirements, or a package has no wheel with a sha256.
        set-mixed: Only with another torch than that one; or two wheels are of one project.
        wheel-invalid: A wheel's name is none.
    """
    pythons = sorted((python,) if isinstance(python, str) else python, key=lambda one: [int(part) for part in one.split(".")])
    own = _projects(wheels)
    pins = (f"{TORCH}=={torch}",) if torch else ()
    asked = Asked(own, machine, index_url, tuple(requires), tuple(overrides), pins, str(cache or ""))
    with console.step(f"lock the set for {machine}"), tempfile.TemporaryDirectory(prefix="set-") as folder:
        found = _agreed(asked, pythons, Path(folder), torch)
    pinned: dict[Pinned, list[str]] = {}
    for one, packages in found.items():
        for package in packages:
            pinned.setdefault(_pinned(package, asked, one, urls), []).append(one)
    data = lock.write(pinned, machine=machine, pythons=pythons)
    read = lock.read(data, f"the lock for {machine}")
    return Resolved(data, lock.requirements(pinned, machine=machine, pythons=pythons), read.versions)


def _agreed(asked: Asked, pythons: Sequence[str], folder: Path, torch: str) -> dict[str, list[Package]]:
    """
    Return what each Python gets, the same version of every package.

    A Python for which what the others have does not do is resolved by itself, near to them; what it has otherwise then holds for all.
    """
    for _ in range(ROUNDS):
        made: dict[str, list[Package]] = {}
        for python in pythons:
            before = {str(one["name"]): str(one["version"]) for packages in made.values() for one in packages}
            others = tuple(f"{name}=={version}" for name, version in before.items() if name not in asked.wheels)
            try:
                made[python] = _resolved(msgspec.structs.replace(asked, pins=(*asked.pins, *others)), python, folder, torch)
            except ReleaseError as error:
                if error.reference != "set-unresolved":
                    raise
                if not made:
                    raise
                near = {str(one["name"]): str(one["version"]) for one in _resolved(asked, python, folder, torch, near=list(made)[-1])}
                other = {f"{name}=={version}" for name, version in near.items() if before.get(name, version) != version}
                asked = msgspec.structs.replace(asked, pins=(*asked.pins, *sorted(other)))
                break
        else:
            return made
    raise ReleaseError("set-unresolved", f"No one version of each package does for all of Python {', '.join(pythons)} on {asked.machine}.")


def _projects(wheels: Sequence[Path]) -> dict[str, Path]:
    from packaging.utils import InvalidWheelFilename, parse_wheel_filename

    found: dict[str, Path] = {}
    for path in wheels:
        try:
            project = str(parse_wheel_filename(path.name)[0])
        except InvalidWheelFilename as error:
            raise WheelError("wheel-invalid", f"{path.name} is not the name of a wheel.", details=[str(error)]) from error
        if project in found:
            raise ReleaseError("set-mixed", f"A set holds one {project}.", details=[found[project].name, path.name])
        found[project] = path
    return found


def _resolved(asked: Asked, python: str, folder: Path, torch: str, *, near: str = "") -> list[Package]:
    try:
        return _compiled(asked, python, folder, near=near)
    except CommandError as error:
        if error.reference != "command-failed":
            raise
        if torch and (other := _unpinned(asked, python, folder)) and other != torch:
            details = [f"the stack was built with torch {torch}", f"the set wants torch {other}"]
            raise ReleaseError("set-mixed", "These wheels want another torch than they were compiled against.", details=details) from error
        says = [line for line in error.details if line.strip()][-SHOWN:]
        raise ReleaseError(
            "set-unresolved", f"No set for Python {python} on {asked.machine} satisfies what these wheels require.", details=says
        ) from error


def _unpinned(asked: Asked, python: str, folder: Path) -> str:
    """Return the torch that a set would have, were only that not pinned; empty where there is none even so."""
    pins = tuple(pin for pin in asked.pins if not pin.startswith(f"{TORCH}=="))
    try:
        packages = _compiled(msgspec.structs.replace(asked, pins=pins), python, folder)
    except CommandError as error:
        if error.reference != "command-failed":
            raise
        return ""
    return next((str(package["version"]) for package in packages if package["name"] == TORCH), "")


def _compiled(asked: Asked, python: str, folder: Path, *, near: str = "") -> list[Package]:
    """Return what uv resolves, package by package; close to what it resolved for the Python *near*, where that is possible."""
    from uv import find_uv_bin

    direct = [f"{project} @ {path.resolve().as_uri()}" for project, path in sorted(asked.wheels.items())]
    files = {"requirements.in": [*direct, *asked.requires], "overrides.txt": asked.overrides, "constraints.txt": asked.pins}
    for name, lines in files.items():
        (folder / name).write_text("".join(f"{line}\n" for line in lines), "utf-8")
    made = _file(folder, python)
    made.unlink(missing_ok=True)
    if near:
        # uv prefers the versions that it finds where it writes to.
        shutil.copyfile(_file(folder, near), made)
    options = ["--quiet", "--format", "pylock.toml", "--no-header", "--no-annotate", "--only-binary", ":all:", "--output-file", str(made)]
    target = ["--python-version", python, "--python-platform", f"{asked.machine}-manylinux_2_{pylock.GLIBC}"]
    # Otherwise uv asks every Python of this machine for its version, which takes seconds, though none runs.
    target += ["--python", sys.executable]
    limits = ["--overrides", str(folder / "overrides.txt"), "--constraints", str(folder / "constraints.txt")]
    source = ["--default-index", asked.index_url, str(folder / "requirements.in")]
    nowhere = ("UV_FIND_LINKS", "UV_INDEX", "UV_INDEX_URL", "UV_EXTRA_INDEX_URL", "UV_DEFAULT_INDEX", "UV_CONSTRAINT", "UV_OVERRIDE")
    env = process.clean_environment(UV_NO_CONFIG="1", UV_PYTHON_DOWNLOADS="never", UV_CACHE_DIR=asked.cache, **dict.fromkeys(nowhere, ""))
    process.output([find_uv_bin(), "pip", "compile", *options, *target, *limits, *source], env=env)
    packages: list[Package] = tomllib.loads(made.read_text("utf-8"))["packages"]
    return packages


def _file(folder: Path, python: str) -> Path:
    return folder / f"pylock.py{python.replace('.', '')}.toml"


def _pinned(package: Package, asked: Asked, python: str, urls: Mapping[str, str]) -> Pinned:
    """Return the wheel of *package* for that Python: ours at its address in our index, another's where the package index has it."""
    name, version = str(package["name"]), str(package.get("version", ""))
    if path := asked.wheels.get(name):
        return Pinned(name, version, path.name, urls[path.name], sha256_file(path), path.stat().st_size)
    ranks = {str(tag): rank for rank, tag in enumerate(tags(python, asked.machine))}
    rated = [(rank, filename, wheel) for wheel in package.get("wheels", ()) for filename, rank in _rated(wheel, ranks)]
    if not rated:
        raise ReleaseError("set-unresolved", f"{name} {version} has no wheel for Python {python} on {asked.machine}.")
    _, filename, wheel = min(rated, key=lambda one: one[:2])
    sha256 = wheel.get("hashes", {}).get("sha256", "")
    if not sha256:
        raise ReleaseError("set-unresolved", f"The package index states no sha256 of {filename}.", todo="Use an index that does.")
    return Pinned(name, version, filename, _public(str(wheel["url"])), sha256, int(wheel.get("size", 0)))


def _rated(wheel: Mapping[str, Any], ranks: Mapping[str, int]) -> list[tuple[str, int]]:
    from packaging.utils import InvalidWheelFilename, parse_wheel_filename

    filename = str(wheel.get("name") or unquote(urlsplit(str(wheel.get("url", ""))).path.rpartition("/")[2]))
    try:
        fitting = [ranks[str(tag)] for tag in parse_wheel_filename(filename)[3] if str(tag) in ranks]
    except InvalidWheelFilename:
        return []
    return [(filename, min(fitting))] if fitting else []


def tags(python: str, machine: str) -> list[Tag]:
    """Return the wheel tags that *python* takes on DGX OS, best first."""
    return pylock.tags(tuple(map(int, python.split("."))), machine)


def _public(url: str) -> str:
    """Return *url* without a user's name, password and fragment: it is published."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return parts._replace(netloc=host, fragment="").geturl()
