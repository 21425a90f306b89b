"""
The locked set: wheels of ours and everything that they require, as a ``pylock.toml`` (PEP 751).

uv resolves it from the wheels at hand and one package index: no configuration, no other index, no
source archive. Every package has one version whatever the Python; the wheel may be another.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import msgspec
from packaging.utils import parse_wheel_filename

from sparkwright.builder import pylock
from sparkwright.client.locked_wheels import LockedWheel
from sparkwright.client.records import Machine
from sparkwright.core import process
from sparkwright.core.console import console
from sparkwright.core.errors import CommandError
from sparkwright.release.errors import ReleaseError
from sparkwright.release.policy import SetRule

#: How often versions are brought together; each time at least one more package is decided.
ROUNDS = 8
#: Lines of uv's explanation that are shown.
SHOWN = 12
#: The library that extensions are compiled against.
TORCH = "torch"
#: Settings of uv that would add a source.
_SOURCES = (
    *("UV_FIND_LINKS", "UV_INDEX", "UV_INDEX_URL", "UV_EXTRA_INDEX_URL", "UV_DEFAULT_INDEX"),
    *("UV_CONSTRAINT", "UV_OVERRIDE"),
)


class LockedSet(msgspec.Struct, frozen=True):
    """The bytes of the lock, its wheels, and the Python versions that it is for."""

    lock: bytes
    wheels: tuple[LockedWheel, ...]
    pythons: tuple[str, ...]

    @property
    def packages(self) -> dict[str, str]:
        """Normalised name → version."""
        return {wheel.project: wheel.version for wheel in self.wheels}


def torch_version(build_lock: Path) -> str:
    """Return the version of torch in the lock of a build; empty without a lock or a torch."""
    try:
        packages = tomllib.loads(build_lock.read_text("utf-8")).get("packages", [])
    except (OSError, tomllib.TOMLDecodeError):
        return ""
    return next((str(entry["version"]) for entry in packages if entry.get("name") == TORCH), "")


def resolve(
    own: Mapping[LockedWheel, Path],
    machine: Machine,
    rule: SetRule,
    *,
    index_url: str,
    torch: str = "",
    cache: Path | None = None,
) -> LockedSet:
    """
    Return the set of wheels of ours for *machine*.

    Args:
        own: Each, with its address once it is published, and its file.
        rule: The Pythons, further requirements and overrides of the stack.
        torch: The version that the wheels were compiled against; empty for any.
        cache: The folder of uv's cache; the user's own by default.

    Raises:
        set-unresolved: No set satisfies all requirements, or a package has no wheel with a sha256.
    """
    pythons = tuple(sorted(rule.pythons, key=_number))
    with (
        console.step(f"lock the set for {machine}"),
        tempfile.TemporaryDirectory(prefix="set-") as folder,
    ):
        resolver = _Resolver(own, machine, rule, index_url, Path(folder), cache)
        resolved = resolver.agree(pythons, (f"{TORCH}=={torch}",) if torch else ())
    needed: dict[LockedWheel, list[str]] = {}
    for python, packages in resolved.items():
        for package in packages:
            needed.setdefault(resolver.wheel(package, python), []).append(python)
    return LockedSet(
        write(needed, machine, pythons),
        tuple(sorted(needed, key=msgspec.structs.astuple)),
        pythons,
    )


class _Resolver:
    """Runs uv for one set, in *folder*."""

    def __init__(
        self,
        own: Mapping[LockedWheel, Path],
        machine: Machine,
        rule: SetRule,
        index_url: str,
        folder: Path,
        cache: Path | None,
    ) -> None:
        self._own = {wheel.project: (wheel, path) for wheel, path in own.items()}
        self._machine, self._rule, self._index_url = machine, rule, index_url
        self._folder, self._cache = folder, cache

    def agree(self, pythons: Sequence[str], pins: tuple[str, ...]) -> dict[str, list[Any]]:
        """
        Return the packages of each Python, every package in one version.

        A Python that cannot have the versions of those before it is resolved by itself, close to
        them; the versions in which it differs then hold for all.
        """
        for _ in range(ROUNDS):
            resolved: dict[str, list[Any]] = {}
            for python in pythons:
                before = {
                    package["name"]: package["version"]
                    for packages in resolved.values()
                    for package in packages
                    if package["name"] not in self._own
                }
                others = tuple(f"{name}=={version}" for name, version in before.items())
                try:
                    resolved[python] = self._compile(python, (*pins, *others))
                except ReleaseError:
                    if not resolved:
                        raise
                    alone = self._compile(python, pins, close_to=list(resolved)[-1])
                    pins += tuple(
                        f"{package['name']}=={package['version']}"
                        for package in alone
                        if before.get(package["name"], package.get("version"))
                        != package.get("version")
                    )
                    break
            else:
                return resolved
        raise ReleaseError(
            "set-unresolved",
            f"No single version of each package fits all of Python {', '.join(pythons)} on "
            f"{self._machine}.",
        )

    def _compile(self, python: str, pins: Sequence[str], *, close_to: str = "") -> list[Any]:
        """Return what uv resolves, near to what it resolved for the Python *close_to*."""
        from uv import find_uv_bin

        direct = [
            f"{project} @ {path.resolve().as_uri()}"
            for project, (_, path) in sorted(self._own.items())
        ]
        overrides = [override.requirement for override in self._rule.overrides]
        inputs: dict[str, Iterable[str]] = {
            "requirements.in": [*direct, *self._rule.requires],
            "overrides.txt": overrides,
            "constraints.txt": pins,
        }
        for name, lines in inputs.items():
            (self._folder / name).write_text("".join(f"{line}\n" for line in lines), "utf-8")
        output = self._output(python)
        output.unlink(missing_ok=True)
        if close_to:
            # uv prefers the versions of the file that it writes.
            shutil.copyfile(self._output(close_to), output)
        options = ["--quiet", "--format", "pylock.toml", "--no-header", "--no-annotate"]
        options += ["--only-binary", ":all:", "--output-file", str(output)]
        platform = f"{self._machine}-manylinux_2_{pylock.GLIBC}"
        options += ["--python-version", python, "--python-platform", platform]
        # Otherwise uv asks every Python of this machine for its version, which takes seconds.
        options += ["--python", sys.executable, "--default-index", self._index_url]
        options += ["--overrides", str(self._folder / "overrides.txt")]
        options += ["--constraints", str(self._folder / "constraints.txt")]
        environment = process.clean_environment(
            UV_NO_CONFIG="1",
            UV_PYTHON_DOWNLOADS="never",
            UV_CACHE_DIR=str(self._cache or ""),
            **dict.fromkeys(_SOURCES, ""),
        )
        source = str(self._folder / "requirements.in")
        try:
            process.output([find_uv_bin(), "pip", "compile", *options, source], env=environment)
        except CommandError as error:
            if error.reference != "command-failed":
                raise
            raise ReleaseError(
                "set-unresolved",
                f"No set for Python {python} on {self._machine} satisfies these wheels.",
                details=[line for line in error.details if line.strip()][-SHOWN:],
            ) from error
        packages: list[Any] = tomllib.loads(output.read_text("utf-8"))["packages"]
        return packages

    def _output(self, python: str) -> Path:
        return self._folder / f"pylock.py{python.replace('.', '')}.toml"

    def wheel(self, package: Mapping[str, Any], python: str) -> LockedWheel:
        """Return the wheel of *package* for *python*."""
        name, version = package["name"], package.get("version", "")
        if name in self._own:
            return self._own[name][0]
        ranks = {tag: n for n, tag in enumerate(pylock.tags(_number(python), self._machine))}
        rated = [
            (min(fitting), filename, wheel)
            for wheel in package.get("wheels", ())
            for filename in [_filename(wheel)]
            if (
                fitting := [ranks[tag] for tag in parse_wheel_filename(filename)[3] if tag in ranks]
            )
        ]
        if not rated:
            raise ReleaseError(
                "set-unresolved",
                f"{name} {version} has no wheel for Python {python} on {self._machine}.",
            )
        _, filename, wheel = min(rated, key=lambda entry: entry[:2])
        sha256 = wheel.get("hashes", {}).get("sha256", "")
        if not sha256:
            raise ReleaseError(
                "set-unresolved",
                f"The package index states no sha256 of {filename}.",
                todo="Use an index that does.",
            )
        url = _public(wheel["url"])
        return LockedWheel(name, version, filename, url, sha256, int(wheel.get("size", 0)))


def _filename(wheel: Mapping[str, Any]) -> str:
    last = urlsplit(str(wheel.get("url", ""))).path.rpartition("/")[2]
    return str(wheel.get("name") or unquote(last))


def _public(url: str) -> str:
    """Return *url* without user, password and fragment, as it is published."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], fragment="").geturl()


