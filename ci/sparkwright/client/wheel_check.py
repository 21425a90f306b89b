"""
Check the wheels of a set, before anything is created.

A wheel is hostile, although it is known by hash: its members may leave their folder, be more than
the archive admits to, belong to another project, or replace what an environment is made of. What
an installer would write is known afterwards, file by file with its sha256, so that an environment
can be compared with it.
"""

from __future__ import annotations

import base64
import configparser
import csv
import hashlib
import io
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from sparkwright.client.errors import ClientError
from sparkwright.client.locked_wheels import LockedWheel
from sparkwright.client.records import FileEdit, Overlay
from sparkwright.core import files, zips
from sparkwright.core.errors import WheelError
from sparkwright.core.process import CACHES

_EMPTY = hashlib.sha256().hexdigest()

_SHA256 = re.compile(r"sha256=([A-Za-z0-9_-]{43})")
_SCRIPT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]{0,254}")
_OBJECT = re.compile(r"[\w.]+(\s*:\s*[\w.]+)?(\s*\[[\w\s,.-]*\])?")
#: Programs of the environment itself.
_RESERVED_SCRIPT = re.compile(r"python[0-9.]*[tw]*|(de)?activate\b.*|pydoc\b.*", re.IGNORECASE)
#: Folders of data: neither those of the environment itself, nor a name that a file of it has.
_DATA_FOLDER = re.compile(rf"(?!(bin|lib64|{CACHES})$)[A-Za-z0-9_-]+")
#: Programs that install, which only their own projects have.
_INSTALLER = re.compile(r"(pip|uv)x?[0-9.]*", re.IGNORECASE)
#: Modules that Python imports when it starts.
_STARTUP = re.compile(r"(sitecustomize|usercustomize|_virtualenv)(\.[^/]*)?")


