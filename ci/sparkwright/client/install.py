"""
Install releases, each into an environment of its own, and switch between them.

Everything that can be known is checked before the first folder is made: the index, the lock, every
wheel, and the room. Nothing is installed into an environment that exists.
"""

import contextlib
import functools
import operator
import os
import platform
import re
import shutil
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
from packaging.markers import Environment, default_environment
from packaging.tags import Tag, sys_tags
from uv import find_uv_bin

from sparkwright.client import ClientError, environment, locked_wheels
from sparkwright.client.environment import (
    CANARY,
    LISTING,
    MARKER,
    PACKS,
    PYTHON,
    SHORT,
    SITE,
    FileState,
    Marker,
    Prefix,
)
from sparkwright.client.folders import (
    check_room,
    locked_folder,
    own_folder,
    remove_unfinished,
)
from sparkwright.client.index import Index, newest_first
from sparkwright.client.locked_wheels import CheckedWheel, LockedWheel
from sparkwright.client.records import (
    LARGEST_LOCK,
    LARGEST_RELEASE,
    Channel,
    FileEdit,
    Overlay,
    Release,
    ReleaseLock,
    WarmPack,
)
from sparkwright.core import process
from sparkwright.core.console import console
from sparkwright.core.errors import PythonError
from sparkwright.core.files import content_key, sha256_bytes
from sparkwright.core.store import flush, replacing, translate_disk_full, write_file
from sparkwright.core.zips import INSTALLER_FILES


def select_release(
    index: Index, python: str, machine: str, *, channel: Channel, stack: str, version: str
) -> str:
    """
    Return the name of the release to install.

    Args:
        python: The version of the interpreter, such as ``3.12``; empty for any.

    Raises:
        release-unknown, release-unproved, release-yanked: None fits; see there.
    """
    states = index.states
    names = [
        name
        for name in newest_first(states)
        if version in ("", name)
        and stack in ("", states[name].stack)
        and {machine, "any"} & set(states[name].machines)
        and python in ("", *states[name].pythons)
    ]
    if not names:
        wanted = " ".join(filter(None, (version or stack, "for", machine, python)))
        raise ClientError(
            "release-unknown",
            f"{index} has no release {wanted}.",
            details=newest_first(states)[:10],
        )
    usable = [name for name in names if version or not states[name].yanked]
    proved = [name for name in names if channel in ("candidate", states[name].channel)]
    if usable and not proved:
        raise ClientError(
            "release-unproved",
            f"{usable[0]} is not verified.",
            details=[f"missing: {', '.join(states[usable[0]].missing)}"],
        )
    offered = [name for name in proved if name in usable]
    if not offered:
        raise ClientError(
            "release-yanked",
            f"Every {channel} release that fits was yanked.",
            details=[f"{name}: {states[name].yanked}" for name in (proved or names)[:10]],
        )
    if reason := states[offered[0]].yanked:
        console.warn(f"{offered[0]} was yanked: {reason}")
    return offered[0]


