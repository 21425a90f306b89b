"""
Wheels, read with bounds and written so that equal content gives equal bytes.

A wheel is made from files, or from another wheel by replacing members and adding a local version
label.
"""

import base64
import csv
import hashlib
import io
import re
import zipfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Self

import msgspec
from packaging.requirements import Requirement
from packaging.tags import parse_tag
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import Version

from sparkwright.builder import BuildError
from sparkwright.core.errors import WheelError
from sparkwright.core.zips import info_folder, zip_file, zip_members

#: The earliest time that a zip can hold; times carry no meaning in a wheel
#: (reproducible-builds.org).
EPOCH = (1980, 1, 1, 0, 0, 0)

#: The files that sparkwright adds to a ``.dist-info``: the build record, and the bill of materials
#: (PEP 770).
BUILD_RECORD = "sparkwright.json"
SBOM = "sboms/sparkwright.cdx.json"


class CompiledUnit(msgspec.Struct, frozen=True):
    """
    A CUDA translation unit of a wheel.

    Attributes:
        source: Relative to the source tree; a generated one begins with ``<build>/``.
        target: The CMake target.
        object: Relative to the build folder.
        library: The member of the wheel that its target is; empty for an object or static library,
            which is linked into others.
        gencode: As in the plan: sorted entries ``virtual:real``.
        code: Arch and sha256 of each cubin (``sm_121f``) and PTX text (``compute_80``) in its
            object, sorted; empty for relocatable device code, which the device linker changes.
    """

    source: str
    target: str
    object: str
    library: str
    gencode: tuple[str, ...]
    code: tuple[tuple[str, str], ...]

    @property
    def name(self) -> str:
        return f"{self.source} (target {self.target})"

    @property
    def hashes(self) -> Iterator[str]:
        """The sha256 of each part of its `code`."""
        return (sha256 for _, sha256 in self.code)


class WheelName(msgspec.Struct, frozen=True):
    """
    The parts of a wheel's file name.

    Attributes:
        tag: ``python-abi-platform``, compressed sets included.
    """

    distribution: str
    version: str
    tag: str

    @property
    def filename(self) -> str:
        return f"{self.distribution}-{self.version}-{self.tag}.whl"

    @property
    def info(self) -> str:
        """Name of its ``.dist-info`` folder."""
        return f"{self.distribution}-{self.version}.dist-info"

    @classmethod
    def parse(cls, filename: str) -> Self:
        """Return the parts of *filename*; raise `wheel-invalid` if it is no wheel's name."""
        try:
            parse_wheel_filename(filename)
        except InvalidWheelFilename as error:
            raise WheelError(
                "wheel-invalid", f"{filename} is not the name of a wheel.", details=[str(error)]
            ) from error
        parts = filename.removesuffix(".whl").split("-")
        return cls(parts[0], parts[1], "-".join(parts[-3:]))

    def labelled(self, label: str, platform: str = "") -> Self:
        """
        Return the name with the local version *label* (PEP 440) in place of its own, and with the
        platform tag *platform* if that is given.
        """
        version = str(Version(f"{Version(self.version).public}+{label}"))
        tag = f"{self.tag.rpartition('-')[0]}-{platform}" if platform else self.tag
        return type(self)(self.distribution, version, tag)


def _pack(path: Path, name: WheelName, members: Iterable[tuple[str, bytes, bool]]) -> Path:
    """
    Write the wheel *name* to *path* and return that: *members*, each with its bytes and whether it
    is executable, in their order, and RECORD.
    """
    rows, record, text = list[tuple[str, str, str]](), f"{name.info}/RECORD", io.StringIO()
    with zipfile.ZipFile(path, "w") as wheel:
        for member, data, executable in members:
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            rows.append((member, f"sha256={digest}", str(len(data))))
            wheel.writestr(_entry(member, executable=executable), data, zipfile.ZIP_DEFLATED)
        csv.writer(text, lineterminator="\n").writerows([*sorted(rows), (record, "", "")])
        wheel.writestr(_entry(record), text.getvalue(), zipfile.ZIP_DEFLATED)
    return path


def _entry(name: str, *, executable: bool = False) -> zipfile.ZipInfo:
    """Return the directory entry of the regular file *name*."""
    info = zipfile.ZipInfo(name, EPOCH)
    info.external_attr = (0o100755 if executable else 0o100644) << 16
    return info


def write(
    folder: Path,
    name: WheelName,
    files: Mapping[str, bytes],
    metadata: str,
    *,
    pure: bool,
    dist_info: Mapping[str, bytes] | None = None,
) -> Path:
    """
    Write the wheel *name* to *folder* and return its path.

    Args:
        files: Its members.
        metadata: The text of METADATA.
        dist_info: Further files of its ``.dist-info`` by their path in it.
    """
    members = [(member, data, member.endswith(".so")) for member, data in sorted(files.items())]
    own = {"METADATA": metadata.encode(), "WHEEL": _wheel_text(name.tag, pure)}
    for file, data in {**(dist_info or {}), **own}.items():
        members.append((f"{name.info}/{file}", data, False))
    return _pack(folder / name.filename, name, members)


