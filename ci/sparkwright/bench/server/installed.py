"""Whether an environment holds exactly the files of a wheel: what a server answers says something of that wheel then, and of no other."""

from __future__ import annotations

import itertools
import zipfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from sparkwright.core import process
from sparkwright.core.console import console
from sparkwright.core.errors import CommandError, PythonError, WheelError
from sparkwright.forks.archive import zip_file, zip_members

#: Mismatches that are listed; one is enough to refuse.
MOST = 50
#: What Python would run or load, if it lay among the wheel's files without being one of them.
LOADED = (".py", ".so", ".pth", ".pyd")

_ASK = "import json, sys, sysconfig; print(json.dumps([sys.prefix, sysconfig.get_path('purelib'), sysconfig.get_path('scripts')]))"


class Mismatch(msgspec.Struct, frozen=True):
    """A file that is not as the wheel has it: *how* is ``missing``, ``differs`` or ``foreign``."""

    name: str
    how: str


def places(python: Path) -> tuple[Path, Path, Path]:
    """
    Return prefix, site-packages and scripts folder of the environment of *python*.

    Raises:
        environment-unusable: It is no Python.
    """
    try:
        answer = process.output([python, "-I", "-c", _ASK], timeout=60)
        prefix, site, scripts = msgspec.json.decode(answer, type=tuple[str, str, str])
    except (CommandError, ValueError, OSError) as error:
        if isinstance(error, CommandError) and error.reference != "command-failed":
            raise
        raise PythonError("environment-unusable", f"{python} is no Python of an environment.", details=[str(error)]) from None
    return Path(prefix), Path(site), Path(scripts)


def package(python: Path, name: str = "vllm") -> Path:
    """Return the folder of the package *name* in the environment of *python*, whether it is there or not."""
    return places(python)[1] / name


def is_installed(python: Path, wheel: Path) -> tuple[Mismatch, ...]:
    """
    Return in what the environment of *python* differs from *wheel*; nothing where it holds exactly its files.

    Every byte is compared. What the installer adds to the ``.dist-info`` folder and compiled Python are no part of the wheel.

    Raises:
        environment-unusable: *python* is none.
        wheel-invalid: *wheel* is none, or a file that it placed cannot be read.
    """
    where = places(python)
    try:
        with zip_file(wheel) as archive:
            return tuple(itertools.islice(_compare(archive, zip_members(archive, wheel.name), where), MOST))
    except OSError as error:
        raise WheelError("wheel-invalid", f"{wheel.name} cannot be compared with the environment.", details=[str(error)]) from error


def _compare(archive: zipfile.ZipFile, members: dict[str, zipfile.ZipInfo], where: tuple[Path, Path, Path]) -> Iterator[Mismatch]:
    own = {name: place for name in members if not name.endswith("/") and (place := _place(name, where))}
    whole = sum(members[name].file_size for name in own)
    with console.progress("compare the environment with the wheel", whole, "bytes") as line:
        done = 0
        for name, place in own.items():
            done += members[name].file_size
            line.update(done, name)
            if not place.is_file():
                yield Mismatch(name, "missing")
            elif not _same(archive, members[name], place):
                yield Mismatch(name, "differs")
    yield from (Mismatch(name, "foreign") for name in _foreign(set(own.values()), where[1]))


def _place(name: str, where: tuple[Path, Path, Path]) -> Path | None:
    """Return where an installer puts the member *name*; None for what it writes itself."""
    prefix, site, scripts = where
    top, _, rest = name.partition("/")
    if top.endswith(".dist-info") and rest in ("RECORD", "INSTALLER", "REQUESTED", "direct_url.json"):
        return None
    if not top.endswith(".data"):
        return site / name
    kind, _, inside = rest.partition("/")
    return {"purelib": site / inside, "platlib": site / inside, "scripts": scripts / inside, "data": prefix / inside}.get(kind)


def _same(archive: zipfile.ZipFile, info: zipfile.ZipInfo, place: Path) -> bool:
    with archive.open(info) as packed, place.open("rb") as file:
        # An installer writes the path of its Python into the first line of a script.
        if ".data/scripts/" in info.filename:
            first, written = packed.readline(4096), file.readline(4096)
            if first != written and not first.startswith(b"#!python"):
                return False
        while True:
            one, other = packed.read(1 << 20), file.read(1 << 20)
            if one != other:
                return False
            if not one:
                return True


def _foreign(own: set[Path], site: Path) -> Iterator[str]:
    """Yield files in the wheel's own folders that Python would load and the wheel does not have."""
    folders = {site / place.relative_to(site).parts[0] for place in own if place.is_relative_to(site)}
    for folder in sorted(one for one in folders if one.is_dir() and one.suffix not in (".dist-info", ".data")):
        for file in sorted(folder.rglob("*")):
            if file.suffix in LOADED and file not in own and file.is_file():
                yield str(file.relative_to(site))


def version(python: Path, name: str = "vllm") -> str:
    """
    Return the version of the distribution *name* in the environment of *python*.

    Raises:
        environment-unusable: It is no Python, or the distribution is not installed there.
    """
    try:
        return process.output([python, "-I", "-c", f"import importlib.metadata as m; print(m.version({name!r}))"], timeout=60).strip()
    except (CommandError, OSError) as error:
        if isinstance(error, CommandError) and error.reference != "command-failed":
            raise
        raise PythonError("environment-unusable", f"{python} has no {name} installed.", details=[str(error)]) from None