def install(
    prefix: Prefix,
    cache: Path,
    index: Index,
    *,
    channel: Channel = "verified",
    stack: str = "",
    version: str = "",
    dry_run: bool = False,
) -> dict[str, Any]:
    """
    Install a release, and let ``current`` lead to it.

    Args:
        version: The name of a release, or empty for the newest that fits *channel*, *stack* (empty
            for that of the current release, else the latest), this machine and the Python that runs
            this program.
        dry_run: Download and check everything, and create no environment.

    Returns:
        The release's ``name`` and ``folder``; its ``state``, which is ``there already``,
        ``installed``, ``switched``, ``would install`` or ``would switch``; and the packages
        ``added``, ``removed`` and ``unchanged``.

    Raises:
        release-unknown, release-unproved, release-yanked, lock-invalid, set-mixed, index-damaged,
            download-invalid, wheel-invalid, wheel-mismatch, wheel-unsafe, edit-mismatch,
            disk-full: Nothing was created.
        environment-broken: The environment is there, and was changed; or the new one is not
            usable, and was removed.
        environment-unusable: The environment is there, with another Python or from another lock,
            or something else has its name.
        command-failed: The new environment could not be made, and was removed.
    """
    machine = platform.machine()
    if not (stack or version):
        stack = prefix.current.rpartition(".")[0]
    name = select_release(index, SHORT, machine, channel=channel, stack=stack, version=version)
    release = index.release(name)
    if release.missing and index.states[name].channel == "verified":
        raise ClientError(
            "release-unproved",
            f"{name} is called verified, and its own record lacks gates.",
            details=[f"of {file}" for file in release.missing],
        )
    locks = {str(lock.machine): lock for lock in release.locks}
    lock = locks.get(machine) or locks.get("any")
    if lock is None:
        raise ClientError("release-unknown", f"{name} has no set for this machine.")
    key = content_key("environment", (lock.sha256, release.edits, release.overlays, SITE))
    folder = prefix.environment_folder(name)
    with prefix.locked():
        prefix.remove_work_folders()
        before, present = prefix.marker(prefix.current), prefix.marker(name)
        if name in prefix.environments():
            if present and present.key != key:
                raise PythonError(
                    "environment-unusable",
                    f"{name} is installed with Python {present.python}, or from another lock.",
                    todo=f"Once no program of {folder} runs, remove it with "
                    f"`sparkwright uninstall {name}`.",
                )
            if present and (prefix.current, present.folder) == (name, str(folder)):
                _require_unchanged(prefix, name)
                return _result(prefix, "there already", present, present)
            with prefix.switching():
                return _switch(prefix, name, dry_run=dry_run)
        if os.path.lexists(folder):
            raise PythonError(
                "environment-unusable",
                f"{folder} is not an environment of sparkwright.",
                todo="Move it away; or name another folder with --prefix.",
            )
        text, tags = index.read(lock, LARGEST_LOCK), list(sys_tags())
        wheels = [
            msgspec.structs.replace(wheel, url=index.join(wheel.url))
            for wheel in release_wheels(release, lock, text, tags, default_environment())
        ]
        marker = Marker(
            name=name,
            folder=str(folder),
            index=index.address,
            python=PYTHON,
            key=key,
            packages={wheel.project: wheel.version for wheel in wheels},
            channel=index.states[name].channel,
            wheels={wheel.project: wheel.sha256 for wheel in wheels},
            packs={pack.key.recipe: pack.size for pack in release.packs},
        )
        with locked_folder(cache):
            checked, replaced = prepare_wheels(
                prefix,
                cache,
                wheels,
                edits=release.edits,
                overlays=release.overlays,
                inexact=release.inexact_records,
            )
        if dry_run:
            return _result(prefix, "would install", before, marker)
        replaced |= {CANARY: canary} if (canary := _canary(index, release, marker)) else {}
        make_current(prefix, cache, marker, checked, replaced)
        return _result(prefix, "installed", before, marker)


def make_current(
    prefix: Prefix,
    cache: Path,
    marker: Marker,
    wheels: Sequence[CheckedWheel],
    replaced: Mapping[str, bytes],
) -> None:
    """
    Make the environment of *marker* from *wheels*, and let ``current`` lead to it.

    Args:
        replaced: Files that are written after the installation, by path below the environment.

    Raises:
        environment-broken, command-failed, disk-full: It could not be made, and was removed.
    """
    folder = prefix.environment_folder(marker.name)
    replaced = {**replaced, "caches.env": _shell_variables(process.cache_variables(folder))}
    new = prefix.work_folder() / marker.name
    try:
        with console.step(f"installing into {folder}"):
            listing = msgspec.json.encode(_make(new, cache, wheels, replaced))
            write_file(new / LISTING, listing)
            marker = msgspec.structs.replace(marker, listing=sha256_bytes(listing))
            write_file(new / MARKER, msgspec.json.encode(marker))
        with prefix.switching():
            new.rename(folder)
            prefix.switch(marker.name)
    finally:
        prefix.remove_work_folders()


def _make(
    folder: Path,
    cache: Path,
    wheels: Sequence[CheckedWheel],
    replaced: Mapping[str, bytes],
) -> dict[str, FileState]:
    """
    Make the environment in *folder*, which does not exist, and return its files. The files with
    which it was made, whose names begin with a dot, stay beside *folder*.

    It may be moved: its programs find their Python beside them.

    Args:
        cache: The folder of uv's cache and of the log.
        replaced: Files that are written after the installation, by path below the environment.

    Raises:
        command-failed: uv failed. environment-broken: What it wrote is not what the wheels hold.
        disk-full: There is no room.
    """
    log = own_folder(cache, "logs") / "install.log"
    log.unlink(missing_ok=True)
    variables = process.uv_environment(UV_CACHE_DIR=str(own_folder(cache, "uv")), UV_OFFLINE="1")
    uv = functools.partial(process.run, log=log, env=variables)
    base = sys._base_executable  # type: ignore[attr-defined]
    uv([find_uv_bin(), "venv", "--relocatable", "--quiet", "--python", base, folder])
    empty = environment.describe(folder, contents=False).keys() | {".lock"}
    lock = folder.with_name(".requirements.txt")
    with lock.open("w") as stream:
        for wheel in wheels:
            address, sha256 = wheel.path.as_uri(), wheel.wheel.sha256
            stream.write(f"{wheel.project} @ {address} --hash=sha256:{sha256}\n")
    options = ["--require-hashes", "--no-build", "--link-mode", "hardlink"]
    uv([find_uv_bin(), "pip", "sync", "--python", folder / "bin/python", *options, lock])
    for file, data in replaced.items():
        write_file(folder / file, data)
    own_folder(folder, process.CACHES)
    actual = environment.describe(folder)
    _compare_with_wheels(folder, cache, wheels, replaced, empty, actual)
    for file in actual:
        # uv links one file into several releases, so an edit would change all of them.
        if not (folder / file).is_symlink():
            (folder / file).chmod((folder / file).stat().st_mode & ~0o222)
    return actual


