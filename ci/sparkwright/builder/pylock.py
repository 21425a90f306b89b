"""
``pylock.toml``: the tools of a build, locked (PEP 751).

Wheels are named by file and hash, not by address: they come from the index that the user has.
"""

import concurrent.futures
import contextlib
import itertools
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from packaging.markers import default_environment
from packaging.pylock import PackageWheel, Pylock, PylockSelectError, PylockValidationError
from packaging.requirements import InvalidRequirement, Requirement
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import canonicalize_name, parse_wheel_filename
from uv import find_uv_bin

from sparkwright.builder.wheel.elf import LEGACY_TAGS
from sparkwright.core import process
from sparkwright.core.console import console
from sparkwright.core.errors import CommandError, FileError
from sparkwright.core.store import Store
from sparkwright.forks import package_index
from sparkwright.forks.stack import MACHINES, Project, SourceError

#: The minor version of the newest glibc (2.39) that wheels may need and are linked against,
#: whatever machine builds them: that of DGX OS 7 (Ubuntu 24.04).
GLIBC = 39
#: Minor versions of the Pythons whose wheels a lock holds.
PYTHONS = (11, 12, 13, 14)

NVCC, NVDISASM = "nvidia-cuda-nvcc", "nvidia-cuda-nvdisasm"

#: Project, file name and sha256.
LockedWheel = tuple[str, str, str]


def selection(version: str, machine: str) -> dict[str, Any]:
    """Return the arguments of `Pylock.select` for the Python *version* on *machine*."""
    major, minor = map(int, version.split(".")[:2])
    return {
        "environment": {
            **default_environment(),
            "platform_machine": machine,
            "python_version": f"{major}.{minor}",
            "python_full_version": version,
        },
        "tags": tags((major, minor), machine),
    }


def tags(python: Sequence[int], machine: str) -> list[Tag]:
    """Return the wheel tags that CPython *python* takes on *machine*."""
    platforms = list[str]()
    for minor in range(GLIBC, 4 if machine == "x86_64" else 16, -1):
        platforms.append(f"manylinux_2_{minor}_{machine}")
        if minor in LEGACY_TAGS:
            platforms.append(f"{LEGACY_TAGS[minor]}_{machine}")
    # The tag of a wheel that was built on a Linux machine, without a version of glibc.
    platforms.append(f"linux_{machine}")
    return [
        *cpython_tags(python, platforms=platforms),
        *compatible_tags(python, f"cp{python[0]}{python[1]}", platforms),
    ]


def wheels(project: Project, **chosen: Any) -> tuple[LockedWheel, ...]:
    """Return the selection of the stack's ``pylock.toml``, as `select` does."""
    return select(project.build_folder / "pylock.toml", **chosen)


def named(project: Project, *names: str) -> list[LockedWheel]:
    """Return the wheels of the projects *names* among `wheels`."""
    return [wheel for wheel in wheels(project) if wheel[0] in names]


def cuda(project: Project) -> str:
    """
    Return the CUDA release that ``pylock.toml`` locks, as PyTorch writes it (``cu130``); empty if
    it locks no compiler.

    Raises:
        file-invalid: As `select`.
    """
    locked = named(project, NVCC)
    return "cu" + "".join(locked[0][1].split("-")[1].split(".")[:2]) if locked else ""


def select(path: Path, **chosen: Any) -> tuple[LockedWheel, ...]:
    """
    Return the wheels that the lock at *path* selects, sorted.

    Args:
        chosen: As `selection`; none for this Python and machine.

    Raises:
        file-invalid: The file is missing, is no PEP 751 lock, or has nothing for that Python.
    """
    locked = []
    try:
        lock = Pylock.from_dict(tomllib.loads(path.read_text("utf-8")))
        for package, file in lock.select(**chosen):
            if not isinstance(file, PackageWheel):
                raise ValueError(f"{package.name} is not locked as a wheel")
            locked.append((str(package.name), str(file.filename), file.hashes["sha256"]))
    except (OSError, ValueError, PylockValidationError, PylockSelectError) as error:
        raise FileError(
            "file-invalid",
            f"{path} does not lock the tools for the Python and the machine that are asked for.",
            details=[str(error)],
        ) from error
    return tuple(sorted(locked))


