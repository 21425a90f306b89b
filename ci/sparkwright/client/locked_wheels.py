"""
The wheels of a locked set (``pylock.toml``, PEP 751): how they come into the user's cache, and what
is checked before anything is created.

A lock is read as hostile: only wheels with a sha256 at an address are accepted; archives,
directories, repositories, extras and whatever else the format has are refused. Wheels are known by
hash alone: a cached file is hashed again, and uv hashes every wheel that it unpacks. The wheels of
an index in a folder are used in place.

A wheel is hostile, although it is known by hash: its members may leave their folder, be more than
the archive admits to, belong to another project, or replace what an environment is made of. What
an installer would write is known afterwards, file by file with its sha256, so that an environment
can be compared with it.
"""

import configparser
import functools
import hashlib
import itertools
import os
import re
import threading
import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from email.parser import HeaderParser
from pathlib import Path
from urllib.parse import unquote, urlsplit
from zipfile import ZipInfo

import msgspec
from packaging.markers import Environment, UndefinedComparison, UndefinedEnvironmentName
from packaging.pylock import PackageWheel, Pylock, PylockSelectError, PylockValidationError
from packaging.tags import Tag
from packaging.utils import canonicalize_name

from sparkwright.client import ClientError
from sparkwright.client.folders import check_room, own_folder
from sparkwright.client.records import FileEdit, Overlay
from sparkwright.core import files, http, zips
from sparkwright.core.console import console
from sparkwright.core.errors import WheelError
from sparkwright.core.process import CACHES
from sparkwright.core.store import flush

#: Transfers at once, and seconds for all files of a set together: 12 GB at 1 MB/s.
CONNECTIONS, SECONDS = 8, 12_000.0

#: What a status or a kind of failure of a download means.
_REFERENCES: dict[int | str, str] = {
    404: "index-damaged",
    410: "index-damaged",
    "broken": "download-invalid",
    "redirect": "download-invalid",
    "size": "download-invalid",
}
#: No file name has more than 255 bytes, and while it arrives, ``.part`` follows.
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+!-]{0,245}\.whl")
_SHA256 = re.compile(r"[0-9a-f]{64}")

_EMPTY = hashlib.sha256().hexdigest()

_SCRIPT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]{0,254}")
_OBJECT = re.compile(r"[\w.]+(\s*:\s*[\w.]+)?(\s*\[[\w\s,.-]*\])?")
#: Programs of the environment itself.
_RESERVED_SCRIPT = re.compile(r"python[0-9.]*[tw]*|(de)?activate\b.*|pydoc\b.*", re.IGNORECASE)
#: Folders of data: neither those of the environment itself, nor a name that a file of it has.
_DATA_FOLDER = re.compile(rf"(?!(bin|lib64|{CACHES})$)[A-Za-z0-9_-]+")
#: Programs that install, which only their own projects have.
_INSTALLER = re.compile(r"(pip|uv)x?[0-9.]*", re.IGNORECASE)
#: Bytes of METADATA, WHEEL and entry_points.txt: their parsers take far more than a reader.
_LARGEST_TEXT = 4 << 20
#: Modules that Python imports when it starts.
_STARTUP = re.compile(r"(sitecustomize|usercustomize|_virtualenv)(\.[^/]*)?")


class LockedWheel(msgspec.Struct, frozen=True, order=True):
    """
    A wheel of a locked set.

    Attributes:
        project: The normalised name.
        url: Absolute, or relative to the root of the index.
        size: In bytes; 0 if the lock does not state it.
    """

    project: str
    version: str
    name: str
    url: str
    sha256: str
    size: int = 0


def read(data: bytes, what: str) -> Pylock:
    """
    Return the lock in *data*; *what* names it in messages.

    Raises:
        lock-invalid: It is not one, or holds something else than wheels with hashes and addresses.
    """
    faults = list[str]()
    try:
        lock = Pylock.from_dict(tomllib.loads(data.decode("utf-8")))
        for package in lock.packages:
            source = package.sdist or package.is_direct or package.version is None
            if source or not package.wheels or not all(map(_is_usable, package.wheels)):
                faults.append(
                    f"{package.name}: not wheels alone, or one without version, name, sha256 or "
                    "usable address"
                )
    except (ValueError, PylockValidationError, RecursionError, TypeError, AttributeError) as error:
        raise ClientError(
            "lock-invalid", f"{what} is no pylock.toml.", details=[str(error)[:1000]]
        ) from error
    if lock.extras or lock.dependency_groups or lock.default_groups:
        faults.append("it leaves a choice: extras or groups")
    if faults:
        raise ClientError(
            "lock-invalid", f"{what} is no lock of wheels with hashes.", details=faults[:20]
        )
    return lock


