"""
``pylock.toml``: the tools of a build, locked (PEP 751).

Wheels are named by file and hash, not by address: they come from whatever index the user has.
"""

from __future__ import annotations

import platform
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkwright.builder.environment import platforms
from sparkwright.core import process
from sparkwright.core.errors import CommandError, FileError
from sparkwright.forks import package_index
from sparkwright.forks.context import RunContext
from sparkwright.forks.errors import SourceError
from sparkwright.forks.stack import MACHINES, Project

if TYPE_CHECKING:
    from packaging.pylock import Package

PYTHONS = ("cp311", "cp312", "cp313", "cp314", "abi3", "none")


def wheels(project: Project, machine: str = "") -> tuple[tuple[str, str, str], ...]:
    """
    Return what ``pylock.toml`` selects for this Python: (project, file name, sha256), sorted.

    Args:
        machine: For which machine; empty for this one.

    Raises:
        file-invalid: The file is missing, is no PEP 751 lock, or has nothing for that machine.
    """
    return select(project.build_folder / "pylock.toml", machine)


def select(path: Path, machine: str = "") -> tuple[tuple[str, str, str], ...]:
    """Return what the lock at *path* selects, as `wheels` does."""
    from packaging.pylock import Pylock, PylockSelectError, PylockValidationError

    machine = machine or platform.machine()
    try:
        lock = Pylock.from_dict(tomllib.loads(path.read_text("utf-8")))
        chosen = [_wheel(package, wheel) for package, wheel in lock.select(**_selection(machine))]
    except (OSError, tomllib.TOMLDecodeError, PylockValidationError, PylockSelectError) as error:
        raise FileError(
            "file-invalid",
            f"{path} does not lock the tools for Python {platform.python_version()} on {machine}.",
            details=[str(error)],
        ) from error
    return tuple(sorted(chosen))


def _selection(machine: str) -> dict[str, Any]:
    """
    Return what `Pylock.select` is to select for; nothing where it is to look at this machine
    itself.
    """
    from packaging.markers import default_environment

    if machine == platform.machine():
        return {}
    tags = platforms.tags(sys.version_info[:2], machine)
    return {"environment": {**default_environment(), "platform_machine": machine}, "tags": tags}


def _wheel(package: Package, wheel: Any) -> tuple[str, str, str]:
    if not hasattr(wheel, "path") or not wheel.path or not wheel.path.endswith(".whl"):
        raise FileError(
            "file-invalid", f"pylock.toml has no wheel of {package.name} for this machine."
        )
    return str(package.name), Path(wheel.path).name, wheel.hashes["sha256"]


def lock(session: RunContext) -> str:
    """
    Resolve ``requirements.in`` and return the text of ``pylock.toml``.

    Raises:
        source-unreachable: The requirements cannot be resolved on the index.
    """
    return resolve(session, session.project.build_folder / "requirements.in")


def resolve(session: RunContext, source: Path, *options_more: str) -> str:
    """
    Return the lock of the requirements in the file *source*, as `lock` does; *options_more* go to
    the resolver.
    """
    from uv import find_uv_bin

    options = [
        "--quiet",
        "--universal",
        "--python-version",
        "3.11",
        "--format",
        "pylock.toml",
        "--no-header",
        "--no-annotate",
    ]
    command = [
        find_uv_bin(),
        "pip",
        "compile",
        *options,
        "--default-index",
        package_index.index_url(),
        *options_more,
        str(source),
    ]
    env = process.clean_environment(
        UV_CACHE_DIR=str(session.store.root / "cache" / "uv"),
        UV_NO_CONFIG="1",
        UV_FIND_LINKS="",
        UV_INDEX_URL="",
        UV_DEFAULT_INDEX="",
    )
    try:
        resolved = tomllib.loads(process.output(command, env=env))
    except CommandError as error:
        if error.reference != "command-failed":
            raise
        raise SourceError(
            "source-unreachable", f"{source} cannot be resolved.", details=error.details
        ) from error
    return "".join(_render(resolved))


def _render(resolved: dict[str, Any]) -> Iterator[str]:
    yield "# Written by `sparkwright lock`; review it, do not edit it.\n"
    yield 'lock-version = "1.0"\ncreated-by = "sparkwright"\nrequires-python = ">=3.11"\n'
    for package in resolved["packages"]:
        wheels = sorted(
            (wheel["url"].rpartition("/")[2].partition("#")[0], wheel["hashes"]["sha256"])
            for wheel in package.get("wheels", [])
            if _usable(wheel["url"])
        )
        if not wheels:
            raise SourceError(
                "not-provided",
                f"{package['name']} {package['version']} has no wheel for Linux on "
                f"{' or '.join(MACHINES)}.",
            )
        yield f'\n[[packages]]\nname = "{package["name"]}"\nversion = "{package["version"]}"\n'
        if marker := package.get("marker"):
            yield f"marker = {_toml_string(marker)}\n"
        yield "wheels = [\n"
        for filename, sha256 in wheels:
            yield f'  {{ path = "wheels/{filename}", hashes = {{ sha256 = "{sha256}" }} }},\n'
        yield "]\n"


def _toml_string(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _usable(url: str) -> bool:
    """Is the wheel at *url* for a machine and a Python that sparkwright builds on?"""
    from packaging.utils import parse_wheel_filename

    _, _, _, tags = parse_wheel_filename(url.rpartition("/")[2].partition("#")[0])
    return any(
        (tag.platform == "any" or ("manylinux" in tag.platform and tag.platform.endswith(MACHINES)))
        and (
            tag.abi in PYTHONS
            and (tag.interpreter in PYTHONS or tag.interpreter.startswith(("py3", "py2", "cp3")))
        )
        for tag in tags
    )
