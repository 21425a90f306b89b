"""
What a wheel of ours is, from its bytes.

The wheel is read as hostile. Every member is compared with RECORD, the file name with METADATA and
WHEEL, and the libraries with the build record; nothing is unpacked to a name that the wheel gives.
"""

from __future__ import annotations

import csv
import re
import tempfile
from collections.abc import Mapping, Sequence
from email.message import Message
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
    """The texts of a wheel's ``.dist-info`` folder by name, its members, and RECORD."""

    texts: dict[str, bytes]
    members: frozenset[str]
    rows: dict[str, tuple[str, str]]


def read_all(paths: Sequence[Path], audit: AuditPolicy | None = None) -> tuple[WheelFacts, ...]:
    """
    Return what the wheels of one release are.

    Args:
        audit: The policy of the stack, by which device code is digested as the audit does it; None
            to read none.

    Raises:
        wheel-invalid: A file is no wheel, or damaged. archive-unsafe: A name leaves its folder.
        wheel-mismatch: File name, METADATA, WHEEL, RECORD, SBOM, build record and bytes of a wheel
            differ; or two wheels are of one project and machine; or the wheel from which modules
            were compiled is not among them.
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
    metadata = _check_metadata(name, contents.texts)
    subject = audit_wheel.read_subject(path)
    digests = _walk(path, subject, audit)
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
    _require_libraries(path.name, libraries, contents.rows)
    facts = WheelFacts(
        path=path,
        name=path.name,
        sha256=subject.sha256,
        size=subject.size,
        project=subject.name,
        version=str(metadata["Version"]),
        machine=_machine(path.name, subject),
        source=source,
        stack=stated.stack,
        content=wheel_content.of_wheel(contents.rows, name.info),
        metadata=contents.texts["METADATA"],
        requires_python=line(str(metadata["Requires-Python"] or "")),
        device_code=device_code.wheel_digest(digests),
        sbom=contents.texts.get(SBOM, b""),
        record=record,
        isolated=record.isolation not in ("", "none") if record and record.plan else None,
    )
    _check_sbom(facts)
    return facts


def _contents(path: Path) -> _Contents:
    name = WheelName.of(path.name)
    with zip_file(path) as wheel:
        listed = zip_members(wheel, path.name)
        tops = {member.partition("/")[0] for member in listed}
        own = (name.info, name.info.removesuffix(".dist-info") + ".data")
        foreign = sorted(top for top in tops if top.endswith((".dist-info", ".data")))
        if foreign := [top for top in foreign if top not in own]:
            raise WheelError(
                "wheel-mismatch", f"{path.name} has folders of another wheel.", details=foreign
            )
        wanted = ["METADATA", "WHEEL", "RECORD"]
        wanted += [text for text in (BUILD_RECORD, SBOM) if f"{name.info}/{text}" in listed]
        texts = {
            text: archive.member_text(wheel, listed, f"{name.info}/{text}", path.name)
            for text in wanted
        }
        rows = archive.records(wheel, listed, name.info, path.name)
        if len(rows) < sum(1 for row in csv.reader(texts["RECORD"].decode().splitlines()) if row):
            raise WheelError("wheel-invalid", f"RECORD of {path.name} has two rows of one name.")
    return _Contents(texts, frozenset(listed), rows)


def _headers(text: bytes) -> Message:
    return BytesParser().parsebytes(text, headersonly=True)


def _check_metadata(name: WheelName, texts: Mapping[str, bytes]) -> Message:
    """Return METADATA, having compared it and WHEEL with the file name."""
    metadata, wheel = _headers(texts["METADATA"]), _headers(texts["WHEEL"])
    names = [str(value) for value in metadata.get_all("Name", [])]
    versions = [str(value) for value in metadata.get_all("Version", [])]
    tags = [str(value) for value in wheel.get_all("Tag", [])]
    faults = []
    if [canonicalize_name(value) for value in names] != [canonicalize_name(name.distribution)]:
        faults.append(f"METADATA: Name {', '.join(names) or 'is missing'}")
    if versions != [name.version]:
        faults.append(f"METADATA: Version {', '.join(versions) or 'is missing'}")
    if {tag for value in tags for tag in parse_tag(value)} != parse_tag(name.tag):
        faults.append(f"WHEEL: Tag {', '.join(tags) or 'is missing'}")
    if faults:
        raise WheelError(
            "wheel-mismatch", f"{name.filename} is another wheel inside.", details=faults
        )
    return metadata


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


def _walk(path: Path, subject: AuditedWheel, audit: AuditPolicy | None) -> list[str]:
    """Return the digests of the device code of the ELF members."""
    digests: list[str] = []

    def visit(binary: audit_wheel.Binary) -> None:
        if audit is None:
            return
        try:
            with elf.mapped(binary.path) as data:
                wants = audit.library(subject.name, binary.name)
                compiled = wants is not None and wants.role == "target"
                shared = elf.shared_object(data)
                code = device_code.read(data, shared, audit.generation, compiled=compiled)
        except elf.ElfUnreadable:
            return
        digests.append(code.digest)

    findings = audit_wheel.walk(path, subject, Path(tempfile.gettempdir()), visit)
    if findings:
        raise WheelError(
            "wheel-mismatch",
            f"RECORD of {path.name} is not what it holds.",
            details=[f"{finding.library}: {finding.message}" for finding in findings[:20]],
        )
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
    tree, source, version = (
        record.source,
        record.source.source,
        Version(WheelName.of(path.name).version),
    )
    if tree.fork != source.fork:
        raise WheelError(
            "wheel-mismatch",
            f"The build record of {path.name} is about two forks.",
            details=[tree.fork, source.fork],
        )
    label = _CUDA.search(version.local or "")
    package = f"{WheelName.of(path.name).distribution}/include/"
    headers = any(member.startswith(package) for member in contents.members)
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


def _require_libraries(
    name: str, stated: Mapping[str, str], rows: Mapping[str, tuple[str, str]]
) -> None:
    """
    Require that the wheel *name* has the libraries that its build record states.

    Args:
        stated: Member → sha256. *rows*: RECORD.

    Raises:
        wheel-mismatch: It does not.
    """
    actual = {member: wheel_content.hexed(rows.get(member, ("", ""))[0]) for member in stated}
    if wrong := [member for member, sha256 in stated.items() if actual[member] != sha256]:
        raise WheelError(
            "wheel-mismatch",
            f"Libraries of {name} are not those that its build record names.",
            details=wrong[:20],
        )