def _is_usable(wheel: PackageWheel) -> bool:
    """Return whether *wheel* has a sha256, and an address without credentials on a server."""
    address = urlsplit(wheel.url or "")
    inside = not address.netloc and ".." not in re.split(r"[/\\]", address.path)
    return bool(
        _SHA256.fullmatch(wheel.hashes.get("sha256", ""))
        and wheel.url
        and not wheel.path
        and _FILE.fullmatch(wheel.filename)
        and (address.scheme in ("https", "http") or (not address.scheme and inside))
        and not (address.username or address.password)
        and (wheel.size or 0) >= 0
    )


def select(
    lock: Pylock, tags: Sequence[Tag], markers: Environment, what: str
) -> tuple[LockedWheel, ...]:
    """
    Return one wheel of each package that the lock selects for a Python, by project.

    Args:
        tags: The wheel tags that this Python accepts, best first.
        markers: The values of environment markers (PEP 508).

    Raises:
        release-unknown: The lock is not for this Python, or has no wheel of a package for it.
    """
    try:
        chosen = list(lock.select(environment=markers, tags=list(tags)))
    except (PylockSelectError, UndefinedComparison, UndefinedEnvironmentName, KeyError) as error:
        raise ClientError(
            "release-unknown",
            f"{what} has no set for Python {markers.get('python_full_version')} on this machine.",
            details=[str(error)],
            todo="Run the client with another; `sparkwright list` shows those that it is for.",
        ) from error
    return tuple(
        sorted(
            LockedWheel(
                canonicalize_name(package.name),
                str(package.version),
                wheel.filename,
                wheel.url or "",
                wheel.hashes["sha256"],
                wheel.size or 0,
            )
            for package, wheel in chosen
            if isinstance(wheel, PackageWheel)
        )
    )


def obtain(cache: Path, wheels: Sequence[LockedWheel]) -> list[Path]:
    """
    Return where each of *wheels* lies; their addresses are absolute, and the lock of *cache* is
    held.

    Raises:
        download-invalid: Other bytes arrived. index-damaged: A file does not exist, or is not the
            one that the index names.
        index-unreachable: A server does not answer, or is too slow. disk-full: There is no room.
    """
    stopped, arrived, missing, size, present = threading.Event(), Counter[str](), [], 0, 0
    with ThreadPoolExecutor(CONNECTIONS) as pool:
        paths = [_path(cache, wheel) for wheel in wheels]
        valid = pool.map(_is_valid, wheels, paths)
        for wheel, path, good in zip(wheels, paths, valid, strict=True):
            part = path.with_name(f"{path.name}.part")
            if not good:
                missing.append((wheel, path))
                size += wheel.size
                present += part.stat().st_size if part.is_file() else 0
        check_room(cache, size - present)
        with console.progress("wheels", size, "bytes") as line:

            def advance(wheel: LockedWheel, count: int, _total: int) -> None:
                arrived[wheel.sha256] = count
                line.update(arrived.total(), wheel.name)

            futures = [pool.submit(_download, *pair, advance, stopped) for pair in missing]
            try:
                for future in as_completed(futures, SECONDS):
                    future.result()
            except TimeoutError as error:
                raise ClientError(
                    "index-unreachable", f"Not every wheel arrived within {SECONDS:g} s."
                ) from error
            finally:
                stopped.set()
                pool.shutdown(wait=False, cancel_futures=True)
    return paths


def _path(cache: Path, wheel: LockedWheel) -> Path:
    address = urlsplit(wheel.url)
    if address.scheme == "file":
        return Path(unquote(address.path))
    return own_folder(cache, "wheels", wheel.sha256) / wheel.name


def _is_valid(wheel: LockedWheel, path: Path) -> bool:
    local = urlsplit(wheel.url).scheme == "file"
    regular = path.is_file() and (local or not path.is_symlink())
    # A file with holes could be larger than any disk.
    sized = regular and wheel.size in (0, path.stat().st_size)
    if sized and files.sha256_file(path) == wheel.sha256:
        return True
    if local:
        raise ClientError("index-damaged", f"{path} is not the file that the index names.")
    path.unlink(missing_ok=True)
    return False


