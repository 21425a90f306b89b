"""
What a wheel of ours is, from its bytes.

The wheel is read as hostile, and checked as the client does before an installation. WHEEL, the SBOM
and the libraries are then compared with its name and its build record.
"""

from __future__ import annotations

import contextlib
import re
import tempfile
from collections.abc import Mapping, Sequence
from email.parser import BytesParser
from pathlib import Path

import msgspec
from packaging.tags import parse_tag
from packaging.utils import canonicalize_name
from packaging.version import Version

from sparkwright.audit import device_code
from sparkwright.audit import wheel as audit_wheel
from sparkwright.audit.policy import AuditPolicy
from sparkwright.audit.report import AuditedWheel
from sparkwright.builder.pipeline import BuildRecord
from sparkwright.builder.wheel import archive, elf
from sparkwright.builder.wheel.archive import BUILD_RECORD, SBOM, WheelName
from sparkwright.builder.wheel.flashinfer_aot import JitCacheRecord
from sparkwright.client import wheel_check
from sparkwright.client.locked_wheels import LockedWheel
from sparkwright.client.records import (
    ForkSource,
    Machine,
    ReleasePatch,
    ReleaseWheel,
    line,
)
from sparkwright.core.errors import WheelError
from sparkwright.core.zips import zip_file, zip_members
from sparkwright.release import wheel_content

#: The end of a platform tag → the machine.
MACHINES: Mapping[str, Machine] = {"any": "any", "x86_64": "x86_64", "aarch64": "aarch64"}

_CUDA = re.compile(r"(?:^|\.)(cu\d+)\Z")


class WheelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """
    A wheel.

    Attributes:
        source: Where its fork comes from; of precompiled modules, where their sources do.
        record: Its build record; None for precompiled modules, whose record is another.
        isolated: Whether the compilation had no network; None without one, or if unknown.
        metadata: METADATA. *sbom*: the one inside; empty if there is none.
    """

    path: Path
    name: str
    sha256: str
    size: int
    project: str
    version: str
    machine: Machine
    source: ForkSource
    stack: str
    content: str
    metadata: bytes
    requires_python: str = ""
    device_code: str = ""
    sbom: bytes = b""
    record: BuildRecord | None = None
    isolated: bool | None = None


class _Contents(msgspec.Struct):
    """The texts of a wheel's ``.dist-info`` folder by name, and the sha256 of its files."""

    texts: dict[str, bytes]
    files: dict[str, str]


def read_all(paths: Sequence[Path], audit: AuditPolicy | None = None) -> tuple[WheelFacts, ...]:
    """
    Return what the wheels of one release are.

    Args:
        audit: The policy of the stack, by which device code is digested as the audit does it; None
            to read none.

    Raises:
        wheel-invalid, wheel-unsafe, archive-unsafe: A client would refuse a file; see
            `sparkwright.client.wheel_check`.
        wheel-mismatch: Likewise; or WHEEL, SBOM, build record and bytes of a wheel differ; or two
            wheels are of one project and machine; or the wheel from which modules were compiled is
            not among them.
        disk-full: There is no room for the largest library.
    """
    contents = {path: _contents(path) for path in paths}
    sources: dict[str, WheelFacts] = {}
    # Precompiled modules name the wheel of their sources, which is read before them.
    ordered = sorted(
        paths, key=lambda path: isinstance(_record(path, contents[path]), JitCacheRecord)
    )
    for path in ordered:
        facts = _read(path, contents[path], audit, sources)
        sources[facts.sha256] = facts
    every = {facts.path: facts for facts in sources.values()}
    keys = [(facts.project, facts.machine) for facts in every.values()]
    if twice := sorted({f"{key[0]} for {key[1]}" for key in keys if keys.count(key) > 1}):
        raise WheelError(
            "wheel-mismatch",
            "A release holds one wheel of a project for each machine.",
            details=twice,
        )
    return tuple(every[path] for path in paths if path in every)