def _wheel_text(tag: str, pure: bool) -> bytes:
    """Return the text of a WHEEL file (PEP 427); a compressed *tag* becomes one line per member."""
    lines = [
        "Wheel-Version: 1.0",
        "Generator: sparkwright",
        f"Root-Is-Purelib: {str(pure).lower()}",
        *(f"Tag: {member}" for member in sorted(map(str, parse_tag(tag)))),
        "",
    ]
    return "\n".join(lines).encode()


def rewrite(
    base: Path,
    folder: Path,
    new: WheelName,
    *,
    replace: Mapping[str, bytes] | None = None,
    remove: Collection[str] = (),
    version_files: Collection[str] = (),
    requires: Mapping[str, str] | None = None,
    dist_info: Mapping[str, bytes] = MappingProxyType({}),
) -> Path:
    """
    Write to *folder* the wheel *base* with another name, and with some members replaced, added or
    removed.

    Args:
        new: The name; METADATA, the names of its folders and *version_files* follow its version.
        requires: Requirements that change; see `change_requirements`.
        dist_info: Files of the ``.dist-info`` by their path in it.

    Returns:
        The new wheel's path.

    Raises:
        wheel-invalid: *base* is damaged, or a version file does not state the version.
        requirement-mismatch: See `change_requirements`.
    """
    old = WheelName.parse(base.name)
    with zip_file(base) as source:
        listed = zip_members(source, base.name)
        info = info_folder(listed, base.name)
        folders = {
            info: new.info,
            f"{info.removesuffix('.dist-info')}.data": f"{new.distribution}-{new.version}.data",
        }
        changed = dict(replace or {})
        for name in version_files:
            text = changed.get(name) or source.read(name)
            changed[name] = _restate(text, old.version, new.version, name)
        for name, data in dist_info.items():
            changed[f"{info}/{name}"] = data
        metadata = source.read(f"{info}/METADATA")
        # The description behind the first empty line may have such a line, too.
        head = re.split(rb"(?m)^\r?$", metadata, maxsplit=1)[0]
        stated = re.sub(rb"(?mi)^Version:.*?(?=\r?$)", f"Version: {new.version}".encode(), head)
        metadata = stated + metadata[len(head) :]
        changed[f"{info}/METADATA"] = change_requirements(metadata, requires or {})
        pure = b"Root-Is-Purelib: true" in source.read(f"{info}/WHEEL")
        changed[f"{info}/WHEEL"] = _wheel_text(new.tag, pure)
        # A signature of the old RECORD says nothing of the new one.
        record = f"{info}/RECORD"
        names = {*listed, *changed} - {*remove, record, f"{record}.jws", f"{record}.p7s"}

        def members() -> Iterator[tuple[str, bytes, bool]]:
            for name in sorted(names, key=lambda name: (name.startswith(info), name)):
                top, separator, rest = name.partition("/")
                if name in changed:
                    data, executable = changed[name], name.endswith(".so")
                else:
                    # The rest of the mode is the umask of the packer, which installers ignore.
                    mode = listed[name].external_attr >> 16
                    data, executable = source.read(name), bool(mode & 0o111)
                yield folders.get(top, top) + separator + rest, data, executable

        return _pack(folder / new.filename, new, members())


def _restate(text: bytes, old: str, new: str, name: str) -> bytes:
    """
    Return the Python file *text* with *new* where ``__version__`` or ``version`` is set to *old*.

    Raises:
        wheel-invalid: There is no such assignment; the program and the metadata would disagree.
    """
    pattern = rf"^((?:\w+ *= *)*(?:__version__|version) *= *(?:\w+ *= *)*)(['\"]){re.escape(old)}\2"
    text, count = re.subn(
        pattern.encode(), lambda match: match[1] + repr(new).encode(), text, flags=re.MULTILINE
    )
    if not count:
        raise WheelError("wheel-invalid", f"{name} does not set __version__ to {old!r}.")
    return text


def change_requirements(metadata: bytes, requires: Mapping[str, str]) -> bytes:
    """
    Return METADATA that requires other versions of some projects, or these projects no longer.

    Args:
        requires: Normalised name → a requirement whose versions the lines of that project get, or
            empty to remove them.

    Raises:
        requirement-mismatch: A project has no line.
        ValueError: A requirement of the wheel cannot be read; `zip_file` turns this into
            `wheel-invalid`.
    """
    head, gap, body = metadata.partition(b"\n\n")
    lines, required = [], set[str]()
    # A line that begins with a blank continues the one before it.
    for line in re.split(rb"\n(?![ \t])", head):
        key, _, text = line.partition(b":")
        if key.lower() != b"requires-dist" or not requires:
            lines.append(line)
            continue
        requirement = Requirement(" ".join(text.decode().split()))
        project = canonicalize_name(requirement.name)
        required.add(project)
        if project not in requires:
            lines.append(line)
        elif requires[project]:
            requirement.specifier = Requirement(requires[project]).specifier
            lines.append(b"%s: %s" % (key, str(requirement).encode()))
    if idle := sorted(requires.keys() - required):
        raise BuildError(
            "requirement-mismatch",
            f"The entry {', '.join(idle)} changes no requirement of the official wheel.",
        )
    return b"\n".join(lines) + gap + body