def _compare_with_wheels(
    folder: Path,
    cache: Path,
    wheels: Sequence[CheckedWheel],
    replaced: Mapping[str, bytes],
    empty: set[str],
    actual: Mapping[str, FileState],
) -> None:
    """Raise `environment-broken` unless *folder* holds exactly what the wheels do."""
    expected, scripts, others = dict[str, str](), set[str](), set(empty)
    for wheel in wheels:
        for file, (_, sha256, _) in wheel.files.items():
            expected[file] = sha256
        scripts |= wheel.scripts
        for file in INSTALLER_FILES:
            others.add(f"{wheel.info}/{file}")
    for file, data in replaced.items():
        expected[file] = sha256_bytes(data)
    wrong = [
        file
        for file, sha256 in expected.items()
        if file not in actual or actual[file].sha256 != sha256
    ]
    wrong += sorted(actual.keys() - expected.keys() - others - scripts)
    wrong += sorted(scripts - actual.keys())
    if wrong:
        # A file of an environment is a link into uv's cache, so a change of it is one of both.
        shutil.rmtree(own_folder(cache, "uv"), ignore_errors=True)
        raise ClientError(
            "environment-broken",
            f"What was installed in {folder} is not what the wheels hold.",
            details=wrong[:20],
            todo="Run it again: it begins with an empty cache.",
        )


def add_packs(prefix: Prefix, cache: Path, index: Index, recipe: str) -> list[WarmPack]:
    """
    Bring the warm packs for *recipe* to the current release, as the archives that are signed;
    `serve` unpacks the one that was made for the machine. They go when the release goes.

    Raises:
        nothing-installed: There is no current release.
        pack-foreign: That is from another index, or the packs are not for its wheels.
        pack-unknown: The release has none for *recipe*.
        download-invalid, index-damaged, index-unreachable, disk-full: As `locked_wheels.obtain`.
    """
    with prefix.locked():
        marker = prefix.marker(prefix.current)
        if not marker:
            raise ClientError("nothing-installed", f"{prefix.root} has no current release.")
        if marker.index != index.address:
            raise ClientError(
                "pack-foreign",
                f"{marker.name} was not installed from {index}.",
                details=[f"but from {marker.index}"],
            )
        offered = index.release(marker.name).packs
        packs, wheels = list[WarmPack](), list[LockedWheel]()
        for pack in offered:
            if pack.key.recipe != recipe:
                continue
            if others := sorted(pack.key.wheels.items() - marker.wheels.items()):
                raise ClientError(
                    "pack-foreign",
                    f"The warm pack {pack.name} was made with other wheels.",
                    details=[project for project, _ in others],
                )
            packs.append(pack)
            url = index.join(pack.url or pack.path)
            wheels.append(LockedWheel(recipe, "", pack.name, url, pack.sha256, pack.size))
        if not packs:
            raise ClientError(
                "pack-unknown",
                f"{marker.name} has no warm pack for {recipe!r:.80}.",
                details=sorted({f"for {pack.key.recipe}" for pack in offered}),
            )
        folder = own_folder(prefix.environment_folder(marker.name), process.CACHES, PACKS)
        with locked_folder(cache), translate_disk_full(folder):
            remove_unfinished(folder)
            for pack, path in zip(packs, locked_wheels.obtain(cache, wheels), strict=True):
                with replacing(folder / pack.sha256) as temporary:
                    shutil.copyfile(path, temporary)
                    flush(temporary)
                # The record is written last: without it the archive does not count.
                write_file(folder / f"{pack.sha256}.json", msgspec.json.encode(pack))
    return packs