def _download(
    wheel: LockedWheel,
    path: Path,
    on_progress: Callable[[LockedWheel, int, int], None],
    stopped: threading.Event,
) -> None:
    """Download *wheel* to *path*."""
    partial = path.with_name(f"{path.name}.part")
    if partial.is_symlink() or (partial.exists() and partial.stat().st_nlink > 1):
        partial.unlink()
    try:
        arrived = http.download(
            wheel.url,
            partial,
            wheel.sha256,
            size=wheel.size,
            on_progress=functools.partial(on_progress, wheel),
            stopped=stopped,
        )
    except http.HttpFailure as failure:
        raise ClientError(
            _REFERENCES.get(failure.status or failure.kind, "index-unreachable"),
            f"{http.redact_credentials(wheel.url)} cannot be downloaded.",
            details=[str(failure)],
        ) from None
    if arrived != wheel.sha256:
        raise ClientError(
            "download-invalid",
            f"{wheel.name} arrived with other bytes than the signed release names.",
            details=[f"expected: {wheel.sha256}", f"arrived:  {arrived}"],
        )
    os.replace(partial, path)
    flush(path.parent)


# Checks.


class CheckedWheel(msgspec.Struct, frozen=True):
    """
    What an installer writes for a wheel.

    Attributes:
        path: Where the wheel lies.
        files: Path below the environment → member, sha256 and size.
        scripts: Paths of programs, whose bytes the installer makes.
        info: Path of the ``.dist-info`` folder, in which the installer writes files of its own.
    """

    wheel: LockedWheel
    path: Path
    files: dict[str, tuple[str, str, int]]
    scripts: frozenset[str]
    info: str

    @property
    def project(self) -> str:
        """The project of the wheel."""
        return self.wheel.project

    @property
    def size(self) -> int:
        """The unpacked size, in bytes."""
        return sum(size for _, _, size in self.files.values())


def check_wheel(
    wheel: LockedWheel, path: Path, site: str, *, inexact: bool = False
) -> CheckedWheel:
    """
    Return what an installer writes for the wheel at *path*.

    Args:
        site: The site-packages folder below the environment, such as
            ``lib/python3.12/site-packages``.
        inexact: Whether RECORD may state other bytes than those of the members.

    Raises:
        wheel-invalid: It is damaged, lacks METADATA, WHEEL or RECORD, or RECORD and the members
            disagree.
        wheel-mismatch: It is of another project or version than the lock states.
        wheel-unsafe, archive-unsafe: A file would land outside of the places for packages.
    """
    with zips.zip_file(path) as archive:
        members = zips.zip_members(archive, wheel.name)
        info, texts = zips.info_folder(members, wheel.name), {}
        for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt"):
            limit = files.LARGEST if name == "RECORD" else _LARGEST_TEXT
            if name != "entry_points.txt" or f"{info}/{name}" in members:
                with archive.guard():
                    data = zips.member_text(archive, members, f"{info}/{name}", limit)
                    texts[name] = data.decode("utf-8")
        _check_metadata(wheel, info, texts["METADATA"], texts["WHEEL"])
        scripts = set(_entry_points(wheel, texts.get("entry_points.txt", "")))
        targets: dict[str, tuple[str, str, int]] = {}
        rows = _contents(wheel, archive, members, info, texts["RECORD"], inexact=inexact)
        for name, sha256, size in rows:
            target = _target(wheel, name, info.removesuffix(".dist-info"), site)
            if target in targets or target in scripts:
                raise _unsafe(wheel.name, "has two files for one place", name)
            if target.startswith("bin/"):
                scripts.add(target)
            elif name != f"{info}/RECORD":
                targets[target] = (name, sha256, size)
    return CheckedWheel(wheel, path, targets, frozenset(scripts), f"{site}/{info}")


def _unsafe(name: str, what: str, *members: str) -> WheelError:
    return WheelError(
        "wheel-unsafe", f"{name} {what}.", details=[f"member: {member!r}" for member in members]
    )


def _invalid(wheel: LockedWheel, what: str, *details: str) -> WheelError:
    return WheelError("wheel-invalid", f"{wheel.name} {what}.", details=details)


