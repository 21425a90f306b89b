"""
This program as a wheel, and the files that it requires for the Python of an image.

The requirements are resolved once per program and Python and stored by hash, so that the image can
be built again without a network.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

import sparkwright
from sparkwright.builder.environment import pylock
from sparkwright.builder.wheel import archive, sbom
from sparkwright.builder.wheel.archive import WheelName
from sparkwright.builder.wheel.sbom import LockedFile, SbomInput
from sparkwright.builder.wheel.version import labelled
from sparkwright.core import digest, process, project_data
from sparkwright.core.console import console
from sparkwright.core.errors import CommandError
from sparkwright.forks import download, package_index
from sparkwright.forks.context import RunContext
from sparkwright.forks.errors import SourceError

#: What a source distribution among the requirements is built with (tree-sitter-cmake has no Linux
#: wheel).
BACKENDS = ("setuptools", "wheel")


class Interpreter(msgspec.Struct, frozen=True):
    """The Python of an image; *libc* is the version of its glibc, ``2.36``."""

    version: str
    machine: str
    libc: str

    #: Prints the fields as JSON, with nothing but the standard library.
    SCRIPT = (
        "import json, platform; "
        "print(json.dumps({'version': platform.python_version(), 'machine': platform.machine(), "
        "'libc': platform.libc_ver()[1]}))"
    )

    def tags(self) -> list[str]:
        """Return the wheel tags that it takes, best first."""
        version = tuple(map(int, self.version.split(".")[:2]))
        return [
            str(tag)
            for tag in pylock.tags(version, self.machine, int(self.libc.partition(".")[2] or 17))
        ]


def requirements(extra: str = "full") -> list[str]:
    """
    Return the requirements in the running program's metadata, with those of *extra* (empty: the
    client alone).
    """
    from importlib.metadata import requires

    from packaging.requirements import Requirement

    return sorted(
        f"{requirement.name}{requirement.specifier}"
        for requirement in map(Requirement, requires("sparkwright") or ())
        if requirement.marker is None or (extra and requirement.marker.evaluate({"extra": extra}))
    )


def write(
    folder: Path,
    *,
    extra: str = "full",
    label: str = "",
    further: Mapping[str, bytes] | None = None,
) -> Path:
    """
    Write the running program as a wheel to *folder*, reproducibly, and return its path.

    Args:
        extra: Its optional requirements that become unconditional.
        label: Local version label (PEP 440).
        further: More files, by name in the wheel.
    """
    package = Path(sparkwright.__file__).parent
    files = {
        f"sparkwright/{path.relative_to(package).as_posix()}": path.read_bytes()
        for path in sorted(package.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }
    files |= project_data.carried() | dict(further or {})
    version = labelled(sparkwright.__version__, label) if label else sparkwright.__version__
    name = WheelName("sparkwright", version, "py3-none-any")
    files[f"{name.info}/entry_points.txt"] = (
        b"[console_scripts]\nsparkwright = sparkwright.cli.main:main\n"
    )
    wanted = "".join(f"Requires-Dist: {line}\n" for line in requirements(extra))
    metadata = (
        f"Metadata-Version: 2.1\nName: sparkwright\nVersion: {version}\nRequires-Python: "
        f">=3.11\n{wanted}"
    )
    files[f"{name.info}/{archive.SBOM}"] = sbom.document(
        SbomInput(properties={"built": "program"}), name
    )
    path = folder / name.filename
    archive.write(path, name, files, metadata, pure=True)
    return path


def required(session: RunContext, python: Interpreter, wanted: Sequence[str] = ()) -> list[Path]:
    """
    Return the files that the program requires on *python*, downloaded and verified.

    Args:
        wanted: Its requirements (default: those of the running program with all extras, and the
            build backends of
            source distributions among them).

    Raises:
        offline: They are not resolved or not downloaded, and the run is offline.
        source-unreachable, source-mismatch, disk-full: See there.
        not-provided: A requirement has neither a wheel for that Python nor a source distribution.
    """
    lines = [*wanted] or [*requirements(), *BACKENDS]
    key = digest.key("program", {"requires": lines, "python": python})
    locked = session.store.get("program", key, tuple[LockedFile, ...])
    if locked is None:
        if session.offline:
            raise SourceError(
                "offline",
                f"What sparkwright itself requires on Python {python.version} was never resolved "
                f"in this store.",
            )
        locked = tuple(sorted(_resolved(session, python, lines)))
        session.store.put("program", key, locked)
    with console.progress("download", len(locked)) as line:
        paths = []
        for done, file in enumerate(locked, start=1):
            paths.append(
                download.obtain(
                    session.store, file.project, file.filename, file.sha256, offline=session.offline
                )
            )
            line.update(done, file.filename)
    return paths


def _resolved(
    session: RunContext, python: Interpreter, lines: Sequence[str]
) -> Iterator[LockedFile]:
    from uv import find_uv_bin

    source = session.store.write("cache/program.in", "\n".join([*lines, ""]).encode())
    options = ["--quiet", "--format", "pylock.toml", "--no-header", "--no-annotate"]
    target = [
        "--python-version",
        python.version,
        "--python-platform",
        f"{python.machine}-unknown-linux-gnu",
    ]
    command = [
        find_uv_bin(),
        "pip",
        "compile",
        *options,
        *target,
        "--default-index",
        package_index.index_url(),
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
        packages = tomllib.loads(process.output(command, env=env))["packages"]
    except CommandError as error:
        if error.reference != "command-failed":
            raise
        raise SourceError(
            "source-unreachable",
            "What sparkwright itself requires cannot be resolved.",
            details=error.details,
        ) from error
    ranks = {tag: rank for rank, tag in enumerate(python.tags())}
    return (_best(package, ranks) for package in packages)


def _best(package: dict[str, Any], ranks: dict[str, int]) -> LockedFile:
    """Return the wheel of *package* whose tag ranks first, else its source distribution."""
    from packaging.utils import parse_wheel_filename

    rated = []
    for file in package.get("wheels", []):
        tags = map(str, parse_wheel_filename(_name(file))[3])
        if matches := [ranks[tag] for tag in tags if tag in ranks]:
            rated.append((min(matches), _name(file), file))
    file = min(rated)[2] if rated else package.get("sdist")
    if file is None:
        raise SourceError(
            "not-provided",
            f"{package['name']} {package['version']} has no file for the Python of the image.",
        )
    return LockedFile(package["name"], _name(file), file["hashes"]["sha256"])


def _name(file: dict[str, Any]) -> str:
    return str(file["url"]).rpartition("/")[2].partition("#")[0]
