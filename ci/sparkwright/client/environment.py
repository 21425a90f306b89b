"""
One virtual environment for each release: made at its place, checked, and then left alone.

An environment counts once its marker is there, which is written last. Neither its Python nor its
RECORDs decide where something is written: what belongs into it is known from the wheels.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import platform
import shutil
import stat
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from uv import find_uv_bin

from sparkwright.client import load_check
from sparkwright.client.errors import ClientError
from sparkwright.client.folders import LOCK, own_folder
from sparkwright.client.records import Channel, ReleaseName, Sha256
from sparkwright.client.wheel_check import CheckedWheel
from sparkwright.core import files, process
from sparkwright.core.errors import CommandError, FileError, PythonError
from sparkwright.core.process import CACHES, Limits, cache_variables
from sparkwright.core.store import locked, write_file
from sparkwright.core.zips import INSTALLER_FILES

if TYPE_CHECKING:
    from packaging.markers import Environment
    from packaging.tags import Tag

MARKER, LISTING = "sparkwright.json", "sparkwright-files.json"
#: Of the child that loads the libraries: seconds, MB of addresses (CUDA reserves much), and MB of
#: any file that it writes, its output included.
_LOAD_LIMITS = Limits(seconds=600, memory=4 << 20, written=256)

_ASK = (
    "import json, platform, sys; print(json.dumps({'path': sys._base_executable, 'version':"
    " platform.python_version(), 'abi': sys.abiflags}))"
)


class Python(msgspec.Struct, frozen=True):
    """
    An interpreter outside of any environment.

    Attributes:
        path: Its program. *version*: in full, such as ``3.12.3``.
        abi: The flags of its ABI: ``t`` without a global interpreter lock.
    """

    path: str
    abi: str
    version: str

    @property
    def short(self) -> str:
        """The version as wheels and folders name it, such as ``3.12``."""
        return ".".join(self.version.split(".")[:2])

    @property
    def site(self) -> str:
        """The site-packages of an environment with this Python, below the environment."""
        return f"lib/python{self.short}{self.abi}/site-packages"

    def tags(self) -> list[Tag]:
        """Return the wheel tags that it accepts, best first."""
        from packaging import tags

        major, minor = map(int, self.short.split("."))
        abi = f"cp{major}{minor}{self.abi}"
        own = tags.cpython_tags((major, minor), [abi])
        return [*own, *tags.compatible_tags((major, minor), f"cp{major}{minor}")]

    def markers(self) -> Environment:
        """Return the values of environment markers (PEP 508) for it on this machine."""
        from packaging.markers import default_environment

        values = default_environment()
        values["python_version"], values["python_full_version"] = self.short, self.version
        values["implementation_version"] = self.version
        return values


def find_python(named: str) -> Python:
    """
    Return the interpreter *named* (a path, or a version such as ``3.12``); by default the one that
    runs this program.

    Raises:
        environment-unusable: There is none.
    """
    if not named:
        own = sys._base_executable  # type: ignore[attr-defined]
        return Python(own, sys.abiflags, platform.python_version())
    try:
        find = [find_uv_bin(), "python", "find", "--no-config", "--system"]
        program = process.output([*find, "--no-python-downloads", named], timeout=60).strip()
        # Neither site-packages nor variables take part: what a stranger put there says nothing.
        with tempfile.TemporaryDirectory(prefix="sparkwright-") as folder:
            log = Path(folder) / "answer"
            process.run_limited([program, "-I", "-S", "-c", _ASK], Limits(60, 4096, 1), log)
            python = msgspec.json.decode(log.read_bytes(), type=Python)
    except (CommandError, OSError, msgspec.DecodeError) as error:
        raise PythonError(
            "environment-unusable",
            f"There is no usable Python {named}.",
            details=[str(error)],
            todo="Name another with --python.",
        ) from error
    return python


class FileState(msgspec.Struct, frozen=True, array_like=True):
    """
    The size of a file in bytes, its time in s, and its sha256 (of a link, of its target).

    Layers of images keep whole seconds.
    """

    size: int
    time: int
    sha256: str


class Marker(msgspec.Struct, frozen=True, kw_only=True):
    """
    What is installed in an environment: its marker.

    Attributes:
        folder: For which it was made; its programs name it.
        index: The address that it came from. *key*: of the lock and the edits that it was made of.
        channel: That it was installed from.
        packages: Project → version. *wheels*: project → sha256 of its wheel.
        listing: The sha256 of the list of files.
    """

    name: ReleaseName
    folder: str
    index: str
    python: str
    key: Sha256
    packages: dict[str, str]
    channel: Channel
    wheels: dict[str, Sha256]
    listing: str = ""


def default_prefix() -> Path:
    """Return the folder of the installations: ``SPARKWRIGHT_PREFIX``, else the platform's."""
    if named := os.environ.get("SPARKWRIGHT_PREFIX"):
        return Path(named)
    import platformdirs

    return platformdirs.user_data_path("sparkwright")