def lock(store: Store, folder: Path, *options: str, again: bool = False) -> None:
    """
    Write the lock of the requirements in *folder*, if it has some, and no lock that satisfies them,
    or *again*; raises and takes *options* as `resolve`.
    """
    source, path = folder / "requirements.in", folder / "pylock.toml"
    # A checkout may have stacks and no policies of gates.
    if source.exists() and (again or not _satisfied(source, path)):
        with console.step(f"lock {path}"):
            store.write(path, resolve(store, source, *options).encode())


def _satisfied(source: Path, path: Path) -> bool:
    """Return True if the lock at *path* holds a release for each requirement in *source*."""
    try:
        packages = tomllib.loads(path.read_text("utf-8"))["packages"]
        locked = [(package["name"], package["version"]) for package in packages]
    except (OSError, ValueError, LookupError, TypeError):
        return False
    for line in source.read_text("utf-8").splitlines():
        # Comments, and options of the resolver.
        with contextlib.suppress(InvalidRequirement):
            wanted = Requirement(line.partition("#")[0])
            if not any(
                canonicalize_name(wanted.name) == name
                and wanted.specifier.contains(version, prereleases=True)
                for name, version in locked
            ):
                return False
    return True


def resolve(store: Store, source: Path, *options: str) -> str:
    """
    Return the text of the lock of the requirements in the file *source*.

    Args:
        options: Further options of the resolver.

    Raises:
        source-unreachable: The requirements cannot be resolved on the index.
        not-provided: A project has no wheel for the machines that sparkwright builds on.
    """
    compiled = tomllib.loads(
        _compile(store, source, "--universal", "--python-version=3.11", *options)
    )
    lines = [
        "# Written by `sparkwright lock`; review it, do not edit it.",
        'lock-version = "1.0"\ncreated-by = "sparkwright"\nrequires-python = ">=3.11"',
    ]
    accepted = set[Tag]()
    for machine, minor in itertools.product(MACHINES, PYTHONS):
        accepted.update(tags((3, minor), machine))
    for package in compiled["packages"]:
        usable = dict[str, str]()
        for wheel in package.get("wheels", []):
            name = wheel["url"].partition("#")[0].rpartition("/")[2]
            if accepted & parse_wheel_filename(name)[-1]:
                usable[name] = wheel["hashes"]["sha256"]
        if not usable:
            raise SourceError(
                "not-provided",
                f"{package['name']} {package['version']} has no wheel for Linux on "
                f"{' or '.join(MACHINES)}.",
            )
        # A JSON string is also a valid TOML string.
        marker = msgspec.json.encode(package.get("marker")).decode()
        lines += [
            "\n[[packages]]",
            f'name = "{package["name"]}"\nversion = "{package["version"]}"',
            *([f"marker = {marker}"] if "marker" in package else []),
            "wheels = [",
            *(
                f'  {{ path = "wheels/{name}", hashes = {{ sha256 = "{sha256}" }} }},'
                for name, sha256 in sorted(usable.items())
            ),
            "]",
        ]
    return "\n".join([*lines, ""])


def _compile(store: Store, source: Path, *options: str) -> str:
    """
    Return the lock of the requirements in the file *source* as uv writes it.

    Raises:
        source-unreachable: The requirements cannot be resolved on the index.
    """
    command = [
        *(find_uv_bin(), "pip", "compile", "--quiet", "--no-header", "--no-annotate"),
        *("--format", "pylock.toml", "--default-index", package_index.index_url()),
        # Otherwise uv would look for a Python, and might find none.
        *("--python", sys.executable, *options, str(source)),
    ]
    try:
        return process.output(
            command,
            env=process.uv_environment(UV_CACHE_DIR=str(store.root / "cache" / "uv")),
        )
    except CommandError as error:
        raise SourceError(
            "source-unreachable", f"{source} cannot be resolved.", details=error.details
        ) from error


def download(store: Store, wheels: Sequence[LockedWheel], *, offline: bool = False) -> list[Path]:
    """
    Return the files of *wheels*, downloaded if the store does not have them.

    Raises:
        source-unreachable, source-mismatch, offline, disk-full: As
            `sparkwright.forks.package_index.obtain`.
    """
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        return [
            *pool.map(lambda wheel: package_index.obtain(store, *wheel, offline=offline), wheels)
        ]