class CheckedWheel(msgspec.Struct, frozen=True):
    """
    What an installer writes for a wheel.

    Attributes:
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
        info = _dist_info(wheel, members)
        _check_metadata(wheel, archive, members, info)
        rows = dict(_contents(wheel, archive, members, info, inexact=inexact))
        scripts = set(_entry_points(wheel, archive, members, info))
    places: dict[str, tuple[str, str, int]] = {}
    for member, (sha256, size) in rows.items():
        target = _target(wheel, member, info.removesuffix(".dist-info"), site)
        if target in places or target in scripts:
            raise _unsafe(wheel, "has two files for one place", member)
        if target.startswith("bin/"):
            scripts.add(target)
        elif member != f"{info}/RECORD":
            places[target] = (member, sha256, size)
    return CheckedWheel(wheel, path, places, frozenset(scripts), f"{site}/{info}")


def _unsafe(wheel: LockedWheel, what: str, *details: str) -> WheelError:
    lines = [f"member: {detail!r}" for detail in details]
    return WheelError("wheel-unsafe", f"{wheel.name} {what}.", details=lines)


def _invalid(wheel: LockedWheel, what: str, *details: str) -> WheelError:
    return WheelError("wheel-invalid", f"{wheel.name} {what}.", details=details)


def _dist_info(wheel: LockedWheel, members: Mapping[str, object]) -> str:
    """Return the name of the only ``.dist-info`` folder, which is that of *wheel*."""
    tops = {name.partition("/")[0] for name in members}
    infos = [top for top in sorted(tops) if top.endswith(".dist-info")]
    if len(infos) != 1:
        raise _invalid(wheel, "does not have one .dist-info folder", *infos[:5])
    _require_identity(wheel, *wheel.name.split("-")[:2])
    _require_identity(wheel, *infos[0].removesuffix(".dist-info").rpartition("-")[::2])
    return infos[0]


def _require_identity(wheel: LockedWheel, name: str, version: str) -> None:
    """Raise `wheel-mismatch` unless project and version are those of the lock."""
    from packaging.utils import canonicalize_name
    from packaging.version import Version

    if canonicalize_name(name) != wheel.project or Version(version) != Version(wheel.version):
        raise WheelError(
            "wheel-mismatch",
            f"{wheel.name} is {name!r:.100} {version!r:.100} inside.",
            details=[f"expected: {wheel.project} {wheel.version}"],
        )


def _text(
    wheel: LockedWheel,
    archive: zipfile.ZipFile,
    members: Mapping[str, zipfile.ZipInfo],
    name: str,
) -> str:
    info = members.get(name)
    if info is None or info.file_size > files.LARGEST:
        raise _invalid(wheel, f"has no usable {name.rpartition('/')[2]}", f"expected: {name}")
    with archive.open(info) as stream:
        return stream.read(files.LARGEST).decode("utf-8")


def _check_metadata(
    wheel: LockedWheel,
    archive: zipfile.ZipFile,
    members: Mapping[str, zipfile.ZipInfo],
    info: str,
) -> None:
    """Raise unless WHEEL is of a format that is known, and METADATA names the locked project."""
    version = re.findall(
        r"(?m)^Wheel-Version:\s*(.*?)\s*$", _text(wheel, archive, members, f"{info}/WHEEL")
    )
    if not version or not version[0].startswith("1."):
        raise _invalid(wheel, "is not of version 1 of the wheel format", *version)
    head = _text(wheel, archive, members, f"{info}/METADATA").partition("\n\n")[0]
    names, versions = (
        re.findall(rf"(?m)^{field}:[ \t]*(.*?)[ \t\r]*$", head) for field in ("Name", "Version")
    )
    if len(names) != 1 or len(versions) != 1:
        raise _invalid(wheel, "does not state its name and version once")
    _require_identity(wheel, names[0], versions[0])


def _contents(
    wheel: LockedWheel,
    archive: zipfile.ZipFile,
    members: Mapping[str, zipfile.ZipInfo],
    info: str,
    *,
    inexact: bool,
) -> Iterator[tuple[str, tuple[str, int]]]:
    """Yield every member with its sha256 and size, which RECORD must state unless *inexact*."""
    text = _text(wheel, archive, members, f"{info}/RECORD")
    rows = [row for row in csv.reader(io.StringIO(text)) if row]
    if sorted(row[0] for row in rows) != sorted(members) or any(len(row) != 3 for row in rows):
        odd = sorted(members.keys() ^ {row[0] for row in rows})
        raise _invalid(wheel, "has a RECORD that does not list each member once", *odd[:10])
    for name, digest, size in rows:
        match = _SHA256.fullmatch(digest)
        if not match and (digest or name != f"{info}/RECORD"):
            raise _invalid(wheel, "has a RECORD without sha256", name)
        actual = members[name].file_size
        if size and size != str(actual) and not inexact:
            raise _invalid(wheel, "has another size in RECORD", f"{name}: {size}, not {actual}")
        with archive.open(members[name]) as stream:
            # It has readinto, which its type does not say.
            sha256 = hashlib.file_digest(stream, "sha256").hexdigest()  # type: ignore[arg-type]
        stated = base64.urlsafe_b64decode(f"{match[1]}=").hex() if match else sha256
        if sha256 != stated and not inexact:
            raise _invalid(wheel, "holds other bytes than its RECORD states", name)
        yield name, (sha256, actual)


def _entry_points(
    wheel: LockedWheel,
    archive: zipfile.ZipFile,
    members: Mapping[str, zipfile.ZipInfo],
    info: str,
) -> Iterator[str]:
    """Yield the paths of the programs that the installer makes for entry points."""
    if f"{info}/entry_points.txt" not in members:
        return
    parser = configparser.ConfigParser(delimiters="=", interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]  # names differ by case
    try:
        parser.read_string(_text(wheel, archive, members, f"{info}/entry_points.txt"))
    except configparser.Error as error:
        raise _invalid(wheel, "has no readable entry_points.txt", str(error)[:300]) from error
    for section in ("console_scripts", "gui_scripts"):
        for name, value in parser.items(section) if parser.has_section(section) else ():
            if not _OBJECT.fullmatch(value.strip()):
                raise _unsafe(wheel, "has an entry point that is no object", f"{name} = {value}")
            yield _script(wheel, name)


def _script(wheel: LockedWheel, name: str) -> str:
    """Return the path of the program *name*."""
    installer = _INSTALLER.fullmatch(name)
    own = not installer or installer[1] == wheel.project
    if not own or not _SCRIPT.fullmatch(name) or _RESERVED_SCRIPT.fullmatch(name):
        raise _unsafe(wheel, "would install a program under a name that is not its own", name)
    return f"bin/{name}"


def _target(wheel: LockedWheel, member: str, stem: str, site: str) -> str:
    """Return where *member* is installed, below the environment."""
    top, _, rest = member.partition("/")
    if not top.endswith(".data"):
        if _STARTUP.fullmatch(top):
            raise _unsafe(wheel, "has a module that Python imports when it starts", member)
        return f"{site}/{member}"
    scheme, _, name = rest.partition("/")
    if top != f"{stem}.data" or not name:
        raise _unsafe(wheel, "has a .data folder of another project", member)
    if scheme in ("purelib", "platlib"):
        if _STARTUP.fullmatch(name.partition("/")[0]) or ".dist-info/" in name or ".data/" in name:
            raise _unsafe(wheel, "hides a file in its .data folder", member)
        return f"{site}/{name}"
    if scheme == "headers":
        python = site.split("/")[1]
        return f"include/site/{python}/{wheel.project}/{name}"
    if scheme == "scripts" or (scheme == "data" and name.startswith("bin/")):
        return _script(wheel, name.removeprefix("bin/"))
    # A folder of its own; not what the environment is made of, such as pyvenv.cfg or packages.
    first, _, below = name.partition("/")
    packages = first == "lib" and below.startswith("python")
    if scheme == "data" and below and _DATA_FOLDER.fullmatch(first) and not packages:
        return name
    raise _unsafe(wheel, "would install a file outside of the places for data", member)


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
    owners: dict[str, list[tuple[CheckedWheel, str]]] = {}
    for wheel in wheels:
        for place, (_, sha256, _) in wheel.files.items():
            owners.setdefault(place, []).append((wheel, sha256))
        for place in wheel.scripts:
            owners.setdefault(place, []).append((wheel, place + wheel.wheel.project))
    packages: dict[str, list[CheckedWheel]] = {}
    for place, holders in owners.items():
        first, *others = holders
        for other, sha256 in others:
            pair = frozenset((first[0].wheel.project, other.wheel.project))
            if sha256 != first[1] and pair not in allowed:
                raise _unsafe(
                    other.wheel,
                    f"and {first[0].wheel.name} have different files in one place",
                    place,
                )
        folder, _, name = place.rpartition("/")
        if name == "__init__.py" and first[1] != _EMPTY:
            packages[folder] = [wheel for wheel, _ in holders]
    for place, holders in owners.items():
        for folder in zips.folders_above(place):
            if folder in owners:
                raise _unsafe(holders[0][0].wheel, "needs a folder where another has a file", place)
            for owner in packages.get(folder, ()):
                for wheel, _ in holders:
                    pair = frozenset((wheel.wheel.project, owner.wheel.project))
                    if wheel not in packages[folder] and pair not in allowed:
                        raise _unsafe(
                            wheel.wheel, f"puts a file into a package of {owner.wheel.name}", place
                        )
    projects = {wheel.wheel.project for wheel in wheels}
    for overlay in overlays:
        if not {overlay.upper, overlay.lower} <= projects:
            continue
        count = len(overlaid(wheels, overlay))
        if count != overlay.files:
            what = f"{overlay.upper} replaces {count} files of {overlay.lower}"
            raise ClientError("set-mixed", f"{what}; the release states {overlay.files}.")


def overlaid(wheels: Sequence[CheckedWheel], overlay: Overlay) -> dict[str, CheckedWheel]:
    """Return the files that both projects of *overlay* have: path → the upper wheel."""
    by_project = {wheel.wheel.project: wheel for wheel in wheels}
    upper, lower = by_project.get(overlay.upper), by_project.get(overlay.lower)
    if upper is None or lower is None:
        return {}
    return {place: upper for place in upper.files if place in lower.files}


def edited(
    wheels: Sequence[CheckedWheel], edits: Sequence[FileEdit], site: str
) -> dict[str, bytes]:
    """
    Return the files that *edits* change, as they are afterwards, by path below the environment.

    Raises:
        edit-mismatch: The wheel of the set does not hold the file for which an edit was made.
    """
    by_project = {wheel.wheel.project: wheel for wheel in wheels}
    results: dict[str, bytes] = {}
    for edit in edits:
        wheel, place = by_project.get(edit.package), f"{site}/{edit.file}"
        sha256 = wheel.files[place][1] if wheel and place in wheel.files else ""
        if not wheel or sha256 != edit.before or place in results:
            raise ClientError(
                "edit-mismatch",
                f"{edit.name}: {edit.file} of {edit.package} is not the file to edit.",
                details=[f"expected: {edit.before}"],
            )
        data = read_member(wheel, place).decode("utf-8")
        for change in edit.changes:
            if data.count(change.anchor) != 1:
                raise ClientError(
                    "edit-mismatch",
                    f"{edit.name}: its anchor does not occur once in {edit.file}.",
                    details=[f"anchor: {change.anchor}"],
                )
            data = data.replace(change.anchor, change.replacement)
        results[place] = data.encode()
        if hashlib.sha256(results[place]).hexdigest() != edit.after:
            raise ClientError(
                "edit-mismatch",
                f"{edit.name}: {edit.file} is something else after the edit.",
                details=[f"expected: {edit.after}"],
            )
    return results


def read_member(wheel: CheckedWheel, place: str) -> bytes:
    """Return the bytes that *wheel* has for *place*; raise `wheel-invalid` if they changed."""
    member, sha256, _ = wheel.files[place]
    with zips.zip_file(wheel.path) as archive:
        data = archive.read(member)
    if hashlib.sha256(data).hexdigest() != sha256:
        raise _invalid(wheel.wheel, "was changed since it was checked", member)
    return data