def installed_at(folder: Path) -> tuple[Prefix, Marker] | None:
    """Return where, and as what, the environment in *folder* was installed; None for another."""
    prefix = Prefix(folder.resolve().parent.parent)
    marker = prefix.marker(folder.resolve().name)
    return (prefix, marker) if marker else None


class Prefix:
    """
    The folder of the installations.

    Attributes:
        root: The folder: ``releases/<name>/``, ``current``, ``trust/`` and ``history.json``.
    """

    def __init__(self, root: Path) -> None:
        self.root = root.expanduser().resolve()

    def locked(self) -> AbstractContextManager[None]:
        """
        Make the folder, and keep other runs out of it for the block.

        Raises:
            environment-unusable: A folder is where the link to the current release belongs.
        """
        for link in (self.root / "current", self.root / ".current"):
            if link.is_dir() and not link.is_symlink():
                raise PythonError(
                    "environment-unusable", f"{link} is a folder, not a link.", todo="Move it away."
                )
        return locked(own_folder(self.root) / LOCK, str(self.root))

    def environment_folder(self, name: str) -> Path:
        """Return the environment of the release *name*."""
        return self.root / "releases" / name

    def marker(self, name: str) -> Marker | None:
        """Return the marker of the release *name*; None without a whole one of that name."""
        with contextlib.suppress(FileError):
            marker = files.read_json(self.environment_folder(name) / MARKER, Marker)
            return marker if marker.name == name else None
        return None

    def listing(self, name: str) -> dict[str, FileState]:
        """Return the files of the release *name* as they were made; nothing if it is not whole."""
        path, marker = self.environment_folder(name) / LISTING, self.marker(name)
        data = path.read_bytes() if path.is_file() else b""
        if not marker or files.sha256_bytes(data) != marker.listing:
            return {}
        return msgspec.json.decode(data, type=dict[str, FileState])

    def installed(self) -> dict[str, Marker]:
        """Return every release that is installed wholly."""
        names = self.environments()
        return {name: marker for name in names if (marker := self.marker(name))}

    def environments(self) -> list[str]:
        """Return the names of the folders that are ours, also of those that are not whole."""
        return [
            folder.name
            for folder in sorted(self.root.glob("releases/[!.]*"))
            if any(
                map(os.path.lexists, (folder / MARKER, folder / LISTING, self.journal(folder.name)))
            )
        ]

    @property
    def current(self) -> str:
        """The name of the release that ``current`` leads to; empty if there is none."""
        try:
            target = (self.root / "current").readlink()
        except OSError:
            return ""
        return target.name if target.parent == Path("releases") else ""

    @property
    def history(self) -> list[str]:
        """The releases that were current, the latest last, which is the current one if any is."""
        path, current = self.root / "history.json", self.current
        entries = files.read_json(path, list[str]) if path.exists() else []
        # A `switch` that was killed leaves entries after the current one.
        while current in entries and entries[-1] != current:
            entries.pop()
        return entries

    def switch(self, name: str, *, back: bool = False) -> None:
        """
        Let ``current`` lead to the release *name*, and append it to the history.

        Args:
            back: Instead, remove what follows *name* from the history.
        """
        path = self.root / "history.json"
        if not back:
            entries = [entry for entry, _ in itertools.groupby([*self.history, name])]
            write_file(path, msgspec.json.encode(entries))
        link = self.root / ".current"
        link.unlink(missing_ok=True)
        link.symlink_to(Path("releases") / name)
        os.replace(link, self.root / "current")
        if back:
            write_file(path, msgspec.json.encode(self.history))

    def journal(self, name: str) -> Path:
        """Return the file that exists while the environment *name* is made or removed."""
        return self.root / "releases" / f".{name}.unfinished"

    def remove(self, name: str) -> None:
        """
        Remove the environment *name*; without its marker, it does not count while it shrinks. Of a
        link to another place, only the link is removed.
        """
        if self.environment_folder(name).is_symlink():
            self.environment_folder(name).unlink()
            return
        self.journal(name).touch()
        (self.environment_folder(name) / MARKER).unlink(missing_ok=True)
        self.recover()

    def recover(self) -> None:
        """
        Undo what was not finished: remove environments without a marker that were begun, and put
        back what was set aside for them. What cannot be removed is left to the next run.
        """
        for journal in self.root.glob("releases/.*.unfinished"):
            name = journal.name[1:].removesuffix(".unfinished")
            folder, aside = self.environment_folder(name), journal.with_suffix(".old")
            if not self.marker(name):
                shutil.rmtree(folder, ignore_errors=True)
                if folder.exists():
                    continue
                if aside.exists():
                    aside.rename(folder)
            shutil.rmtree(aside, ignore_errors=True)
            if not aside.exists():
                journal.unlink()


