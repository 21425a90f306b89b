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
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
from packaging.pylock import PackageWheel, Pylock, PylockSelectError
from uv import find_uv_bin

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
    """The bytes of the lock, what it holds (normalised name → version), and its Pythons."""

    lock: bytes
    packages: dict[str, str]
    pythons: tuple[str, ...]


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
) -> LockedSet:
    """
    Return the set of wheels of ours for *machine*.

    Args:
        own: Each, with its address once it is published, and its file.
        rule: The Pythons, further requirements and overrides of the stack.
        torch: The version that the wheels were compiled against; empty for any.

    Raises:
        set-unresolved: No set satisfies all requirements, or a package has no wheel with a sha256.
    """
    pythons = tuple(sorted(rule.pythons, key=_number))
    with (
        console.step(f"lock the set for {machine}"),
        tempfile.TemporaryDirectory(prefix="set-") as folder,
    ):
        resolver = _Resolver(own, machine, rule, index_url, Path(folder))
        resolved = resolver.agree(pythons, [f"{TORCH}=={torch}"] if torch else [])
    needed: dict[LockedWheel, list[str]] = {}
    for python, wheels in resolved.items():
        for wheel in wheels:
            needed.setdefault(wheel, []).append(python)
    packages = {wheel.project: wheel.version for wheel in sorted(needed)}
    return LockedSet(write(needed, machine, pythons), packages, pythons)


class _Resolver:
    """Runs uv for one set, in *folder*."""

    def __init__(
        self,
        own: Mapping[LockedWheel, Path],
        machine: Machine,
        rule: SetRule,
        index_url: str,
        folder: Path,
    ) -> None:
        self._own = {wheel.project: wheel for wheel in own}
        self._machine, self._index_url, self._folder = machine, index_url, folder
        direct = [f"{wheel.project} @ {path.resolve().as_uri()}" for wheel, path in own.items()]
        self._write("requirements.in", [*sorted(direct), *rule.requires])
        self._write("overrides.txt", [override.requirement for override in rule.overrides])

    def _write(self, name: str, lines: Sequence[str]) -> Path:
        path = self._folder / name
        path.write_text("".join(f"{line}\n" for line in lines), "utf-8")
        return path

    def agree(self, pythons: Sequence[str], pins: list[str]) -> dict[str, list[LockedWheel]]:
        """
        Return the wheels of each Python, every package in one version.

        A Python that cannot have the versions of those before it is resolved by itself, close to
        them; the versions in which it differs then hold for all.
        """
        for _ in range(ROUNDS):
            resolved: dict[str, list[LockedWheel]] = {}
            versions: dict[str, str] = {}
            for python in pythons:
                others = [f"{project}=={version}" for project, version in versions.items()]
                try:
                    resolved[python] = self._compile(python, [*pins, *others])
                except ReleaseError:
                    if not resolved:
                        raise
                    alone = self._compile(python, pins, close_to=list(resolved)[-1])
                    pins += [
                        f"{wheel.project}=={wheel.version}"
                        for wheel in alone
                        if versions.get(wheel.project, wheel.version) != wheel.version
                    ]
                    break
                for wheel in resolved[python]:
                    if wheel.project not in self._own:
                        versions[wheel.project] = wheel.version
            else:
                return resolved
        raise ReleaseError(
            "set-unresolved",
            f"No single version of each package fits all of Python {', '.join(pythons)} on "
            f"{self._machine}.",
        )

    def _compile(
        self, python: str, pins: Sequence[str], *, close_to: str = ""
    ) -> list[LockedWheel]:
        """Return what uv resolves, near to what it resolved for the Python *close_to*."""
        output = self._output(python)
        output.unlink(missing_ok=True)
        if close_to:
            # uv prefers the versions of the file that it writes.
            shutil.copyfile(self._output(close_to), output)
        command = [
            *(find_uv_bin(), "pip", "compile", "--quiet", "--no-header", "--no-annotate"),
            *("--format", "pylock.toml", "--only-binary", ":all:", "--output-file", str(output)),
            *("--python-version", python, "--default-index", self._index_url),
            *("--python-platform", f"{self._machine}-manylinux_2_{pylock.GLIBC}"),
            # Otherwise uv asks every Python of this machine for its version, which takes seconds.
            *("--python", sys.executable, "--overrides", str(self._folder / "overrides.txt")),
            *("--constraints", str(self._write("constraints.txt", pins))),
            str(self._folder / "requirements.in"),
        ]
        environment = process.clean_environment(
            UV_NO_CONFIG="1", UV_PYTHON_DOWNLOADS="never", **dict.fromkeys(_SOURCES, "")
        )
        try:
            process.output(command, env=environment)
            return self._wheels(Pylock.from_dict(tomllib.loads(output.read_text("utf-8"))), python)
        except (CommandError, PylockSelectError, KeyError) as error:
            if isinstance(error, CommandError) and error.reference != "command-failed":
                raise
            details = error.details if isinstance(error, CommandError) else [str(error)]
            raise ReleaseError(
                "set-unresolved",
                f"No set for Python {python} on {self._machine} satisfies these wheels.",
                details=[line for line in details if line.strip()][-SHOWN:],
            ) from error

    def _wheels(self, lock: Pylock, python: str) -> list[LockedWheel]:
        """Return the wheels of *lock* for *python*, those of ours at their addresses."""
        wheels = []
        interpreter = pylock.Interpreter(f"{python}.0", self._machine)
        for package, file in lock.select(**interpreter.selection()):
            if isinstance(file, PackageWheel) and package.name not in self._own:
                wheel = LockedWheel(
                    package.name,
                    str(package.version),
                    file.filename,
                    _public(file.url or ""),
                    file.hashes["sha256"],
                    file.size or 0,
                )
            else:
                # uv takes our files for archives.
                wheel = self._own[package.name]
            wheels.append(wheel)
        return wheels

    def _output(self, python: str) -> Path:
        return self._folder / f"pylock.py{python.replace('.', '')}.toml"


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
    for wheel, own in sorted(needed.items()):
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
