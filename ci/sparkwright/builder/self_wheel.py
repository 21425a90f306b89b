"""
The running program as a wheel, and the files that it requires for the Python of an image.

The requirements are resolved once per program and Python and stored by hash, so that the image can
be built again without a network.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import sparkwright
from sparkwright.builder.environment import pylock
from sparkwright.builder.environment.pylock import Interpreter
from sparkwright.builder.wheel import archive, sbom
from sparkwright.builder.wheel.archive import WheelName
from sparkwright.builder.wheel.sbom import LockedFile, SbomInput
from sparkwright.builder.wheel.version import labelled
from sparkwright.core import digest, project_data
from sparkwright.core.console import console
from sparkwright.forks import package_index
from sparkwright.forks.context import RunContext
from sparkwright.forks.errors import SourceError

#: Build backends of source distributions among the requirements (tree-sitter-cmake has no Linux
#: wheel).
BACKENDS = ("setuptools", "wheel")


def stated_requirements(extra: str = "full") -> list[str]:
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
    wanted = "".join(f"Requires-Dist: {line}\n" for line in stated_requirements(extra))
    metadata = (
        f"Metadata-Version: 2.1\nName: sparkwright\nVersion: {version}\nRequires-Python: "
        f">=3.11\n{wanted}"
    )
    dist_info = {
        "entry_points.txt": b"[console_scripts]\nsparkwright = sparkwright.cli.main:main\n",
        archive.SBOM: sbom.document(SbomInput(properties={"built": "program"}), name),
    }
    return archive.write(folder, name, files, metadata, pure=True, dist_info=dist_info)


def required(
    context: RunContext, python: Interpreter, requirements: Sequence[str] = ()
) -> list[Path]:
    """
    Return the files that the program requires on *python*, downloaded and verified.

    Args:
        requirements: Its requirements; by default those of the running program with all extras, and
            the build backends of source distributions among them.

    Raises:
        offline: They are not resolved or not downloaded, and the run is offline.
        source-unreachable, source-mismatch, disk-full: As `download.obtain`.
        not-provided: A requirement has neither a wheel for that Python nor a source distribution.
    """
    lines = [*requirements] or [*stated_requirements(), *BACKENDS]
    key = digest.key("program", {"requires": lines, "python": python})
    locked = context.store.get("program", key, tuple[LockedFile, ...])
    if locked is None:
        if context.offline:
            what = f"The requirements of sparkwright on Python {python.version} are not resolved."
            raise SourceError("offline", what)
        locked = tuple(sorted(_resolve(context, python, lines)))
        context.store.put("program", key, locked)
    paths = []
    with console.progress("download", len(locked)) as progress:
        for count, file in enumerate(locked, start=1):
            paths.append(
                package_index.obtain(
                    context.store, file.project, file.filename, file.sha256, offline=context.offline
                )
            )
            progress.update(count, file.filename)
    return paths


def _resolve(
    context: RunContext, python: Interpreter, lines: Sequence[str]
) -> Iterator[LockedFile]:
    from packaging.pylock import PackageSdist, PackageWheel, Pylock, PylockSelectError

    source = context.store.write("cache/program.in", "\n".join([*lines, ""]).encode())
    target = ["--python-version", python.version]
    target += ["--python-platform", f"{python.machine}-unknown-linux-gnu"]
    lock = Pylock.from_dict(pylock.compile_requirements(context.store, source, *target))
    try:
        for package, file in lock.select(**python.selection()):
            assert isinstance(file, PackageWheel | PackageSdist)
            name = str(file.url).rpartition("/")[2].partition("#")[0]
            yield LockedFile(str(package.name), name, file.hashes["sha256"])
    except PylockSelectError as error:
        what = "A requirement of sparkwright has no file for the Python of the image."
        raise SourceError("not-provided", what, details=[str(error)]) from error