def make(
    folder: Path,
    cache: Path,
    python: Python,
    wheels: Sequence[CheckedWheel],
    replaced: Mapping[str, bytes],
    loaded: Collection[str],
    hashes: Mapping[tuple[int, int, int], str],
) -> dict[str, FileState]:
    """
    Make the environment in *folder*, which does not exist, and return its files.

    Args:
        cache: The folder of uv's cache and of the log.
        replaced: Files that are written after the installation, by path below the environment.
        loaded: Projects whose libraries are loaded as a trial.
        hashes: As `known_files`.

    Raises:
        command-failed: uv failed. environment-broken: What it wrote is not what the wheels hold,
            or a library cannot be loaded. disk-full: There is no room.
    """
    log = own_folder(cache, "logs") / "install.log"
    log.unlink(missing_ok=True)
    options = ["--no-config", "--offline", "--no-python-downloads"]
    environment = _uv_environment(cache)
    uv = functools.partial(process.run, log=log, env=environment)
    uv([find_uv_bin(), "venv", *options, "--quiet", "--python", python.path, folder])
    base = describe(folder, contents=False).keys() | {"caches.env", ".lock"}
    with tempfile.TemporaryDirectory(prefix="sparkwright-") as temporary:
        lock = Path(temporary) / "requirements.txt"
        with lock.open("w") as stream:
            for wheel, path in ((checked.wheel, checked.path) for checked in wheels):
                stream.write(f"{wheel.project} @ {path.as_uri()} --hash=sha256:{wheel.sha256}\n")
        options += ["--require-hashes", "--no-build", "--link-mode", "hardlink"]
        uv([find_uv_bin(), "pip", "sync", "--python", folder / "bin/python", *options, lock])
    for place, data in replaced.items():
        write_file(folder / place, data)
    own_folder(folder, CACHES)
    text = "".join(f'{name}="{value}"\n' for name, value in cache_variables(folder).items())
    write_file(folder / "caches.env", text.encode())
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(_load, folder, wheels, loaded)
        actual = describe(folder, hashes=hashes)
        _compare_with_wheels(folder, wheels, replaced, base, actual)
        loading.result()
    for place in actual:
        # uv links one file into several releases, so an edit would change all of them.
        if not (folder / place).is_symlink():
            (folder / place).chmod((folder / place).stat().st_mode & ~0o222)
    return actual


def _uv_environment(cache: Path) -> dict[str, str]:
    """Return an environment without what would make uv install another thing, or elsewhere."""
    unwanted = ("UV_", "PIP_", "VIRTUAL_ENV", "CONDA_")
    clean = process.clean_environment()
    variables = {name: value for name, value in clean.items() if not name.startswith(unwanted)}
    return {**variables, "UV_CACHE_DIR": str(own_folder(cache, "uv")), "UV_NO_PROGRESS": "1"}


