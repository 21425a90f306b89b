"""
The locked set: wheels of ours and everything that they require, as a ``pylock.toml`` (PEP 751).

uv resolves it from the wheels at hand and one package index: no configuration, no other index, no
source archive. Every package has one version for all Pythons: the one that the oldest Python which
needs the package got, unless a newer one cannot have it. Its wheels may differ between Pythons.
"""

import sys
import tempfile
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
from packaging.pylock import PackageWheel, Pylock, PylockSelectError
from packaging.version import Version
from uv import find_uv_bin

from sparkwright.builder import pylock
from sparkwright.client.locked_wheels import LockedWheel
from sparkwright.core import http, process
from sparkwright.core.console import console
from sparkwright.core.errors import CommandError
from sparkwright.release import ReleaseError
from sparkwright.release.policy import SetRule

#: Lines of uv's explanation that are shown.
SHOWN = 12


class LockedSet(msgspec.Struct, frozen=True):
    """The bytes of the lock, what it holds (normalised name → version), and its Pythons."""

    lock: bytes
    wheels: tuple[LockedWheel, ...]
    packages: dict[str, str]
    pythons: tuple[str, ...]


def resolve(
    own: Mapping[LockedWheel, Path],
    machine: str,
    rule: SetRule,
    *,
    index_url: str,
) -> LockedSet:
    """
    Return the set of wheels of ours for *machine*.

    Args:
        own: Each, with its address once it is published, and its file.
        rule: The Pythons, further requirements and overrides of the stack.

    Raises:
        set-unresolved: No set satisfies all requirements, or a package has no wheel with a sha256.
    """
    pythons = tuple(sorted(rule.pythons, key=Version))
    by_project, direct = dict[str, LockedWheel](), list[str]()
    for wheel, path in own.items():
        by_project[wheel.project] = wheel
        direct.append(f"{wheel.project} @ {path.resolve().as_uri()}")
    files = {
        "requirements.in": [*sorted(direct), *rule.requires],
        "overrides.txt": [override.requirement for override in rule.overrides],
    }
    packages, settled, agreed = dict[str, str](), dict[str, str](), False
    with (
        console.step(f"lock the set for {machine}"),
        tempfile.TemporaryDirectory(prefix="set-") as name,
    ):
        while not agreed:
            # === admits no other local label.
            pins = [f"{project}==={version}" for project, version in sorted(settled.items())]
            for file, lines in {**files, "constraints.txt": pins}.items():
                Path(name, file).write_text("\n".join([*lines, ""]), "utf-8")
            agreed, packages, needed = True, {}, defaultdict[LockedWheel, list[str]](list)
            for python in pythons:
                for wheel in _compile(by_project, machine, index_url, Path(name), python):
                    needed[wheel].append(python)
                    older = packages.setdefault(wheel.project, wheel.version)
                    if older != wheel.version:
                        # uv prefers a local label to the same version without.
                        same = Version(older).public == Version(wheel.version).public
                        settled[wheel.project] = older if same else wheel.version
                        agreed = False
    lock = write(needed, machine, pythons)
    return LockedSet(lock, tuple(sorted(needed)), dict(sorted(packages.items())), pythons)


def _compile(
    own: Mapping[str, LockedWheel], machine: str, index_url: str, folder: Path, python: str
) -> Iterator[LockedWheel]:
    """Yield what uv resolves for *python*, wheels of ours at their addresses."""
    lock_file = folder / "pylock.toml"
    command = [
        *(find_uv_bin(), "pip", "compile", "--quiet", "--no-header", "--no-annotate"),
        # uv prefers what the file has from an earlier call.
        *("--output-file", str(lock_file), "--only-binary", ":all:"),
        *("--python-version", python, "--default-index", index_url),
        *("--python-platform", f"{machine}-manylinux_2_{pylock.GLIBC}"),
        # Otherwise uv asks every Python of this machine for its version, which takes seconds.
        *("--python", sys.executable, "--overrides", str(folder / "overrides.txt")),
        *("--constraints", str(folder / "constraints.txt"), str(folder / "requirements.in")),
    ]
    try:
        process.output(command, env=process.uv_environment())
        lock = Pylock.from_dict(tomllib.loads(lock_file.read_text("utf-8")))
        for package, file in lock.select(**pylock.selection(f"{python}.0", machine)):
            # uv takes our files for archives.
            if not isinstance(file, PackageWheel) or package.name in own:
                yield own[package.name]
                continue
            yield LockedWheel(
                package.name,
                str(package.version),
                file.filename,
                http.redact_credentials(file.url or "").partition("#")[0],
                file.hashes["sha256"],
                file.size or 0,
            )
    except (CommandError, PylockSelectError, KeyError) as error:
        if isinstance(error, CommandError) and error.reference != "command-failed":
            raise
        details = error.details if isinstance(error, CommandError) else [str(error)]
        raise ReleaseError(
            "set-unresolved",
            f"No set for Python {python} on {machine} satisfies these wheels.",
            details=[line for line in details if line.strip()][-SHOWN:],
        ) from error


def write(
    needed: Mapping[LockedWheel, Sequence[str]], machine: str, pythons: Sequence[str]
) -> bytes:
    """
    Return the lock; equal sets give equal bytes.

    Args:
        needed: Wheel → the Pythons that need it.
    """
    major, minor = Version(pythons[-1]).release
    platform = f"sys_platform == 'linux' and platform_machine == '{machine}'"
    environments = [f"{platform} and python_version == '{python}'" for python in pythons]
    lines = [
        'lock-version = "1.0"',
        f"environments = [{', '.join(map(_string, environments))}]",
        f"requires-python = {_string(f'>={pythons[0]},<{major}.{minor + 1}')}",
        'created-by = "sparkwright"',
    ]
    packages = defaultdict[tuple[str, str], list[LockedWheel]](list)
    for wheel in sorted(needed):
        packages[wheel.project, wheel.version].append(wheel)
    for (project, version), wheels in packages.items():
        lines += ["", "[[packages]]", f"name = {_string(project)}", f"version = {_string(version)}"]
        used = set[str]().union(*map(needed.__getitem__, wheels))
        if used != set(pythons):
            marker = " or ".join(
                f"python_version == '{python}'" for python in sorted(used, key=Version)
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