def _check_metadata(wheel: LockedWheel, info: str, metadata: str, format_text: str) -> None:
    """Raise unless the format of the wheel is known, and it is of the locked project inside."""
    version = HeaderParser().parsestr(format_text).get("Wheel-Version", "")
    if not version.startswith("1."):
        raise _invalid(wheel, "is not of version 1 of the wheel format", version)
    fields = HeaderParser().parsestr(metadata)
    names, versions = fields.get_all("Name", []), fields.get_all("Version", [])
    if len(names) != 1 or len(versions) != 1:
        raise _invalid(wheel, "does not state its name and version once")
    folder, _, stated = info.removesuffix(".dist-info").rpartition("-")
    for name, version in ((folder, stated), (names[0], versions[0])):
        if not zips.is_release(name, version, wheel.project, wheel.version):
            raise WheelError(
                "wheel-mismatch",
                f"{wheel.name} is {name!r:.100} {version!r:.100} inside.",
                details=[f"expected: {wheel.project} {wheel.version}"],
            )


def _contents(
    wheel: LockedWheel,
    archive: zips.Archive,
    members: Mapping[str, ZipInfo],
    info: str,
    record: str,
    *,
    inexact: bool,
) -> Iterator[tuple[str, str, int]]:
    """Yield every member with its sha256 and size, which *record* must state unless *inexact*."""
    rows = zips.record_rows(record, wheel.name)
    if sorted(row.name for row in rows) != sorted(members):
        raise _invalid(wheel, "has a RECORD that does not list each member once")
    for row in rows:
        name, stated = row.name, row.sha256
        if not stated and (row.digest or name != f"{info}/RECORD"):
            raise _invalid(wheel, "has a RECORD without sha256", name)
        actual = members[name].file_size
        with archive.guard(), archive.open(members[name]) as stream:
            # It has readinto, which its type does not say.
            sha256 = hashlib.file_digest(stream, "sha256").hexdigest()  # type: ignore[arg-type]
        if not inexact and (row.size not in ("", str(actual)) or stated not in ("", sha256)):
            raise _invalid(wheel, "holds other bytes than its RECORD states", name)
        yield name, sha256, actual


def _entry_points(wheel: LockedWheel, text: str) -> Iterator[str]:
    """Yield the paths of the programs that the installer makes for the entry points in *text*."""
    parser = configparser.ConfigParser(delimiters="=", interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]  # names differ by case
    try:
        parser.read_string(text)
    except configparser.Error as error:
        raise _invalid(wheel, "has no readable entry_points.txt", str(error)[:300]) from error
    for section in ("console_scripts", "gui_scripts"):
        for name, value in parser.items(section) if parser.has_section(section) else ():
            if not _OBJECT.fullmatch(value.strip()):
                raise _unsafe(
                    wheel.name, "has an entry point that is no object", f"{name} = {value}"
                )
            yield _script(wheel, name)


def _script(wheel: LockedWheel, name: str) -> str:
    """Return the path of the program *name*."""
    installer = _INSTALLER.fullmatch(name)
    own = not installer or installer[1] == wheel.project
    if not own or not _SCRIPT.fullmatch(name) or _RESERVED_SCRIPT.fullmatch(name):
        raise _unsafe(wheel.name, "would install a program under a name that is not its own", name)
    return f"bin/{name}"


def _target(wheel: LockedWheel, member: str, stem: str, site: str) -> str:
    """Return where *member* is installed, below the environment."""
    top, _, rest = member.partition("/")
    scheme, _, name = rest.partition("/")
    if not top.endswith(".data"):
        scheme, name = "platlib", member
    elif top != f"{stem}.data" or not name or ".dist-info/" in name or ".data/" in name:
        raise _unsafe(wheel.name, "has a file in .data that is not its own", member)
    first, _, below = name.partition("/")
    if scheme in ("purelib", "platlib"):
        if _STARTUP.fullmatch(first):
            raise _unsafe(wheel.name, "has a module that Python imports when it starts", member)
        return f"{site}/{name}"
    if scheme == "headers":
        return f"include/site/{site.split('/')[1]}/{wheel.project}/{name}"
    if scheme == "scripts" or (scheme == "data" and name.startswith("bin/")):
        return _script(wheel, name.removeprefix("bin/"))
    # A folder of its own; not what the environment is made of, such as pyvenv.cfg or packages.
    packages = first == "lib" and below.startswith("python")
    if scheme == "data" and below and _DATA_FOLDER.fullmatch(first) and not packages:
        return name
    raise _unsafe(wheel.name, "would install a file outside of the places for data", member)


