"""Wheels into an environment: looked at before anything is changed, laid down by uv, and looked at again."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from sparkwright.builder.wheel.archive import WheelName
from sparkwright.core import process
from sparkwright.core.errors import WheelError
from sparkwright.core.store import Store
from sparkwright.core.zips import zip_file, zip_members
from sparkwright.release import content
from sparkwright.release.client import packages, state
from sparkwright.release.client.state import Pinned
from sparkwright.release.environment import Environment, access_guard
from sparkwright.release.errors import InstallError

#: METADATA is a few kilobytes; a readme in it may be more.
MOST_METADATA = 16 << 20


class Looked(msgspec.Struct, frozen=True):
    """A wheel: its content (see `release.content`; empty where RECORD states no hashes), the bytes that it unpacks to, its names."""

    path: Path
    content: str
    unpacked: int
    names: frozenset[str]


def look(one: Pinned, path: Path) -> Looked:
    """
    Return what the wheel at *path* holds, once it is known to be what its name says.

    Raises:
        wheel-mismatch: Its METADATA or its ``.dist-info`` names another project or version. wheel-invalid, archive-unsafe: It is no wheel.
    """
    name = WheelName.of(path.name)
    with zip_file(path) as wheel:
        members = zip_members(wheel, path.name)
        infos = {member.partition("/")[0] for member in members if re.match(r"[^/]+\.dist-info/", member)}
        if len(infos) != 1 or packages.of_info(min(infos)) != (one.project, name.version):
            raise WheelError("wheel-mismatch", f"{path.name} holds the description of something else.", details=sorted(infos))
        with wheel.open(f"{min(infos)}/METADATA") as stream:
            text = stream.read(MOST_METADATA).decode("utf-8", "replace")
    head = dict(re.findall(r"(?m)^(Name|Version):[ \t]*(.*?)[ \t\r]*$", text)[1::-1])
    if packages.canonical(head.get("Name", "")) != one.project or not _same(head.get("Version", ""), one.version):
        raise WheelError("wheel-mismatch", f"{path.name} calls itself {head.get('Name')!r:.100} {head.get('Version')!r:.100} inside.")
    return Looked(path, _content(path), sum(member.file_size for member in members.values()), frozenset(members))


def _content(path: Path) -> str:
    try:
        return content.of_wheel(path)
    except WheelError as error:
        if error.reference != "wheel-invalid":
            raise
        return ""  # an old wheel of others, whose bytes are known by hash all the same


def _same(one: str, other: str) -> bool:
    from packaging.version import InvalidVersion, Version

    try:
        return Version(one) == Version(other)
    except InvalidVersion:
        return False


def lay(store: Store, place: Environment, wheels: Sequence[tuple[Pinned, Path]]) -> None:
    """
    Let uv install exactly these files, without an index, a network or dependencies.

    It unpacks into a cache of its own in the environment and links from there: a cache that is shared would hand on to the next
    environment whatever is later written into files of this one.

    Raises:
        command-failed: uv did not do it. disk-full, environment-unusable: The operating system refused.
    """
    from uv import find_uv_bin

    work = state.folder(place) / "uv"
    shutil.rmtree(work, ignore_errors=True)
    with access_guard(place.prefix):
        (work / "wheels").mkdir(parents=True)
        for one, path in wheels:
            (work / "wheels" / one.filename).symlink_to(path)
        (work / "requirements.txt").write_text("".join(f"{one.project}=={one.version} --hash=sha256:{one.sha256}\n" for one, _ in wheels))
    options = [
        "--no-index",
        "--no-deps",
        "--offline",
        "--require-hashes",
        "--no-config",
        "--no-build",
        "--reinstall",
        "--link-mode",
        "hardlink",
    ]
    folders: list[str | os.PathLike[str]] = ["--find-links", work / "wheels", "--cache-dir", work / "cache"]
    command: list[str | os.PathLike[str]] = [
        find_uv_bin(),
        "pip",
        "install",
        "--python",
        place.python,
        *options,
        *folders,
        "--requirements",
        work / "requirements.txt",
    ]
    process.run(
        command,
        log=store.root / "logs" / "install.log",
        env=_variables(),
        what=f"uv could not install into {place.prefix}; what it began is noted.",
    )
    shutil.rmtree(work, ignore_errors=True)


def _variables() -> dict[str, str]:
    """Return the environment without what would make uv install another thing, or elsewhere."""
    keep = {
        name: value for name, value in process.clean_environment().items() if not name.startswith(("UV_", "PIP_", "VIRTUAL_ENV", "CONDA_"))
    }
    return {**keep, "UV_NO_PROGRESS": "1", "UV_COMPILE_BYTECODE": "0"}


def confirm(place: Environment, laid: Sequence[Pinned], looked: Mapping[str, Looked]) -> None:
    """Raise `environment-broken` unless each of *laid* is there once, with the content of its wheel."""
    there, wrong = packages.found(place), []
    for one in laid:
        infos = there.get(one.project, [])
        if len(infos) != 1:
            wrong.append(f"{one.project} {one.version}: {len(infos)} times there")
        elif (wanted := looked[one.project].content) and content.of_installed(place.site / infos[0]) != wanted:
            wrong.append(f"{one.project} {one.version}: not what its wheel holds")
    if wrong:
        raise InstallError("environment-broken", "What uv laid down is not what the wheels hold.", details=wrong)


def free(folder: Path) -> int:
    """Return the free bytes where *folder* lies or will lie."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def same_disk(one: Path, other: Path) -> bool:
    """Do both lie on one file system?"""

    def device(path: Path) -> int:
        while not path.exists():
            path = path.parent
        return path.stat().st_dev

    return device(one) == device(other)
