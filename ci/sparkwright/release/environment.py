"""
A Python environment on disk: what it is, how far it differs from a layout, and how it becomes that layout.

Every file is written beside its place and renamed, RECORD last: whoever looks sees a file whole, and a package counts as installed
only when all of it is there.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
import os
import platform
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from sparkwright.core import process
from sparkwright.core.console import console
from sparkwright.core.errors import CommandError, PythonError, WheelError
from sparkwright.core.files import sha256_file
from sparkwright.core.store import translate_disk_full
from sparkwright.release.layout import File, Layout

if TYPE_CHECKING:
    from packaging.tags import Tag

_ASK = """\
import json, os, platform, sys, sysconfig
paths, virtual = sysconfig.get_paths(), sys.prefix != sys.base_prefix
managed = not virtual and os.path.exists(os.path.join(paths["stdlib"], "EXTERNALLY-MANAGED"))
print(json.dumps({"prefix": sys.prefix, "pure": paths["purelib"], "plat": paths["platlib"], "name": sys.implementation.name,
                  "version": sys.version_info[:2], "flags": getattr(sys, "abiflags", ""), "managed": managed,
                  "full": platform.python_version()}))
"""


class _Answer(msgspec.Struct):
    prefix: str
    pure: str
    plat: str
    name: str
    version: tuple[int, int]
    flags: str
    managed: bool
    full: str = ""


class Environment(msgspec.Struct, frozen=True):
    """
    A Python environment.

    Attributes:
        site: Its site-packages, free of links.
        abi: As wheels name it: ``cp312``, ``cp313t``. *full*: the version in full, ``3.12.3``.
    """

    prefix: Path
    site: Path
    version: tuple[int, int]
    abi: str
    full: str = ""

    @property
    def python(self) -> Path:
        return self.prefix / "bin" / "python"

    @property
    def machine(self) -> str:
        """What it runs on, as Python names it: ``aarch64``."""
        return platform.machine()

    @property
    def ranked(self) -> list[Tag]:
        """The wheel tags that its Python accepts, best first; it runs on this machine, so platform and C library are ours."""
        from packaging import tags

        if not self.abi.startswith("cp"):
            return list(tags.compatible_tags(self.version))
        own = tags.cpython_tags(self.version, [self.abi])
        return [*own, *tags.compatible_tags(self.version, f"cp{self.version[0]}{self.version[1]}")]

    @property
    def tags(self) -> frozenset[Tag]:
        """The same without an order."""
        return frozenset(self.ranked)

    @property
    def markers(self) -> dict[str, str]:
        """What requirements' markers are evaluated with (PEP 508): this machine's, for its Python."""
        from packaging.markers import default_environment

        full = self.full or ".".join(map(str, self.version))
        short = ".".join(map(str, self.version))
        return {**default_environment(), "python_version": short, "python_full_version": full, "implementation_version": full}  # type: ignore[dict-item]


class Found(msgspec.Struct, frozen=True):
    """What differs from a layout: the files to write, and those among them that somebody else changed."""

    differing: tuple[str, ...]
    unknown: tuple[str, ...]


def probe(folder: Path) -> Environment:
    """
    Ask the Python of the environment in *folder* what it is.

    Raises:
        environment-unusable: There is none, it does not run, or the operating system's package manager owns it.
    """
    python = folder.absolute() / "bin" / "python"
    try:
        # Whatever .pth files print comes before our line.
        said = process.output([python, "-I", "-c", _ASK], timeout=60).splitlines()
        answer = msgspec.json.decode(said[-1], type=_Answer)
    except (CommandError, OSError, IndexError, msgspec.DecodeError) as error:
        details = error.details if isinstance(error, CommandError) else [str(error)]
        raise PythonError(
            "environment-unusable", f"{folder} is not a Python environment: {python} does not answer.", details=details
        ) from error
    if answer.managed:
        raise PythonError("environment-unusable", f"{folder} belongs to the package manager of the operating system.")
    site, plat = Path(answer.pure).resolve(), Path(answer.plat).resolve()
    if site != plat:
        raise PythonError("environment-unusable", f"{folder} has two folders for packages.", details=[str(site), str(plat)])
    abi = f"{'cp' if answer.name == 'cpython' else answer.name}{answer.version[0]}{answer.version[1]}{answer.flags}"
    return Environment(Path(answer.prefix), site, answer.version, abi, answer.full)


@contextlib.contextmanager
def access_guard(place: Path) -> Iterator[None]:
    """Turn what the operating system refuses in *place* into `environment-unusable`, and a full disk into `disk-full`."""
    try:
        with translate_disk_full(place):
            yield
    except OSError as error:
        raise PythonError("environment-unusable", f"{place} cannot be read or changed.", details=[str(error)]) from error


@contextlib.contextmanager
def held(environment: Environment, name: str = ".lock") -> Iterator[None]:
    """Keep other runs away from the environment by the lock *name*; the default is the one that uv takes, too."""
    from filelock import FileLock, Timeout

    with access_guard(environment.prefix):
        lock = FileLock(environment.prefix / name)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            console.note(f"another program works on {environment.prefix}; waiting for it to end")
            lock.acquire()
    try:
        yield
    finally:
        lock.release()


def look(environment: Environment, layout: Layout) -> Found:
    """
    Compare what is there with *layout*.

    Raises:
        environment-unusable: Another package or another version holds files of the layout, or one of them cannot be read.
    """
    with access_guard(environment.site):
        _check_owners(environment, layout)
        found = {name: _hash(environment.site, name) for name in layout.files}
    differing = [name for name, file in layout.files.items() if found[name] != file.sha256]
    foreign = (name for name in differing if found[name] and (known := layout.files[name].known) and found[name] not in known)
    return Found(tuple(differing), tuple(sorted(foreign)))


def _hash(site: Path, name: str) -> str:
    path = site / name
    if not path.parent.resolve().is_relative_to(site):
        raise PythonError("environment-unusable", f"{path} leads out of the environment.", details=[str(path.parent.resolve())])
    try:
        return sha256_file(path)
    except FileNotFoundError:
        return ""


def _check_owners(environment: Environment, layout: Layout) -> None:
    """Refuse an environment in which removing or updating some other distribution would take files of ours."""
    others = []
    for info in sorted(environment.site.glob("*.dist-info")):
        if info.name in layout.infos.values():
            continue
        name = _canonical(info.name.removesuffix(".dist-info").rpartition("-")[0])
        if name in map(_canonical, layout.infos) or not _recorded(info / "RECORD").isdisjoint(layout.files):
            others.append(info.name.removesuffix(".dist-info"))
    if others:
        names = " ".join(name.rpartition("-")[0] for name in others)
        raise PythonError(
            "environment-unusable",
            f"{environment.site} holds other versions of these packages, or packages with the same files.",
            details=others,
            todo=f"Remove them, if nothing there needs them: uv pip uninstall --python {environment.prefix / 'bin' / 'python'} {names}",
        )


def _canonical(name: str) -> str:
    from packaging.utils import canonicalize_name

    return str(canonicalize_name(name))


def _recorded(record: Path) -> set[str]:
    try:
        return {row[0] for row in csv.reader(io.StringIO(record.read_text("utf-8"))) if row}
    except (FileNotFoundError, NotADirectoryError, UnicodeDecodeError, csv.Error):
        return set()


def write(environment: Environment, layout: Layout, names: Iterable[str]) -> None:
    """
    Write the files *names* of *layout*, and remove what else lies in its ``.dist-info`` folders.

    Raises:
        environment-unusable, disk-full: The operating system refused. wheel-invalid: A member is not what RECORD says.
    """
    with access_guard(environment.site):
        for name in sorted(names, key=lambda name: (".dist-info/" in name, name.endswith("/RECORD"), name)):
            _write_file(environment.site / name, name, layout.files[name])
        for info in layout.infos.values():
            for path in sorted((environment.site / info).rglob("*")):
                # What pip or uv noted there (direct_url.json, uv_cache.json) is about their installation, and in no RECORD now.
                if not path.is_dir() and path.relative_to(environment.site).as_posix() not in layout.files:
                    path.unlink()


def _write_file(path: Path, name: str, file: File) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # A fixed name: what a killed run left is written over by the next one. Renaming leaves hard links into a cache alone.
    temporary = path.with_name(f".{path.name}.sparkwright")
    found = hashlib.sha256()
    try:
        with file.open(name) as source, temporary.open("wb") as sink:
            while chunk := source.read(1 << 20):
                found.update(chunk)
                sink.write(chunk)
            sink.flush()
            os.fsync(sink.fileno())
        if found.hexdigest() != file.sha256:
            raise WheelError("wheel-invalid", f"{name} is not what the RECORD of {file.package} says.")
        temporary.chmod(0o755 if file.executable else 0o644)
        # Python trusts a compiled file by the time and size of its source, and some without looking. First, so that a kill leaves none.
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            compiled.unlink(missing_ok=True)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