def from_record(wheel: ReleaseWheel, source: ForkSource, stack: str, index: Path) -> WheelFacts:
    """
    Return what a published wheel is, by its signed record; its bytes are not read.

    Args:
        index: The folder of the index, in which its SBOM lies.
    """
    return WheelFacts(
        path=index / wheel.path,
        name=wheel.name,
        sha256=wheel.sha256,
        size=wheel.size,
        project=wheel.project,
        version=wheel.version,
        machine=wheel.machine,
        source=source,
        stack=stack,
        content=wheel.content,
        metadata=b"",
        requires_python=wheel.requires_python,
        device_code=wheel.device_code,
        sbom=(index / wheel.sbom.path).read_bytes() if wheel.sbom else b"",
        isolated=wheel.isolated,
    )


def _read(
    path: Path,
    contents: _Contents,
    audit: AuditPolicy | None,
    sources: Mapping[str, WheelFacts],
) -> WheelFacts:
    name = WheelName.of(path.name)
    subject = audit_wheel.read_subject(path)
    digests = _device_code(path, subject, audit) if audit else []
    stated = _record(path, contents)
    record: BuildRecord | None = None
    libraries: dict[str, str] = {}
    if isinstance(stated, JitCacheRecord):
        modules = stated
        if modules.sources not in sources:
            raise WheelError(
                "wheel-mismatch",
                f"{path.name} was compiled from a wheel that is not among these.",
                details=[f"sha256 {modules.sources}"],
                todo="Also name the wheel of FlashInfer that it was compiled from.",
            )
        source = sources[modules.sources].source
        folder = f"{name.distribution}/jit_cache"
        for module, sha256 in modules.modules.items():
            libraries[f"{folder}/{module}/{module}.so"] = sha256
    else:
        record = stated
        source = _source(path, contents, record)
        if transplant := record.transplant:
            base = transplant.base.items()
            libraries = {member: wheel_content.hexed(digest) for member, digest in base}
            libraries |= transplant.libraries
    own = contents.files
    if wrong := [member for member, sha256 in libraries.items() if own.get(member) != sha256]:
        raise WheelError(
            "wheel-mismatch",
            f"Libraries of {path.name} are not those that its build record names.",
            details=wrong[:20],
        )
    facts = WheelFacts(
        path=path,
        name=path.name,
        sha256=subject.sha256,
        size=subject.size,
        project=subject.name,
        version=name.version,
        machine=_machine(path.name, subject),
        source=source,
        stack=stated.stack,
        content=wheel_content.of_wheel(contents.files, name.info),
        metadata=contents.texts["METADATA"],
        requires_python=line(_headers(contents.texts["METADATA"], "Requires-Python", [""])[0]),
        device_code=device_code.wheel_digest(digests),
        sbom=contents.texts.get(SBOM, b""),
        record=record,
        isolated=record.isolation not in ("", "none") if record and record.plan else None,
    )
    _check_sbom(facts)
    return facts


def _contents(path: Path) -> _Contents:
    name = WheelName.of(path.name)
    project = canonicalize_name(name.distribution)
    locked = LockedWheel(project, name.version, path.name, url="", sha256="")
    checked = wheel_check.check_wheel(locked, path, "lib/python3/site-packages")
    with zip_file(path) as wheel:
        listed = zip_members(wheel, path.name)
        wanted = ["METADATA", "WHEEL"]
        wanted += [text for text in (BUILD_RECORD, SBOM) if f"{name.info}/{text}" in listed]
        texts = {
            text: archive.member_text(wheel, listed, f"{name.info}/{text}", path.name)
            for text in wanted
        }
    tags = _headers(texts["WHEEL"], "Tag", [])
    if {tag for value in tags for tag in parse_tag(value)} != parse_tag(name.tag):
        raise WheelError(
            "wheel-mismatch",
            f"{path.name} is another wheel inside.",
            details=[f"WHEEL: Tag {', '.join(tags) or 'is missing'}"],
        )
    return _Contents(texts, {member: sha256 for member, sha256, _ in checked.files.values()})


