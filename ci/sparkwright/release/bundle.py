"""
Pack gates for a host without a network: wheels, folders of packages and models, the program, and
the commands to run, in parts of a given size, with a script that sets them up there.

The parts are one archive (tar, xz), cut; `bundle_host` unpacks it with Python alone.
"""

from __future__ import annotations

import contextlib
import io
import lzma
import re
import shutil
import subprocess
import tarfile
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import IO, Annotated, ClassVar

import msgspec
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from sparkwright.audit.wheel import read_contents, read_subject
from sparkwright.builder.pylock import Interpreter
from sparkwright.builder.wheel import elf, gpu_target
from sparkwright.core.console import console
from sparkwright.core.errors import Advice, SparkwrightError, StoreError
from sparkwright.core.files import sha256_bytes, sha256_file
from sparkwright.release import bundle_host

#: Names of the parts.
PART = re.compile(r"part-\d{5}")
#: Bytes that the compression looks back; unpacking needs as much memory, packing six times as much.
DICTIONARY = 512 << 20
#: The name of an environment or a command, as a file may have it.
Identifier = Annotated[str, msgspec.Meta(pattern=r"\A[a-z0-9-]+\Z")]
#: A path below the folder of the bundle.
Inside = Annotated[str, msgspec.Meta(pattern=r"\A(?!(.*/)?\.\.(/|\Z))[^/\x00][^\x00]*\Z")]


class BundleError(SparkwrightError):
    """A bundle cannot be packed, or the script on its host refuses it."""

    references: ClassVar[Mapping[str, Advice]] = {
        reference: Advice(*texts) for reference, texts in bundle_host.REFUSALS.items()
    }


class BundleEnvironment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    An environment on the host.

    Attributes:
        wheel: A glob for its one wheel in the bundle, which is unpacked into it; empty for none.
        folders: Folders of the bundle in which Python looks before it looks at the host's packages.
        host: Globs of the host's packages that it sees; empty for all of them.
    """

    wheel: Inside | None = None
    folders: tuple[Inside, ...] = ()
    host: tuple[Inside, ...] = ()


class BundleCommand(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    A command that runs on the host.

    Attributes:
        words: Its arguments, in which ``{root}`` is the folder of the unpacked bundle.
        seconds: After which it is ended.
        after: The names of commands that end before it begins.
        gpu: Index of the GPU that it sees. Hosts with fewer GPUs run it on one that they have.
        alone: Whether nothing else may run beside it on its GPU.
    """

    name: Identifier
    words: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    seconds: Annotated[int, msgspec.Meta(ge=1)]
    after: tuple[str, ...] = ()
    gpu: Annotated[int, msgspec.Meta(ge=0)] = 0
    alone: bool = False


class BundleSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    The file that states what a bundle is for.

    Attributes:
        python: The Python and the machine that the packages are for, ``3.12 x86_64``.
        torch: The version that the host must have, or that the bundle brings.
        own_torch: The folder of the bundle that holds torch; the host needs none then.
        capability: The compute capability of its GPU, ``9.0``.
    """

    python: Annotated[str, msgspec.Meta(pattern=r"\A3\.\d+ [a-z0-9_]+\Z")]
    torch: str
    capability: Annotated[str, msgspec.Meta(pattern=r"\A\d+\.\d\Z")]
    environments: dict[Identifier, BundleEnvironment]
    commands: tuple[BundleCommand, ...]
    own_torch: Inside | None = None

    def __post_init__(self) -> None:
        seen = set[str]()
        for command in self.commands:
            if command.name in seen or not seen.issuperset(command.after):
                raise ValueError(f"{command.name} is listed twice, or comes after a later command")
            seen.add(command.name)


def pack(
    spec: BundleSpec,
    contents: Mapping[str, Path],
    output: Path,
    part_bytes: int,
    *,
    trim: bool = False,
) -> list[tuple[str, str, int]]:
    """
    Write the bundle of *spec* to the folder *output*; ``bundle.json`` comes last.

    Args:
        contents: Files and folders, by their paths in the unpacked bundle. What the gates wrote
            beside a wheel goes with it, so that its attempts count there, too.
        part_bytes: The size of a part.
        trim: Leave out the device code in folders that the GPU of *spec* does not take; wheels
            stay as they are, since verdicts name their bytes.

    Returns:
        Name, sha256 and bytes of ``bundle.json`` and of each part.

    Raises:
        bundle-incomplete: A file or folder does not exist, or an environment needs another one.
        bundle-root-taken: *output* holds something else than parts that were cut off.
        bundle-torch-differs: A wheel requires another version of torch, a folder holds one, or an
            environment lacks the bundle's.
        wheel-invalid, archive-unsafe: A wheel is damaged.
        disk-full: The parts cannot be written.
    """
    _require_complete(spec, contents)
    _require_torch(spec, contents)
    contents = {**contents, **dict(_attempts(contents))}
    output.mkdir(parents=True, exist_ok=True)
    if foreign := [path.name for path in output.iterdir() if not PART.fullmatch(path.name)]:
        raise BundleError("bundle-root-taken", f"{output} is not empty.", details=foreign[:10])
    for path in output.iterdir():
        path.unlink()
    names = ["--numeric-suffixes=1", "--suffix-length=5", "-", str(output / "part-")]
    command = ["split", f"--bytes={part_bytes}", *names]
    with (
        contextlib.suppress(BrokenPipeError),
        subprocess.Popen(command, stdin=subprocess.PIPE) as split,
    ):
        assert split.stdin
        major, minor = map(int, spec.capability.split("."))
        _write(contents, split.stdin, (major, minor) if trim else None)
    if split.returncode:
        raise StoreError("disk-full", f"`split` cannot write parts to {output}.")
    paths = sorted(output.glob("part-*"))
    parts = [(path.name, sha256_file(path), path.stat().st_size) for path in paths]
    shutil.copy(bundle_host.__file__, output)
    data = msgspec.json.encode({**msgspec.to_builtins(spec), "parts": parts})
    (output / "bundle.json").write_bytes(data)
    return [("bundle.json", sha256_bytes(data), len(data)), *parts]


def _attempts(contents: Mapping[str, Path]) -> Iterator[tuple[str, Path]]:
    """Yield the verdicts and the attempt logs beside the wheels of *contents*, by their paths."""
    for name, path in contents.items():
        for suffix in (".verdicts.json", ".attempts.jsonl") if path.suffix == ".whl" else ():
            beside = path.with_name(f"{path.stem}{suffix}")
            if beside.exists():
                yield str(PurePosixPath(name).with_name(beside.name)), beside


def _write(contents: Mapping[str, Path], sink: IO[bytes], trim: tuple[int, int] | None) -> None:
    """Write the archive of *contents* to *sink*, with libraries for a GPU of capability *trim*."""
    # The wheels among them are compressed already, and a higher preset takes minutes for them; but
    # two builds of a wheel share most members, which a large dictionary finds again.
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 1, "dict_size": DICTIONARY}]
    with (
        lzma.open(sink, "wb", filters=filters) as stream,
        tarfile.open(fileobj=stream, mode="w|", dereference=True) as archive,
    ):
        for name, path in contents.items():
            with console.step(name):
                libraries = list[tarfile.TarInfo]()
                archive.add(path, name, filter=partial(_keep, libraries if trim else None))
                for info in libraries:
                    assert trim
                    data = _trimmed(path / PurePosixPath(info.name).relative_to(name), trim)
                    info.size = len(data)
                    archive.addfile(info, io.BytesIO(data))


def _keep(libraries: list[tarfile.TarInfo] | None, info: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Return a member as it is packed at once; None for libraries, which go into *libraries*."""
    member = anonymous_member(info)
    if member and libraries is not None and member.isreg() and ".so" in Path(info.name).suffixes:
        libraries.append(member)
        return None
    return member