def _canary(index: Index, release: Release, marker: Marker) -> bytes:
    """Return what a server of the installed vLLM must answer; empty if no gate recorded it."""
    for wheel in release.wheels:
        if wheel.proof.canary and wheel.sha256 == marker.wheels.get("vllm"):
            return index.read(wheel.proof.canary, LARGEST_RELEASE)
    return b""


def _shell_variables(values: Mapping[str, str]) -> bytes:
    """Return *values* as a file that shells and systemd read."""
    text = ""
    for name, value in values.items():
        # These four have a meaning in double quotes.
        quoted = re.sub(r'(["$`\\])', r"\\\1", value)
        text += f'{name}="{quoted}"\n'
    return os.fsencode(text)


def _result(prefix: Prefix, state: str, before: Marker | None, after: Marker) -> dict[str, Any]:
    """Return the document of what was done, with the packages that differ from before."""
    old = before.packages.items() if before else set()
    new = after.packages.items()
    return {
        "name": after.name,
        "state": state,
        "folder": str(prefix.environment_folder(after.name)),
        "added": list(map(" ".join, sorted(new - old))),
        "removed": list(map(" ".join, sorted(old - new))),
        "unchanged": len(new & old),
    }


def release_wheels(
    release: Release, lock: ReleaseLock, text: bytes, tags: Sequence[Tag], environment: Environment
) -> tuple[LockedWheel, ...]:
    """
    Return the wheels of the set that *lock*, whose file is *text*, selects; the addresses may be
    relative to the root of the index.

    Args:
        tags: The wheel tags that a Python accepts, best first.
        environment: The values of environment markers (PEP 508).

    Raises:
        lock-invalid, release-unknown: See `locked_wheels`. set-mixed: Lock and release disagree.
    """
    what = f"the lock of {release.name}"
    selected = locked_wheels.select(locked_wheels.read(text, what), tags, environment, what)
    machines = (environment["platform_machine"], "any")
    own = {wheel.project: wheel for wheel in release.wheels if wheel.machine in machines}
    wrong, wheels = list[str](), list[LockedWheel]()
    for wheel in selected:
        ours, url, size = own.pop(wheel.project, None), wheel.url, wheel.size
        if lock.packages.get(wheel.project) != wheel.version:
            wrong.append(f"{wheel.project} {wheel.version}")
        if ours:
            url, size = ours.url or ours.path, ours.size
            if (ours.name, ours.sha256) != (wheel.name, wheel.sha256):
                wrong.append(
                    f"{wheel.name} {wheel.sha256[:12]}, not {ours.name} {ours.sha256[:12]}"
                )
        wheels.append(msgspec.structs.replace(wheel, url=url, size=size))
    if wrong := [*own, *wrong]:
        raise ClientError(
            "set-mixed",
            f"The lock of {release.name} does not belong to the release.",
            details=wrong[:20],
        )
    return tuple(wheels)


def prepare_wheels(
    prefix: Prefix,
    cache: Path,
    wheels: Sequence[LockedWheel],
    *,
    edits: Sequence[FileEdit],
    overlays: Sequence[Overlay],
    inexact: Collection[str],
) -> tuple[list[CheckedWheel], dict[str, bytes]]:
    """
    Bring the *wheels* of a set into *cache*, whose lock is held, check all that can be known of
    them, and return them with the files that overlays and edits replace.

    Args:
        inexact: Projects whose RECORD may disagree with their members.

    Raises:
        As `locked_wheels.obtain` and `locked_wheels.check_set`; and edit-mismatch.
    """
    paths = locked_wheels.obtain(cache, wheels)

    def check(wheel: LockedWheel, path: Path) -> CheckedWheel:
        return locked_wheels.check_wheel(wheel, path, SITE, inexact=wheel.project in inexact)

    with console.step(f"checking {len(wheels)} wheels"), ThreadPoolExecutor(8) as pool:
        checked = list(pool.map(check, wheels, paths))
        locked_wheels.check_set(checked, overlays)
        replaced = dict[str, bytes]()
        for _, upper, files in locked_wheels.overlaid(checked, overlays):
            for file in files:
                replaced[file] = locked_wheels.read_member(upper, file)
        replaced |= locked_wheels.edited(checked, edits, SITE)
    # uv links from its cache, which has the files of a wheel that is installed.
    held = {sha256 for marker in prefix.installed().values() for sha256 in marker.wheels.values()}
    new, size = 0, 0
    for wheel in checked:
        size += wheel.size
        new += wheel.size if wheel.wheel.sha256 not in held else 0
    check_room(cache, new)
    check_room(prefix.root, new if cache.stat().st_dev == prefix.root.stat().st_dev else size)
    return checked, replaced


