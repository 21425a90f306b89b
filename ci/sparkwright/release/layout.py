"""
What the site-packages of an environment must hold: the files of wheels that lie over each other, edited.

Two wheels may own the same file. An installer writes both and the later one wins, but the RECORD of the earlier one then states
hashes that are not on disk, and removing it takes the later one's files along. Here every file belongs to the one package whose
bytes it has, and to its RECORD alone.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import csv
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import msgspec

from sparkwright.builder.wheel import archive
from sparkwright.builder.wheel.archive import WheelName
from sparkwright.core.errors import WheelError
from sparkwright.core.files import sha256_bytes
from sparkwright.core.zips import zip_file, zip_members
from sparkwright.release.errors import InstallError
from sparkwright.release.spec import Edit, Package

#: Where the correction belongs when a wheel that is right by hash does not fit.
_TODO = "Nothing was changed. Correct forks/<stack>/onsite.yaml: the wheel is the one that it names, so the file is wrong about it."


class File(msgspec.Struct, frozen=True):
    """
    A file of the environment.

    Attributes:
        sha256: What it must be in the end.
        known: What else it may be before: the bytes that any of the wheels gives it. Empty: it is ours, whatever it is.
        wheel: The wheel that holds it under this name, unless *data* does.
    """

    sha256: str
    size: int
    package: str
    known: frozenset[str] = frozenset()
    wheel: Path | None = None
    data: bytes = b""
    executable: bool = False

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[IO[bytes]]:
        """Yield its bytes; raise `wheel-invalid` where the wheel is damaged."""
        if self.wheel is None:
            yield io.BytesIO(self.data)
            return
        with zip_file(self.wheel) as zipped, zipped.open(name) as stream:
            yield stream


class Shared(msgspec.Struct, frozen=True):
    """How many files of *lower* the package *upper* replaces, and how many of those have other bytes there."""

    upper: str
    lower: str
    files: int
    differ: int


class Layout(msgspec.Struct, frozen=True):
    """
    What must be there.

    Attributes:
        files: By path below the site-packages.
        infos: The ``.dist-info`` folder of each package.
    """

    files: dict[str, File]
    infos: dict[str, str]
    shared: tuple[Shared, ...]


class Note(msgspec.Struct, frozen=True):
    """``sparkwright.json`` in a ``.dist-info``: where the package came from, and which of its files were edited."""

    wheel: str
    sha256: str
    edits: tuple[Edit, ...]


def make(wheels: Sequence[tuple[Package, Path]], edits: Sequence[Edit]) -> Layout:
    """
    Return what verified *wheels*, in this order, and *edits* make together.

    Raises:
        onsite-mismatch: An edit does not fit its file, or the wheels share another number of files than they should.
        wheel-invalid: A wheel is damaged, or has what only an installer can place (scripts, data folders).
    """
    read = {package.name: _files(package, path) for package, path in wheels}
    shared = tuple(_shared([package for package, _ in wheels], read))
    files: dict[str, File] = {}
    for held in read.values():
        files |= {name: msgspec.structs.replace(file, known=file.known | _known(files, name)) for name, file in held.items()}
    for edit in edits:
        files[edit.file] = _edited(edit, files.get(edit.file))
    infos = {package.name: WheelName.of(path.name).info for package, path in wheels}
    for package, path in wheels:
        files |= _described(package, path, infos[package.name], files, tuple(edit for edit in edits if edit.package == package.name))
    return Layout(files, infos, shared)


def _known(files: dict[str, File], name: str) -> frozenset[str]:
    return files[name].known if name in files else frozenset()


def _files(package: Package, path: Path) -> dict[str, File]:
    """Return the files of a wheel, less its RECORD."""
    info = WheelName.of(path.name).info
    with zip_file(path) as zipped:
        members = zip_members(zipped, path.name)
        record = archive.records(zipped, members, info, path.name)
    members.pop(f"{info}/RECORD", None)
    folder = info.removesuffix(".dist-info") + ".data/"
    if any(name.startswith(folder) or name == f"{info}/entry_points.txt" for name in members):
        raise WheelError(
            "wheel-invalid", f"{path.name} has scripts or data folders.", todo="Install it by pip or uv; onsite.yaml cannot hold it."
        )
    made = {}
    for name, member in members.items():
        sha256, size = _recorded(record.get(name, ("", "")), name, path.name), member.file_size
        executable = bool(member.external_attr >> 16 & 0o111)
        made[name] = File(sha256, size, package.name, frozenset({sha256}), path, executable=executable)
    return made


def _recorded(row: tuple[str, str], name: str, origin: str) -> str:
    method, _, value = row[0].partition("=")
    try:
        found = base64.urlsafe_b64decode(value + "=" * (-len(value) % 4))
    except (ValueError, binascii.Error):
        found = b""
    if method != "sha256" or len(found) != 32:
        raise WheelError("wheel-invalid", f"{origin} holds {name}, which its RECORD does not know by sha256.")
    return found.hex()


def _shared(packages: Sequence[Package], read: dict[str, dict[str, File]]) -> Iterator[Shared]:
    for place, upper in enumerate(packages):
        for lower in packages[:place]:
            above, below = read[upper.name], read[lower.name]
            both = above.keys() & below.keys()
            if len(both) != upper.over.get(lower.name, 0):
                raise InstallError(
                    "onsite-mismatch",
                    f"{upper.name} {upper.version} and {lower.name} {lower.version} have another number of files in common than expected.",
                    details=[f"expected: {upper.over.get(lower.name, 0)}", f"found:    {len(both)}"],
                    todo=_TODO,
                )
            if both:
                yield Shared(upper.name, lower.name, len(both), sum(above[name].sha256 != below[name].sha256 for name in both))


def _edited(edit: Edit, file: File | None) -> File:
    if file is None or file.package != edit.package:
        owner = f"comes from {file.package}" if file else "is in no wheel"
        raise InstallError(
            "onsite-mismatch", f"The edit {edit.name!r} is for {edit.package}, but its file {owner}.", details=[edit.file], todo=_TODO
        )
    with file.open(edit.file) as stream:
        data = stream.read()
    _expect(edit, "before the edit", edit.before, sha256_bytes(data))
    for change in edit.changes:
        anchor = change.anchor.encode()
        if (count := data.count(anchor)) != 1:
            raise InstallError(
                "onsite-mismatch",
                f"An anchor of the edit {edit.name!r} occurs {count} times instead of once.",
                details=[f"file:   {edit.file}", f"anchor: {change.anchor}"],
                todo=_TODO,
            )
        data = data.replace(anchor, change.replacement.encode())
    _expect(edit, "after the edit", edit.after, sha256_bytes(data))
    return File(edit.after, len(data), file.package, file.known, data=data, executable=file.executable)


def _expect(edit: Edit, when: str, expected: str, found: str) -> None:
    if found != expected:
        raise InstallError(
            "onsite-mismatch",
            f"The file of the edit {edit.name!r} is not the expected one {when}.",
            details=[f"file:     {edit.file}", f"expected: {expected}", f"found:    {found}"],
            todo=_TODO,
        )


def _described(package: Package, path: Path, info: str, files: dict[str, File], edits: tuple[Edit, ...]) -> dict[str, File]:
    """Return what an installer adds to ``.dist-info``: INSTALLER, our note, and RECORD of what is on disk."""
    note = msgspec.json.format(msgspec.json.encode(Note(path.name, package.wheels[path.name], edits))) + b"\n"
    made = {f"{info}/{name}": _ours(package, data) for name, data in (("INSTALLER", b"sparkwright\n"), ("sparkwright.json", note))}
    own = {name: file for name, file in files.items() if file.package == package.name} | made
    text = io.StringIO()
    rows = [(name, _digest(file.sha256), str(file.size)) for name, file in sorted(own.items())]
    csv.writer(text, lineterminator="\n").writerows([*rows, (f"{info}/RECORD", "", "")])
    return {**made, f"{info}/RECORD": _ours(package, text.getvalue().encode())}


def _ours(package: Package, data: bytes) -> File:
    return File(sha256_bytes(data), len(data), package.name, data=data)


def _digest(sha256: str) -> str:
    return "sha256=" + base64.urlsafe_b64encode(bytes.fromhex(sha256)).rstrip(b"=").decode()
