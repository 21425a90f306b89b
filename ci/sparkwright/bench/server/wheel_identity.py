"""Compare the files of an environment with those of a wheel."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from sparkwright.core import process
from sparkwright.core.errors import CommandError, PythonError
from sparkwright.core.zips import zip_file, zip_members

#: Mismatches that are listed; one is enough to refuse.
MOST = 50
#: Files that Python would run or load if they lay among the wheel's files.
LOADED = (".py", ".so", ".pth", ".pyd")


def site_packages(python: Path) -> Path:
    """
    Return the folder site-packages of the environment of *python*.

    Raises:
        environment-unusable: It is no Python.
    """
    script = "import sysconfig; print(sysconfig.get_path('purelib'))"
    try:
        return Path(process.output([python, "-I", "-c", script], timeout=60).strip())
    except CommandError as error:
        message = f"{python} is no Python of an environment."
        details = [error.what, *error.details]
        raise PythonError("environment-unusable", message, details=details) from None


def version(python: Path, name: str = "vllm") -> str:
    """
    Return the version of the distribution *name* in the environment of *python*.

    Raises:
        environment-unusable: It is no Python, or the distribution is not installed there.
    """
    folder = site_packages(python)
    for distribution in metadata.distributions(name=name, path=[str(folder)]):
        return distribution.version
    raise PythonError("environment-unusable", f"{python} has no {name} installed.")


def mismatches(python: Path, wheel: Path) -> dict[str, str]:
    """
    Return how the environment of *python* differs from *wheel*: file → ``missing``, ``differs`` or
    ``foreign``; empty if it does not.

    Every byte is compared. Files that an installer adds to ``.dist-info``, scripts, which it
    changes, and compiled Python do not count.

    Raises:
        environment-unusable: *python* is none.
        wheel-invalid: *wheel* is none.
    """
    return dict(itertools.islice(_compare(wheel, site_packages(python)), MOST))


def _compare(wheel: Path, site: Path) -> Iterator[tuple[str, str]]:
    with zip_file(wheel) as archive:
        members = zip_members(archive, wheel.name)
        own = {path: info for name, info in members.items() if (path := _target(name, site))}
        for path, info in own.items():
            if not path.is_file():
                yield info.filename, "missing"
                continue
            with archive.open(info) as packed, path.open("rb") as file:
                blocks = iter(lambda: (packed.read(1 << 20), file.read(1 << 20)), (b"", b""))
                if any(block != other for block, other in blocks):
                    yield info.filename, "differs"
    folders = {site / path.relative_to(site).parts[0] for path in own}
    for folder in sorted(folders):
        for path in sorted(folder.rglob("*")) if folder.suffix != ".dist-info" else ():
            if path.suffix in LOADED and path not in own and path.is_file():
                yield str(path.relative_to(site)), "foreign"


def _target(name: str, site: Path) -> Path | None:
    """Return where an installer puts the member *name*; None for files that it writes itself."""
    top, _, rest = name.partition("/")
    kind, _, inside = rest.partition("/")
    if name.endswith("/") or (top.endswith(".dist-info") and rest == "RECORD"):
        return None
    if top.endswith(".data"):
        return site / inside if kind in ("purelib", "platlib") else None
    return site / name