def _headers(text: bytes, field: str, default: list[str]) -> list[str]:
    """Return the values of *field* in METADATA or WHEEL."""
    return list(map(str, BytesParser().parsebytes(text, headersonly=True).get_all(field, default)))


def _check_sbom(facts: WheelFacts) -> None:
    """Require that the SBOM, if there is one, is a CycloneDX document about this wheel."""
    if not facts.sbom:
        return
    about: tuple[str, str, str]
    try:
        document = msgspec.json.decode(facts.sbom)
        component = document["metadata"]["component"]
        about = (document["bomFormat"], canonicalize_name(component["name"]), component["version"])
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        about = ("unreadable", str(error), "")
    if about != ("CycloneDX", facts.project, facts.version):
        raise WheelError(
            "wheel-mismatch",
            f"The SBOM of {facts.name} is about another wheel.",
            details=[f"{about!r:.300}"],
        )


def _machine(name: str, subject: AuditedWheel) -> Machine:
    machines = {
        next((MACHINES[end] for end in MACHINES if tag.endswith(end)), None)
        for tag in subject.platforms
    }
    machine = machines.pop()
    if machines or machine is None:
        raise WheelError(
            "wheel-mismatch",
            f"{name} is for several machines, or for none that is served.",
            details=subject.platforms,
        )
    return machine


def _device_code(path: Path, subject: AuditedWheel, audit: AuditPolicy) -> list[str]:
    """Return the digests of the device code of the ELF members."""
    digests: list[str] = []

    def visit(binary: audit_wheel.Binary) -> None:
        with contextlib.suppress(elf.ElfUnreadable), elf.mapped(binary.path) as data:
            wants = audit.library(subject.name, binary.name)
            compiled = wants is not None and wants.role == "target"
            shared = elf.shared_object(data)
            code = device_code.read(data, shared, audit.generation, compiled=compiled)
            digests.append(code.digest)

    audit_wheel.walk(path, subject, Path(tempfile.gettempdir()), visit)
    return digests


def _record(path: Path, contents: _Contents) -> BuildRecord | JitCacheRecord:
    text = contents.texts.get(BUILD_RECORD)
    version = Version(WheelName.of(path.name).version)
    if text is None or not (version.local or "").startswith("spark."):
        raise WheelError(
            "wheel-mismatch",
            f"{path.name} was not built by sparkwright.",
            details=["no build record" if text is None else "no local version label spark.…"],
        )
    faults = []
    kinds: tuple[type[BuildRecord | JitCacheRecord], ...] = (BuildRecord, JitCacheRecord)
    for kind in kinds:
        try:
            return msgspec.json.decode(text, type=kind)
        except (ValueError, RecursionError) as error:
            faults.append(str(error))
    raise WheelError(
        "wheel-mismatch", f"The build record of {path.name} cannot be read.", details=faults
    )


def _source(path: Path, contents: _Contents, record: BuildRecord) -> ForkSource:
    name, tree, source = WheelName.of(path.name), record.source, record.source.source
    version = Version(name.version)
    if tree.fork != source.fork:
        raise WheelError(
            "wheel-mismatch",
            f"The build record of {path.name} is about two forks.",
            details=[tree.fork, source.fork],
        )
    label = _CUDA.search(version.local or "")
    package = f"{name.distribution}/include/"
    headers = any(member.startswith(package) for member in contents.files)
    built = "headers" if headers else "backend"
    if record.plan:
        built = "graft" if record.base else "full"
    return ForkSource(
        name=tree.fork,
        version=version.public,
        kind=source.kind,
        origin=line(source.origin),
        pin=source.pin,
        tree=source.tree,
        resolved=source.resolved,
        built=built,
        source_tree=tree.tree,
        base=record.base,
        patches=tuple(
            ReleasePatch(
                line(step.name), step.sha256, line(step.subject), line(step.reason), step.pick
            )
            for step in tree.steps
        ),
        sites=len(tree.sites),
        cuda=label[1] if label else "",
        isolation=record.isolation,
    )
