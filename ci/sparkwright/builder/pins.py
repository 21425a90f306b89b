"""
Pins: what the releases of a stack require of each other, known before anything large is fetched.

METADATA of an official wheel is read by range requests, and the tag of CUTLASS from the beginning
of a source distribution; a few megabytes of each at most. Both are kept by the hash of the file.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import re
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from email.parser import BytesParser
from pathlib import Path
from typing import ClassVar

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from sparkwright.builder import BuildError, toolchain
from sparkwright.builder.wheel.archive import change_requirements
from sparkwright.core import http
from sparkwright.core.console import console
from sparkwright.core.errors import Advice, FileError, SparkwrightError
from sparkwright.core.files import sha256_file
from sparkwright.core.http import HttpFailure
from sparkwright.core.zips import damage_guard, info_folder
from sparkwright.forks import package_index
from sparkwright.forks.context import RunContext
from sparkwright.forks.package_index import IndexFile
from sparkwright.forks.stack import ForkSpec, SourceUnreachable, earlier_lock

#: Bytes of the end of a wheel that the first request asks for, of each further request at least, of
#: all of them at most, and of the largest METADATA. Directories of official wheels have up to 2 MB.
TAIL, WINDOW, MOST, MOST_METADATA = 1 << 20, 1 << 16, 32 << 20, 4 << 20
#: Bytes of the beginning of a source distribution; vLLM's CMakeLists.txt ends within 0.5 MB.
HEAD = http.LARGEST


class PinError(SparkwrightError):
    """Releases of the stack do not fit together."""

    references: ClassVar[Mapping[str, Advice]] = {
        "pins-disagree": Advice(
            "A release of the stack requires another release of a project than the stack names.",
            "Choose releases that fit. To accept another release for good, name it under `requires`"
            " in build/<stack>/environment.yaml. lock, plan and patch bump go on once with "
            "--force-pin.",
        ),
    }


class _RemoteFile(io.RawIOBase):
    """
    A file on the index, of which only the parts that are read are fetched.

    Raises:
        HttpFailure: The server does not answer, or would send a large file whole.
    """

    def __init__(self, url: str) -> None:
        self._url, self._left, self._position = url, MOST, 0
        self._start, self._data, self._size = self._request(f"-{TAIL}")

    def _request(self, wanted: str) -> tuple[int, bytes, int]:
        """Return the offset and the bytes of the range *wanted*, and the size of the file."""
        headers = {"Range": f"bytes={wanted}"}
        reply = http.request("GET", self._url, headers=headers, redirects=True)
        self._left -= len(reply.body)
        stated = reply.headers.get("content-range", "")
        match = re.fullmatch(r"bytes ([0-9]{1,15})-[0-9]{1,15}/([0-9]{1,15})", stated)
        if reply.status == 200:
            return 0, reply.body, len(reply.body)
        if reply.status != 206 or not match or self._left < 0:
            raise HttpFailure("status", f"answered {reply.status} to a range", reply.status)
        return int(match[1]), reply.body, int(match[2])

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        origin = (0, self._position, self._size)[whence]
        self._position = max(0, origin + offset)
        return self._position

    def tell(self) -> int:
        return self._position

    def read(self, size: int = -1) -> bytes:
        rest = max(0, self._size - self._position)
        end = self._position + (min(size, rest) if size >= 0 else rest)
        if not self._start <= self._position <= end <= self._start + len(self._data):
            last = min(max(end, self._position + WINDOW), self._size) - 1
            self._start, self._data, _ = self._request(f"{self._position}-{last}")
        part = self._data[self._position - self._start : end - self._start]
        self._position += len(part)
        return part


def _read(
    context: RunContext, project: str, version: str, suffix: str, tag: str = ""
) -> tuple[str, bytes]:
    """
    Return the name of a file of the release, of several wheels of one for *tag* if there is, and
    METADATA of it (a wheel) or CMakeLists.txt (a source distribution).

    Raises:
        offline, source-unreachable: It is not in the store, and cannot be had.
        archive-unsafe: The wheel is damaged.
    """
    earlier = earlier_lock(context.project)
    forks = earlier.forks if earlier else {}
    locked = [
        IndexFile(file.filename, "", file.sha256)
        for fork in forks.values()
        for file in (fork.sdist, *fork.bases.values())
        if file and (file.name, file.version) == (project, version) and tag in file.filename
    ]
    file = next((file for file in locked if file.name.endswith(suffix)), None)
    if file and (stored := context.store.get("index-file", file.sha256, bytes)):
        return file.name, stored
    kind, path = "index-file", Path()
    if file:
        path = package_index.path_of(context.store, file.sha256, file.name)
    if not (file and path.is_file() and sha256_file(path) == file.sha256):
        # A part of a file is not verified: it counts until the whole file is in the store.
        kind = "index-part"
        if file and (stored := context.store.get(kind, file.sha256, bytes)):
            return file.name, stored
        if context.offline:
            raise SourceUnreachable("offline", f"{project} {version} is not in the store.")
        offers = package_index.offers(project, version, suffix)
        file = min(offers, key=lambda offer: tag not in offer.name)
    try:
        part = _metadata if suffix == ".whl" else _cmake
        data = part(file.name, file.url or path)
    except HttpFailure as failure:
        raise SourceUnreachable(
            "source-unreachable", f"{file.name} cannot be read in part.", details=[str(failure)]
        ) from None
    if file.sha256:
        context.store.put(kind, file.sha256, data)
    return file.name, data


def _metadata(name: str, source: Path | str) -> bytes:
    """Return METADATA of the wheel *name* at the path or address *source*."""
    with damage_guard(name):
        wheel = zipfile.ZipFile(_RemoteFile(source) if isinstance(source, str) else source)
        with wheel, wheel.open(f"{info_folder(wheel.namelist(), name)}/METADATA") as member:
            return member.read(MOST_METADATA)


def _cmake(name: str, source: Path | str) -> bytes:
    """
    Return CMakeLists.txt of the source distribution *name* at the path or address *source*.

    Raises:
        HttpFailure: The server does not answer, or the file is not at the beginning of the archive.
    """
    with tempfile.NamedTemporaryFile(suffix=name) as head, contextlib.suppress(FileError):
        if isinstance(source, str):
            headers = {"Range": f"bytes=0-{HEAD - 1}"}
            reply = http.request("GET", source, headers=headers, redirects=True)
            if reply.status not in (200, 206):
                raise HttpFailure("status", f"answered {reply.status} to a range", reply.status)
            head.write(reply.body)
            head.flush()
            source = Path(head.name)
        # A cut archive ends as a damaged one.
        for path, _, content in package_index.sdist_members(source):
            if path == "CMakeLists.txt":
                return content
    raise HttpFailure("size", "no CMakeLists.txt can be read at the beginning of it")


def requirements(
    context: RunContext, fork: str, version: str = "", requires: Mapping[str, str] | None = None
) -> Iterator[tuple[str, Requirement]]:
    """
    Yield what *version* of *fork* (by default that of stack.yaml) requires, each with the file that
    says so: its official wheel for the machine of the run, as environment.yaml changes it, then
    CMakeLists.txt, which names the releases of the forks that a graft needs.

    Args:
        requires: In place of what environment.yaml changes.

    Raises:
        offline, source-unreachable, archive-unsafe: A file of the release cannot be read.
        requirement-mismatch: An entry of environment.yaml changes nothing.
    """
    spec, settings = context.project.fork(fork), toolchain.spec(context.project).forks
    base, sdist = spec.bases.get(context.machine), spec.sources.sdist
    environment = {"extra": "", "platform_machine": context.machine}
    if not (named := base or sdist):
        return
    version = version or named.version
    file, metadata = _read(context, named.name, version, ".whl", base.tag if base else "")
    with damage_guard(file):
        metadata = change_requirements(
            metadata, settings[fork].requires if requires is None else requires
        )
        header = BytesParser().parsebytes(metadata, headersonly=True)
        for requirement in map(Requirement, map(str, header.get_all("Requires-Dist") or [])):
            if not requirement.marker or requirement.marker.evaluate(environment):
                yield file, requirement
    if spec.needs and sdist:
        file, text = _read(context, sdist.name, version, ".tar.gz")
        for need, tag in re.findall(rb'(?m)^\s*set\(\s*(\w+)_REVISION\s+"v?([\w.]+)"', text):
            if (name := need.decode().lower()) in spec.needs:
                try:
                    pin = _exactly(settings[name].distribution, tag.decode())
                except InvalidRequirement:
                    console.note(f"{file} names no release of {name}: {tag.decode()}")
                else:
                    yield f"CMakeLists.txt of {file}", pin


def _exactly(project: str, version: str) -> Requirement:
    return Requirement(f"{project}=={version}")


def release(fork: ForkSpec) -> str:
    """
    Return the release of *fork* that others may require: the one that upstream pins where another
    was accepted in its place, else that of its source distribution or its tag.
    """
    sources, tag = fork.sources, fork.sources.git.ref if fork.sources.git else ""
    tag = sources.sdist.version if sources.sdist else tag
    return (sources.upstream or tag).removeprefix("v")


def disagreements(
    context: RunContext, versions: Mapping[str, str] = {}, *, every: bool = False
) -> list[str]:
    """
    Return, a line each, which two files of the stack name releases of a project that exclude each
    other. What cannot be read now is left out, with a note.

    Args:
        versions: Fork → a release in place of that of stack.yaml.
        every: Read what each fork requires; else what the locked bases of grafts do.

    Raises:
        archive-unsafe: An official wheel is damaged.
    """
    project, lines, claims = context.project, list[str](), list[tuple[str, Requirement]]()
    settings = toolchain.spec(project).forks
    for fork, spec in project.spec.forks.items():
        version = versions.get(fork) or release(spec)
        # A branch or a commit is no release.
        with contextlib.suppress(InvalidRequirement):
            own = _exactly(settings[fork].distribution, version)
            claims.append((f"forks/{project.stack}/stack.yaml", own))
        if every or spec.bases:
            try:
                claims.extend(requirements(context, fork, versions.get(fork, "")))
            except SourceUnreachable as error:
                console.note(f"not all pins of {fork} were compared: {error.what}")
            except BuildError as error:
                lines.append(f"build/{project.stack}/environment.yaml: {error.what}")
    tools = project.build_folder / "requirements.in"
    for line in tools.read_text("utf-8").splitlines() if tools.exists() else ():
        with contextlib.suppress(InvalidRequirement):
            wanted = Requirement(line.partition("#")[0])
            claims.append((f"build/{project.stack}/{tools.name}", wanted))
    return lines + [
        f"{file} names {ours}, {other} {theirs}"
        for (file, ours), (other, theirs) in itertools.combinations(claims, 2)
        if file != other
        and canonicalize_name(ours.name) == canonicalize_name(theirs.name)
        and (ours.specifier & theirs.specifier).is_unsatisfiable()
    ]


def check(
    context: RunContext,
    versions: Mapping[str, str] = {},
    *,
    every: bool = False,
    force: bool = False,
) -> list[str]:
    """
    Check that the releases of the stack fit together, and return what does not.

    Args:
        versions, every: As for `disagreements`.
        force: Say what does not fit, and go on.

    Raises:
        pins-disagree: Releases do not fit together.
        archive-unsafe: An official wheel is damaged.
    """
    lines = disagreements(context, versions, every=every)
    if lines and not force:
        raise PinError(
            "pins-disagree",
            f"Releases of stack {context.project.stack} do not fit together.",
            details=lines,
            data={"pins": lines},
        )
    for line in lines:
        console.warn(f"--force-pin: {line}")
    return lines