def check_set(wheels: Sequence[CheckedWheel], overlays: Sequence[Overlay]) -> None:
    """
    Raise if wheels would write into each other's packages.

    Equal files are allowed, and what *overlays* states: exactly so many files of one project over
    those of another.

    Raises:
        wheel-unsafe: Two wheels have other bytes for one file, a file lies where another wheel
            needs a folder, or a wheel puts files into a package of another one.
        set-mixed: An overlay replaces another number of files.
    """
    allowed = {frozenset((overlay.upper, overlay.lower)) for overlay in overlays}
    owners = defaultdict[str, dict[str, str]](dict)
    for wheel in wheels:
        for target, (_, sha256, _) in wheel.files.items():
            owners[target][wheel.project] = sha256
        # The bytes of a program are not known, so no other project may have it.
        for target in wheel.scripts:
            owners[target][wheel.project] = wheel.project
    packages: dict[str, set[str]] = {}
    for target, holders in owners.items():
        for first, other in itertools.combinations(holders, 2):
            if holders[first] != holders[other] and frozenset((first, other)) not in allowed:
                raise _unsafe(first, f"and {other} have different files in one place", target)
        folder, _, name = target.rpartition("/")
        if name == "__init__.py" and _EMPTY not in holders.values():
            packages[folder] = set(holders)
    for target, holders in owners.items():
        for folder in zips.folders_above(target):
            if folder in owners:
                raise _unsafe(
                    next(iter(holders)), "needs a folder where another has a file", target
                )
            inside = packages.get(folder, set())
            for owner, project in itertools.product(inside, holders.keys() - inside):
                if frozenset((owner, project)) not in allowed:
                    raise _unsafe(project, f"puts a file into a package of {owner}", target)
    for overlay, upper, shared in overlaid(wheels, overlays):
        if len(shared) != overlay.files:
            raise ClientError(
                "set-mixed",
                f"{upper.project} replaces {len(shared)} files of {overlay.lower};"
                f" the release states {overlay.files}.",
            )


def overlaid(
    wheels: Sequence[CheckedWheel], overlays: Sequence[Overlay]
) -> Iterator[tuple[Overlay, CheckedWheel, set[str]]]:
    """
    Yield each of *overlays* of which both projects are there, with the upper wheel and the files
    that both have.
    """
    by_project = {wheel.project: wheel for wheel in wheels}
    for overlay in overlays:
        upper, lower = by_project.get(overlay.upper), by_project.get(overlay.lower)
        if upper and lower:
            yield overlay, upper, upper.files.keys() & lower.files.keys()


def edited(
    wheels: Sequence[CheckedWheel], edits: Sequence[FileEdit], site: str
) -> dict[str, bytes]:
    """
    Return the files that *edits* change, as they are afterwards, by path below the environment.

    Raises:
        edit-mismatch: The wheel of the set does not hold the file for which an edit was made, or it
            becomes another file than the edit states.
    """
    by_project = {wheel.project: wheel for wheel in wheels}
    results: dict[str, bytes] = {}
    for edit in edits:
        wheel, target = by_project.get(edit.package), f"{site}/{edit.file}"
        sha256 = wheel.files[target][1] if wheel and target in wheel.files else ""
        fits = target not in results and sha256 == edit.before
        data = read_member(wheel, target) if wheel and fits else b""
        for change in edit.changes:
            # Once: an anchor that is everywhere could fill the memory.
            data = data.replace(change.anchor.encode(), change.replacement.encode(), 1)
        if not fits or files.sha256_bytes(data) != edit.after:
            raise ClientError(
                "edit-mismatch",
                f"{edit.name}: {edit.file} of {edit.package} is not the file to edit.",
                details=[f"expected: {edit.before}", f"afterwards: {edit.after}"],
            )
        results[target] = data
    return results


def read_member(wheel: CheckedWheel, target: str) -> bytes:
    """Return the bytes that *wheel* has for *target*; raise `wheel-invalid` if they changed."""
    member, sha256, _ = wheel.files[target]
    with zips.zip_file(wheel.path) as archive:
        data = archive.read(member)
    if files.sha256_bytes(data) != sha256:
        raise _invalid(wheel.wheel, "was changed since it was checked", member)
    return data
