"""
Pack gates for a host without a network: wheels, folders of packages and models, the program, and
the commands to run, in parts of a given size, with a script that sets them up there.

    python -m sparkwright.operate.bundle SPEC.yaml --output DIR --file NAME=PATH --folder NAME=DIR

A wheel that shares members with an earlier one of the bundle takes their bytes from it, so that a
graft and its official wheel need little more room than one of them, and both are there byte by byte.
"""

from __future__ import annotations

import argparse
import io
import shutil
import struct
import tarfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from sparkwright.core import strict_yaml
from sparkwright.core.console import console, size
from sparkwright.core.files import sha256_bytes, sha256_file
from sparkwright.operate import bundle_host

#: Bytes that precede the name of a member in a zip file, and where the lengths of its name and
#: extra field stand there (PKWARE, APPNOTE.TXT, section 4.3.7).
_HEADER, _LENGTHS = 30, slice(26, 30)
#: Shorter members are not worth a range of their own.
_LEAST = 4096

#: A range of bytes: the name of an earlier file, or empty for the parts; offset; length.
Piece = tuple[str, int, int]


class BundleEnvironment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    An environment on the host.

    Attributes:
        wheel: A glob for its one wheel in the bundle, which is unpacked into it; empty for none.
        folders: Folders of the bundle in which Python looks before it looks at the host's packages.
        host: Globs of the host's packages that it sees; empty for all of them.
    """

    wheel: str = ""
    folders: tuple[str, ...] = ()
    host: tuple[str, ...] = ()


class BundleCommand(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    A command that runs on the host.

    Attributes:
        words: Its arguments, in which ``{root}`` is the folder of the unpacked bundle.
        seconds: After which it is ended.
        after: The names of commands that end before it begins.
        alone: Whether nothing else may run beside it.
    """

    name: Annotated[str, Meta(pattern="^[a-z0-9-]+$")]
    words: tuple[str, ...]
    seconds: Annotated[int, Meta(ge=1)]
    after: tuple[str, ...] = ()
    alone: bool = False


class BundleSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    The file that states what a bundle is for.

    Attributes:
        torch: The version that the host must have.
        capability: The compute capability of its GPU, ``9.0``.
    """

    torch: str
    capability: Annotated[str, Meta(pattern=r"^\d+\.\d$")]
    environments: dict[str, BundleEnvironment]
    commands: tuple[BundleCommand, ...]

    def __post_init__(self) -> None:
        seen = set[str]()
        for command in self.commands:
            if command.name in seen or not seen.issuperset(command.after):
                raise ValueError(f"{command.name} is there twice, or comes after a later command")
            seen.add(command.name)


class BundleFile(msgspec.Struct, frozen=True):
    """
    A file of the bundle.

    Attributes:
        name: Its path below the folder of the unpacked bundle.
        pieces: Its bytes, one after another.
        unpack: The folder that it is unpacked to; empty for a file that stays.
    """

    name: str
    sha256: str
    pieces: tuple[Piece, ...]
    unpack: str = ""


class Parts:
    """
    Files of at most *size* bytes in *folder*, written one after another.

    Attributes:
        records: Name, sha256 and bytes of each part that is whole.
    """

    def __init__(self, folder: Path, size: int) -> None:
        self._folder, self._size, self._part = folder, size, bytearray()
        self.records: list[tuple[str, str, int]] = []
        self.position = 0

    def add(self, data: bytes) -> None:
        """Append *data*."""
        self.position += len(data)
        while data:
            room = self._size - len(self._part)
            self._part += data[:room]
            data = data[room:]
            if len(self._part) == self._size:
                self.end()

    def end(self) -> None:
        """Write the last part."""
        name = f"part-{len(self.records) + 1}"
        (self._folder / name).write_bytes(self._part)
        self.records.append((name, sha256_bytes(bytes(self._part)), len(self._part)))
        self._part.clear()


def members(wheel: Path) -> Iterator[tuple[int, int, bytes]]:
    """Yield offset, length and sha256 of the packed bytes of each larger member of *wheel*."""
    with zipfile.ZipFile(wheel) as archive, wheel.open("rb") as stream:
        for info in sorted(archive.infolist(), key=lambda info: info.header_offset):
            stream.seek(info.header_offset)
            lengths = struct.unpack("<HH", stream.read(_HEADER)[_LENGTHS])
            offset = info.header_offset + _HEADER + sum(lengths)
            if info.compress_size >= _LEAST:
                stream.seek(offset)
                data = stream.read(info.compress_size)
                yield offset, info.compress_size, sha256_bytes(data).encode()


def pieces(path: Path, earlier: Mapping[bytes, Piece], parts: Parts) -> list[Piece]:
    """Append *path* to *parts*, without the members of a wheel that *earlier* files have."""
    result, end = list[Piece](), 0
    known = members(path) if path.suffix == ".whl" else iter(())
    shared = [(at, length, earlier[key]) for at, length, key in known if key in earlier]
    with path.open("rb") as stream:
        for at, length, piece in (*shared, (path.stat().st_size, 0, None)):
            result.append(("", parts.position, at - end))
            stream.seek(end)
            while end < at:
                data = stream.read(min(bundle_host.CHUNK, at - end))
                parts.add(data)
                end += len(data)
            if piece:
                result.append(piece)
                end += length
    return result


def packed(folder: Path, file: Path) -> None:
    """Write the files of *folder* to the archive *file*, the same bytes for the same files."""
    with tarfile.open(file, "w:xz", preset=6) as archive:
        for path in sorted(folder.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                info = tarfile.TarInfo(str(path.relative_to(folder)))
                data = path.read_bytes()
                info.size, info.mode = len(data), path.stat().st_mode & 0o755
                archive.addfile(info, io.BytesIO(data))


def pack(
    spec: BundleSpec,
    files: Mapping[str, Path],
    folders: Mapping[str, Path],
    output: Path,
    part_bytes: int,
) -> Sequence[tuple[str, str, int]]:
    """
    Write the bundle of *spec* to the folder *output*, and return its parts.

    Args:
        files, folders: By their paths in the unpacked bundle.
        part_bytes: The size of a part.
    """
    output.mkdir(parents=True)
    parts, earlier, records = Parts(output, part_bytes), dict[bytes, Piece](), list[BundleFile]()
    for name, path in files.items():
        with console.step(name):
            own = pieces(path, earlier, parts)
            records.append(BundleFile(name, sha256_file(path), tuple(own)))
            for at, length, key in members(path) if path.suffix == ".whl" else ():
                earlier.setdefault(key, (name, at, length))
    for name, path in folders.items():
        with console.step(name):
            archive = output / "folder.tar.xz"
            packed(path, archive)
            own = pieces(archive, {}, parts)
            records.append(BundleFile(f"{name}.tar.xz", sha256_file(archive), tuple(own), name))
            archive.unlink()
    parts.end()
    about = {**msgspec.to_builtins(spec), "parts": parts.records, "files": records}
    (output / "bundle.json").write_bytes(msgspec.json.encode(about))
    shutil.copy(bundle_host.__file__, output / "bundle_host.py")
    return parts.records


def main() -> None:
    """Pack the bundle that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m sparkwright.operate.bundle")
    add = parser.add_argument
    add("spec", type=Path, metavar="SPEC", help="file of the bundle (ci/rehearsal)")
    add("--output", type=Path, required=True, metavar="DIR", help="folder for the parts")
    add("--part", type=float, default=55, metavar="N", help="megabytes of a part (default: 55)")
    for kind in ("file", "folder"):
        text = f"a {kind} of the bundle, and its path there"
        add(f"--{kind}", action="append", default=[], metavar="NAME=PATH", help=text)
    arguments = parser.parse_args()
    files, folders = (
        {name: Path(path) for name, _, path in (each.partition("=") for each in given)}
        for given in (arguments.file, arguments.folder)
    )
    spec = strict_yaml.load(arguments.spec, BundleSpec)
    rows = [
        [name, sha256, size(count)]
        for name, sha256, count in pack(
            spec, files, folders, arguments.output, round(arguments.part * 10**6)
        )
    ]
    console.table("parts", ["name", "sha256", ">size"], rows, result=True)


if __name__ == "__main__":
    main()
