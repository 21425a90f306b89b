"""The files of a release for the Python of an image, brought into the store and verified, and those of the installer beside them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import msgspec
from docker import DockerClient
from packaging.tags import Tag

from sparkwright.builder import pylock
from sparkwright.builder.pylock import Interpreter
from sparkwright.core.console import size
from sparkwright.core.errors import StoreError
from sparkwright.core.files import sha256_file
from sparkwright.core.zips import zip_file
from sparkwright.forks.context import RunContext
from sparkwright.operate.errors import ImageError
from sparkwright.operate.image.picked import Picked, outside
from sparkwright.release.client import change, files, placing, target
from sparkwright.release.client.placing import MOST_METADATA
from sparkwright.release.client.state import Chosen, Pinned
from sparkwright.release.environment import Environment
from sparkwright.release.manifest import places

#: What an installer has that can serve; older ones lack it.
NEEDED = frozenset(("sparkwright/operate/image/settled.py", "sparkwright/cli/serve.py", "sparkwright/cli/options.py"))


class Inside(Environment, frozen=True):
    """The environment that there will be in an image: that of another machine, perhaps, which nothing here can be asked about."""

    python_of: Interpreter = Interpreter("", "", "")

    @property
    def machine(self) -> str:
        return self.python_of.machine

    @property
    def ranked(self) -> list[Tag]:
        return pylock.tags(self.version, self.machine, int(self.python_of.libc.partition(".")[2] or 17))

    @property
    def markers(self) -> dict[str, str]:
        system = {"os_name": "posix", "sys_platform": "linux", "platform_system": "Linux", "platform_machine": self.machine}
        return {**super().markers, **system, "implementation_name": "cpython", "platform_python_implementation": "CPython"}


def inside(python: Interpreter, folder: str) -> Inside:
    """Return the environment *folder* of an image whose Python is *python*."""
    major, minor = (int(part) for part in python.version.split(".")[:2])
    return Inside(Path(folder), Path(folder), (major, minor), f"cp{major}{minor}", python.version, python)


def packages(picked: Picked, python: Interpreter, folder: str) -> Chosen:
    """Return the set for that Python; raises as `target.chosen`."""
    return target.chosen(picked.index, picked.entry, picked.release, inside(python, folder))[0]


def check_room(context: RunContext, engine: DockerClient, pinned: Sequence[Pinned]) -> None:
    """Raise `disk-full` where the store cannot take the files that it lacks, or the engine what they unpack to."""
    lacking, unpacked = files.missing(outside(context), pinned), change.UNPACKED * sum(one.size for one in pinned)
    wanted = {context.store.root: lacking}
    root = Path(str(engine.info().get("DockerRootDir", "")))
    if root.is_dir():
        same = placing.same_disk(context.store.root, root)
        wanted = {root: unpacked + lacking} if same else {**wanted, root: unpacked}
    for folder, count in wanted.items():
        if count > (free := placing.free(folder)):
            raise StoreError(
                "disk-full", f"There is not enough room under {folder}.", details=[f"needed: {size(count)}", f"free:   {size(free)}"]
            )


def installer(context: RunContext, picked: Picked, python: Interpreter) -> tuple[Path, ...]:
    """
    Return the files of the release's own sparkwright and of what it requires, for that Python; the first is its wheel.

    Raises:
        installer-unfit: It cannot serve. Others: as `files.obtain` and `pylock.required`.
    """
    wheel = picked.installer
    url = picked.index.address.of(wheel.url or places.wheel(wheel.sha256, wheel.filename))
    pinned = Pinned(wheel.project, wheel.version, wheel.filename, wheel.sha256, url, wheel.size)
    path = files.obtain(outside(context), [pinned])[wheel.filename]
    return (path, *pylock.required(context, python, _requires(path, picked)))


def _requires(path: Path, picked: Picked) -> list[str]:
    with zip_file(path) as archive:
        names = set(archive.namelist())
        if lacking := sorted(NEEDED - names):
            raise ImageError(
                "installer-unfit", f"The sparkwright of {picked.entry.name} cannot serve yet.", details=[f"it lacks {lacking[0]}"]
            )
        info = next(name for name in names if name.endswith(".dist-info/METADATA"))
        with archive.open(info) as stream:
            text = stream.read(MOST_METADATA).decode("utf-8", "replace")
    return sorted(re.findall(r"(?m)^Requires-Dist: ([^;\r\n]+?)\s*$", text))


def addresses(paths: Sequence[Path]) -> dict[str, str]:
    """Return the file name of each of *paths* → its sha256."""
    return {path.name: sha256_file(path) for path in paths}


def lines(paths: Sequence[Path], downloads: str) -> str:
    """Return *paths* as requirements with hashes; inside, the store's downloads lie in the folder *downloads*."""
    hashes = addresses(paths)
    named = ((path, msgspec.json.encode(path.name).decode().strip('"')) for path in paths)
    return "".join(f"file://{downloads}/{hashes[path.name]}/{name} --hash=sha256:{hashes[path.name]}\n" for path, name in named)
