"""
The running program as a wheel, and the files that it requires for the Python of an image.

No build backend makes the wheel: an installed program has none, nor has a machine without a
network, and a release adds files of its own. The requirements are resolved once per program and
Python and stored by hash, so that the image can be built again without a network.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import requires
from pathlib import Path

from packaging.pylock import PackageWheel, Pylock, PylockSelectError
from packaging.requirements import Requirement

import sparkwright
from sparkwright.builder.environment import pylock, toolchain
from sparkwright.builder.environment.pylock import Interpreter, LockedWheel
from sparkwright.builder.wheel import archive, sbom
from sparkwright.builder.wheel.archive import WheelName
from sparkwright.builder.wheel.sbom import SbomInput
from sparkwright.core import config
from sparkwright.core.files import content_key
from sparkwright.forks.context import RunContext
from sparkwright.forks.stack import SourceError


def stated_requirements(extra: str = "full") -> list[str]:
    """
    Return the requirements in the running program's metadata, with those of *extra* (empty: the
    client alone).
    """
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
    files |= config.carried() | dict(further or {})
    version = archive.labelled(sparkwright.__version__, label) if label else sparkwright.__version__
    name = WheelName("sparkwright", version, "py3-none-any")
    wanted = "".join(f"Requires-Dist: {line}\n" for line in stated_requirements(extra))
    metadata = (
        f"Metadata-Version: 2.1\nName: sparkwright\nVersion: {version}\nRequires-Python: "
        f">=3.11\n{wanted}"
    )
    dist_info = {
        "entry_points.txt": b"[console_scripts]\nsparkwright = sparkwright.__main__:main\n",
        archive.SBOM: sbom.document(SbomInput(properties={"built": "program"}), name),
    }
    return archive.write(folder, name, files, metadata, pure=True, dist_info=dist_info)


def required(
    context: RunContext, python: Interpreter, requirements: Sequence[str] = ()
) -> list[Path]:
    """
    Return the files that the program requires on *python*, downloaded and verified.

    Args:
        requirements: Its requirements; by default those of the running program with all extras.

    Raises:
        offline: They are not resolved or not downloaded, and the run is offline.
        source-unreachable, source-mismatch, disk-full: As `toolchain.download`.
        not-provided: A requirement has no wheel for that Python.
    """
    lines = [*requirements] or stated_requirements()
    store = context.store
    key = content_key("program", {"requires": lines, "python": python})
    files = store.get("program", key, tuple[LockedWheel, ...])
    if files is None:
        if context.offline:
            raise SourceError(
                "offline",
                f"The requirements of sparkwright on Python {python.version} are not resolved.",
            )
        source = store.write("cache/program.in", "\n".join([*lines, ""]).encode())
        compiled = pylock.compile_requirements(
            store,
            source,
            "--only-binary=:all:",
            f"--python-version={python.version}",
            f"--python-platform={python.machine}-unknown-linux-gnu",
        )
        lock = Pylock.from_dict(compiled)
        try:
            selection = list(lock.select(**python.selection()))
        except PylockSelectError as error:
            raise SourceError(
                "not-provided",
                "A requirement of sparkwright has no wheel for the Python of the image.",
                details=[str(error)],
            ) from error
        files = tuple(
            sorted(
                (str(package.name), str(file.filename), file.hashes["sha256"])
                for package, file in selection
                if isinstance(file, PackageWheel)
            )
        )
        store.put("program", key, files)
    return toolchain.download(store, files, offline=context.offline)
