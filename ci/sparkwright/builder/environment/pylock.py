"""
``pylock.toml``: the tools of a build, locked (PEP 751).

Wheels are named by file and hash, not by address: they come from the index that the user has.
"""

from __future__ import annotations

import platform
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from sparkwright.core import process
from sparkwright.core.errors import CommandError, FileError
from sparkwright.core.store import Store
from sparkwright.forks import package_index
from sparkwright.forks.errors import SourceError
from sparkwright.forks.stack import MACHINES, Project

if TYPE_CHECKING:
    from packaging.tags import Tag

#: glibc 2.*this*: of DGX OS 7 (Ubuntu 24.04), on which wheels of another machine are to run;
#: nothing newer is taken or linked against.
GLIBC = 39
#: ABIs and interpreters of the wheels that a lock holds.
PYTHONS = ("cp311", "cp312", "cp313", "cp314", "abi3", "none")

#: Projects whose wheels make the code that nvcc writes.
CODE_GENERATORS = ("nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm")

#: Project, file name and sha256.
LockedWheel = tuple[str, str, str]


class Interpreter(msgspec.Struct, frozen=True):
    """A Python of another machine or an image; *libc* is the version of its glibc, ``2.36``."""

    version: str
    machine: str
    libc: str = f"2.{GLIBC}"

    #: Prints the fields as JSON, with nothing but the standard library.
    SCRIPT = (
        "import json, platform; "
        "print(json.dumps({'version': platform.python_version(), 'machine': platform.machine(), "
        "'libc': platform.libc_ver()[1]}))"
    )

    def selection(self) -> dict[str, Any]:
        """Return its environment and wheel tags, as arguments of `Pylock.select`."""
        from packaging.markers import default_environment

        version = [int(part) for part in self.version.split(".")[:2]]
        environment = {
            **default_environment(),
            "platform_machine": self.machine,
            "python_version": f"{version[0]}.{version[1]}",
            "python_full_version": self.version,
        }
        newest = int(self.libc.partition(".")[2] or 17)
        return {"environment": environment, "tags": tags(version, self.machine, newest)}


def uv_program() -> str:
    """Return the path of uv."""
    from uv import find_uv_bin

    return find_uv_bin()


def tags(python: Sequence[int], machine: str, newest: int = GLIBC) -> list[Tag]:
    """Return the wheel tags that CPython *python* takes on *machine* with glibc 2.*newest*."""
    from packaging.tags import compatible_tags, cpython_tags

    # Tags with a name instead of a version (PEP 600): manylinux2014 is 2.17; older ones are for
    # x86-64 alone.
    legacy = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}
    platforms = []
    for minor in range(newest, 4 if machine == "x86_64" else 16, -1):
        platforms.append(f"manylinux_2_{minor}_{machine}")
        if minor in legacy:
            platforms.append(f"{legacy[minor]}_{machine}")
    version = tuple(python[:2])
    interpreter = f"cp{version[0]}{version[1]}"
    return [
        *cpython_tags(version, platforms=platforms),
        *compatible_tags(version, interpreter, platforms),
    ]


def wheels(
    project: Project, machine: str = "", python: Interpreter | None = None
) -> tuple[LockedWheel, ...]:
    """
    Return the selection of the stack's ``pylock.toml``, sorted.

    Args:
        machine: The machine to select for; empty for this one.
        python: The Python to select for; None for this one, or its like on another *machine*.

    Raises:
        file-invalid: The file is missing, is no PEP 751 lock, or has nothing for that machine.
    """
    return select(project.build_folder / "pylock.toml", machine, python)