def _number(python: str) -> tuple[int, ...]:
    return tuple(map(int, python.split(".")))


def write(
    needed: Mapping[LockedWheel, Sequence[str]], machine: Machine, pythons: Sequence[str]
) -> bytes:
    """
    Return the lock; equal sets give equal bytes.

    Args:
        needed: Wheel → the Pythons that need it.
    """
    major, minor = _number(pythons[-1])
    platform = f"sys_platform == 'linux' and platform_machine == '{machine}'"
    environments = [f"{platform} and python_version == '{python}'" for python in pythons]
    lines = [
        'lock-version = "1.0"',
        f"environments = [{', '.join(map(_string, environments))}]",
        f"requires-python = {_string(f'>={pythons[0]},<{major}.{minor + 1}')}",
        'created-by = "sparkwright"',
    ]
    packages: dict[tuple[str, str], dict[LockedWheel, Sequence[str]]] = {}
    for wheel, own in sorted(needed.items(), key=lambda item: msgspec.structs.astuple(item[0])):
        packages.setdefault((wheel.project, wheel.version), {})[wheel] = own
    for (project, version), wheels in packages.items():
        lines += ["", "[[packages]]", f"name = {_string(project)}", f"version = {_string(version)}"]
        used = {python for own in wheels.values() for python in own}
        if used != set(pythons):
            marker = " or ".join(
                f"python_version == '{python}'" for python in sorted(used, key=_number)
            )
            lines.append(f"marker = {_string(marker)}")
        lines += ["wheels = [", *(f"  {_entry(wheel)}," for wheel in wheels), "]"]
    return ("\n".join(lines) + "\n").encode()


def _entry(wheel: LockedWheel) -> str:
    size = f", size = {wheel.size}" if wheel.size else ""
    hashes = f"hashes = {{ sha256 = {_string(wheel.sha256)} }}"
    return f"{{ name = {_string(wheel.name)}, url = {_string(wheel.url)}{size}, {hashes} }}"


def _string(text: str) -> str:
    """Return *text* as a basic string of TOML, whose escapes are those of JSON."""
    return msgspec.json.encode(text).decode()