def _trimmed(path: Path, device: tuple[int, int]) -> bytes:
    """Return the library at *path* without the device code that *device* does not take."""
    try:
        with elf.mapped(path) as data:
            return gpu_target.trimmed(data, device)
    except elf.ElfUnreadable:
        # A linker script, or a library that only its own program reads.
        return path.read_bytes()


def anonymous_member(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Return a member without its owner and time, so that the same files give the same bytes."""
    if "__pycache__" in PurePosixPath(info.name).parts:
        return None
    info.mtime, info.uid, info.gid, info.uname, info.gname = 0, 0, 0, "", ""
    info.mode &= 0o755
    return info


def _require_complete(spec: BundleSpec, contents: Mapping[str, Path]) -> None:
    """Raise `bundle-incomplete` if *contents* lacks a needed file, or names one that is missing."""
    faults = [f"no file or folder {path}" for path in contents.values() if not path.exists()]
    needed = [("own_torch", spec.own_torch)] if spec.own_torch else []
    for name, environment in spec.environments.items():
        glob = environment.wheel
        wheels = [file for file in contents if glob and PurePosixPath(file).match(glob)]
        if glob and len(wheels) != 1:
            faults.append(f"environment {name}: {len(wheels)} files match {glob}")
        needed += [(f"environment {name}", folder) for folder in environment.folders]
    faults += [
        f"{what}: nothing holds {folder}"
        for what, folder in needed
        if not any(PurePosixPath(folder).is_relative_to(path) for path in contents)
    ]
    if faults:
        raise BundleError("bundle-incomplete", "The bundle would be incomplete.", details=faults)


def _require_torch(spec: BundleSpec, contents: Mapping[str, Path]) -> None:
    """
    Raise `bundle-torch-differs` if a wheel, or a torch in a folder, is of another version, or the
    environment of a wheel that requires torch lacks the bundle's.
    """
    faults, requiring = list[str](), set[str]()
    for name, path in contents.items():
        for requirement in _requirements(path, spec.python) if path.suffix == ".whl" else ():
            if canonicalize_name(requirement.name) == "torch":
                requiring.add(name)
                if not requirement.specifier.contains(spec.torch, prereleases=True):
                    faults.append(f"{name} requires {requirement}")
    own = PurePosixPath(spec.own_torch) if spec.own_torch else None
    listed = chain.from_iterable(each.folders for each in spec.environments.values())
    for folder in {*([own] if own else ()), *map(PurePosixPath, listed)}:
        records = [
            record.name
            for name, path in contents.items()
            if folder.is_relative_to(name)
            for record in (path / folder.relative_to(name)).glob("torch-*.dist-info")
        ]
        versions = {
            record[len("torch-") : -len(".dist-info")].partition("+")[0] for record in records
        }
        if versions != {spec.torch} and (versions or folder == own):
            faults.append(f"{folder} holds {', '.join(records) or 'no torch'}")
    for name, environment in spec.environments.items():
        glob = environment.wheel
        wheels = [file for file in requiring if glob and PurePosixPath(file).match(glob)]
        if wheels and own and own not in map(PurePosixPath, environment.folders):
            faults.append(f"environment {name}: {wheels[0]} requires torch; its folders lack it")
    if faults:
        what = f"The bundle is for torch {spec.torch}, and not all of it is."
        raise BundleError("bundle-torch-differs", what, details=faults)


def _requirements(wheel: Path, host: str) -> Iterator[Requirement]:
    """Yield the requirements of a wheel on a *host* with such a Python (``3.12 x86_64``)."""
    metadata = read_contents(wheel, read_subject(wheel)).metadata
    python, _, machine = host.partition(" ")
    environment = Interpreter(f"{python}.0", machine).selection()["environment"]
    for requirement in map(Requirement, metadata.get("requires_dist", [])):
        if not requirement.marker or requirement.marker.evaluate({**environment, "extra": ""}):
            yield requirement