def select(
    path: Path, machine: str = "", python: Interpreter | None = None
) -> tuple[LockedWheel, ...]:
    """Return the selection of the lock at *path*, as `wheels` does."""
    from packaging.pylock import Pylock, PylockSelectError, PylockValidationError

    machine = machine or platform.machine()
    if python is None and machine != platform.machine():
        python = Interpreter(platform.python_version(), machine)
    options = python.selection() if python else {}
    try:
        lock = Pylock.from_dict(tomllib.loads(path.read_text("utf-8")))
        chosen = [_wheel(package.name, wheel) for package, wheel in lock.select(**options)]
    except (OSError, tomllib.TOMLDecodeError, PylockValidationError, PylockSelectError) as error:
        raise FileError(
            "file-invalid",
            f"{path} does not lock the tools for Python {platform.python_version()} on {machine}.",
            details=[str(error)],
        ) from error
    return tuple(sorted(chosen))


def _wheel(project: str, wheel: Any) -> LockedWheel:
    path = getattr(wheel, "path", None) or ""
    if not path.endswith(".whl"):
        raise FileError("file-invalid", f"pylock.toml has no wheel of {project} for this machine.")
    return str(project), Path(path).name, wheel.hashes["sha256"]


def resolve(store: Store, source: Path, *options: str) -> str:
    """
    Return the text of the lock of the requirements in the file *source*.

    Args:
        options: Further options of the resolver.

    Raises:
        source-unreachable: The requirements cannot be resolved on the index.
        not-provided: A project has no wheel for the machines that sparkwright builds on.
    """
    compiled = compile_requirements(
        store, source, "--universal", "--python-version", "3.11", *options
    )
    return "".join(_render(compiled))


def compile_requirements(store: Store, source: Path, *options: str) -> dict[str, Any]:
    """
    Return the lock of the requirements in the file *source* as uv resolves them.

    Raises:
        source-unreachable: The requirements cannot be resolved on the index.
    """
    arguments = ["--quiet", "--format", "pylock.toml", "--no-header", "--no-annotate"]
    arguments += ["--default-index", package_index.index_url()]
    env = process.clean_environment(
        UV_CACHE_DIR=str(store.root / "cache" / "uv"),
        UV_NO_CONFIG="1",
        UV_FIND_LINKS="",
        UV_INDEX_URL="",
        UV_DEFAULT_INDEX="",
    )
    command = [uv_program(), "pip", "compile", *arguments, *options, str(source)]
    try:
        return tomllib.loads(process.output(command, env=env))
    except CommandError as error:
        if error.reference != "command-failed":
            raise
        what = f"{source} cannot be resolved."
        raise SourceError("source-unreachable", what, details=error.details) from error


def _render(resolved: dict[str, Any]) -> Iterator[str]:
    yield "# Written by `sparkwright lock`; review it, do not edit it.\n"
    yield 'lock-version = "1.0"\ncreated-by = "sparkwright"\nrequires-python = ">=3.11"\n'
    for package in resolved["packages"]:
        files = {
            wheel["url"].rpartition("/")[2].partition("#")[0]: wheel["hashes"]["sha256"]
            for wheel in package.get("wheels", [])
        }
        usable = sorted(filter(_usable, files))
        if not usable:
            raise SourceError(
                "not-provided",
                f"{package['name']} {package['version']} has no wheel for Linux on "
                f"{' or '.join(MACHINES)}.",
            )
        yield f'\n[[packages]]\nname = "{package["name"]}"\nversion = "{package["version"]}"\n'
        if marker := package.get("marker"):
            quoted = marker.replace("\\", "\\\\").replace('"', '\\"')
            yield f'marker = "{quoted}"\n'
        yield "wheels = [\n"
        for filename in usable:
            hashes = f'{{ sha256 = "{files[filename]}" }}'
            yield f'  {{ path = "wheels/{filename}", hashes = {hashes} }},\n'
        yield "]\n"


def _usable(filename: str) -> bool:
    """Return whether the wheel is for a machine and a Python that sparkwright builds on."""
    from packaging.utils import parse_wheel_filename

    *_, tags_of_wheel = parse_wheel_filename(filename)
    return any(
        (tag.platform == "any" or ("manylinux" in tag.platform and tag.platform.endswith(MACHINES)))
        and (
            tag.abi in PYTHONS
            and (tag.interpreter in PYTHONS or tag.interpreter.startswith(("py3", "py2", "cp3")))
        )
        for tag in tags_of_wheel
    )