def describe(
    folder: Path, *, contents: bool = True, hashes: Mapping[tuple[int, int, int], str] = {}
) -> dict[str, FileState]:
    """
    Return the files and links below *folder*, without what programs compile at run time.

    Args:
        contents: Whether files are read; else their sha256 is left empty.
        hashes: As `known_files`; these are not read.
    """
    paths = []
    for top, names, members in os.walk(folder):
        links = [name for name in names if Path(top, name).is_symlink()]
        if Path(top) == folder and CACHES in names:
            names.remove(CACHES)
        paths += [f"{top}/{name}" for name in (*members, *links)]

    def states(part: Sequence[str]) -> list[tuple[str, FileState]]:
        return [(path[start:], _state(path, hashes, contents=contents)) for path in part]

    start = len(str(folder)) + 1
    with ThreadPoolExecutor(8) as pool:
        parts = pool.map(states, [paths[number::8] for number in range(8)])
        return dict(itertools.chain.from_iterable(parts))


def _state(path: str, hashes: Mapping[tuple[int, int, int], str], *, contents: bool) -> FileState:
    entry = os.lstat(path)
    time = entry.st_mtime_ns // 10**9
    digest = hashes.get((entry.st_ino, entry.st_size, time), "")
    if contents and not digest and stat.S_ISREG(entry.st_mode):
        digest = files.sha256_file(Path(path))
    elif contents and stat.S_ISLNK(entry.st_mode):
        digest = files.sha256_bytes(os.fsencode(Path(path).readlink()))
    return FileState(entry.st_size, time, digest)


def known_files(prefix: Prefix, name: str) -> dict[tuple[int, int, int], str]:
    """
    Return the files of the release *name* that were not changed: inode, size and time → sha256.

    uv links the files of one wheel into every environment, so the next one need not read them.
    """
    hashes: dict[tuple[int, int, int], str] = {}
    for place, state in prefix.listing(name).items():
        with contextlib.suppress(OSError):
            entry = os.lstat(prefix.environment_folder(name) / place)
            if stat.S_ISREG(entry.st_mode):
                hashes[entry.st_ino, state.size, state.time] = state.sha256
    return hashes


def _compare_with_wheels(
    folder: Path,
    wheels: Sequence[CheckedWheel],
    replaced: Mapping[str, bytes],
    base: set[str],
    actual: Mapping[str, FileState],
) -> None:
    """Raise `environment-broken` unless *folder* holds exactly what the wheels do."""
    expected = {
        place: sha256 for wheel in wheels for place, (_, sha256, _) in wheel.files.items()
    } | {place: files.sha256_bytes(data) for place, data in replaced.items()}
    others = base.union(
        *(wheel.scripts for wheel in wheels),
        *({f"{wheel.info}/{name}" for name in INSTALLER_FILES} for wheel in wheels),
    )
    wrong = [
        place
        for place, sha256 in expected.items()
        if place not in actual or actual[place].sha256 != sha256
    ]
    wrong += sorted(actual.keys() - expected.keys() - others)
    wrong += sorted(place for wheel in wheels for place in wheel.scripts - actual.keys())
    if wrong:
        raise ClientError(
            "environment-broken",
            f"What was installed in {folder} is not what the wheels hold.",
            details=wrong[:20],
        )


def _load(folder: Path, wheels: Sequence[CheckedWheel], loaded: Collection[str]) -> None:
    """Load the libraries of *loaded* projects in a child, as far as the machine allows."""
    libraries = [
        str(folder / place)
        for wheel in wheels
        if wheel.wheel.project in loaded
        for place in wheel.files
        if place.endswith(".so") or ".so." in place
    ]
    modules = [name for wheel in wheels if (name := wheel.wheel.project) == "torch"]
    request = msgspec.json.encode({"modules": modules, "libraries": libraries})
    with tempfile.TemporaryDirectory(prefix="sparkwright-") as home:
        words = Path(home) / "request.json"
        words.write_bytes(request)
        environment = process.clean_environment(HOME=home, TMPDIR=home, **cache_variables(folder))
        command = [str(folder / "bin/python"), "-I", "-B", load_check.__file__, str(words)]
        ended = process.run_limited(command, _LOAD_LIMITS, Path(home) / "log", env=environment)
    if ended.status or not ended.tail.endswith(load_check.DONE):
        late = [f"it did not end within {_LOAD_LIMITS.seconds:g} s"] if ended.late else []
        raise ClientError(
            "environment-broken",
            f"The libraries in {folder} cannot be loaded.",
            details=[*ended.tail.splitlines()[-20:], *late],
        )