def find_changes(prefix: Prefix, name: str, *, deep: bool = False) -> list[str]:
    """
    Return what differs in the environment *name* from how it was made.

    Nothing in it is run, and no RECORD is believed.

    Args:
        deep: Read every file, instead of its size and time.
    """
    folder, marker = prefix.environment_folder(name), prefix.marker(name)
    expected = prefix.listing(name)
    if not marker or not expected:
        return ["it is not whole, or not an environment of sparkwright"]
    if marker.folder != str(folder):
        return [f"it was made for {marker.folder}"]
    actual = environment.describe(folder, contents=deep)
    state = operator.attrgetter("sha256") if deep else operator.attrgetter("size", "time")
    listed, present = expected.keys() - {".lock"}, actual.keys() - {MARKER, LISTING, ".lock"}
    changed = (file for file in listed & present if state(actual[file]) != state(expected[file]))
    return [
        *([] if (folder / "bin/python").exists() else [f"its Python {marker.python} is gone"]),
        *(f"added: {file}" for file in sorted(present - listed) if "__pycache__/" not in file),
        *(f"removed: {file}" for file in sorted(listed - present)),
        *(f"changed: {file}" for file in sorted(changed)),
    ]


def _require_unchanged(prefix: Prefix, name: str) -> None:
    """Raise `environment-broken` if the environment *name* was changed."""
    if changes := find_changes(prefix, name):
        raise ClientError(
            "environment-broken",
            f"{prefix.environment_folder(name)} was changed.",
            details=changes[:20],
        )


def _switch(
    prefix: Prefix, name: str, *, back: Sequence[str] = (), dry_run: bool = False
) -> dict[str, Any]:
    """Let ``current`` lead to an environment that is there; raise if it was changed."""
    _require_unchanged(prefix, name)
    before, after = prefix.marker(prefix.current), prefix.marker(name)
    assert after
    if dry_run:
        return _result(prefix, "would switch", before, after)
    prefix.switch(name, back=back)
    return _result(prefix, "switched", before, after)


def rollback(
    prefix: Prefix, *, confirmed: bool, yanked: Callable[[Prefix, Marker], str]
) -> dict[str, Any]:
    """
    Let ``current`` lead to the release that was current before.

    Args:
        confirmed: Go back to a release that was yanked, too.
        yanked: Returns why a release was yanked, as far as that is known.

    Raises:
        nothing-installed: There is no earlier release. release-yanked: It was yanked since.
        environment-broken: It was changed.
    """
    with prefix.switching():
        history = prefix.history
        while history and (history[-1] == prefix.current or not prefix.marker(history[-1])):
            history.pop()
        marker = prefix.marker(history[-1]) if history else None
        if not marker:
            raise ClientError("nothing-installed", f"{prefix.root} has no earlier release.")
        name = marker.name
        if reason := yanked(prefix, marker):
            console.warn(f"{name} was yanked: {reason}")
            if not confirmed:
                raise ClientError(
                    "release-yanked",
                    f"{name}: {reason}",
                    todo="Go back to it with --yes, or install another release.",
                )
        return _switch(prefix, name, back=history)


def uninstall(prefix: Prefix, name: str) -> str:
    """
    Remove the release *name*, by default the current one, and return its name.

    Raises:
        nothing-installed: It is not installed.
        release-in-use: A process runs in it.
    """
    with prefix.locked():
        prefix.remove_work_folders()
        name = name or prefix.current
        if name not in prefix.environments():
            named = f"release {name!r:.120}" if name else "current release"
            raise ClientError("nothing-installed", f"{prefix.root} has no {named}.")
        if processes := ", ".join(_processes_in(prefix.environment_folder(name))):
            raise ClientError("release-in-use", f"Processes of {name} run: {processes}.")
        prefix.remove(name)
    return name


def _processes_in(folder: Path) -> Iterator[str]:
    """
    Yield the numbers of this user's processes that were started from *folder*, have loaded a file
    of it, or work in it.
    """
    inside = os.fsencode(f"{folder.resolve()}/")
    for running in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            maps, command = (running / "maps").read_bytes(), (running / "cmdline").read_bytes()
            directory = os.fsencode(f"{(running / 'cwd').readlink()}/")
            if b" " + inside in maps or directory.startswith(inside) or command.startswith(inside):
                yield running.name
