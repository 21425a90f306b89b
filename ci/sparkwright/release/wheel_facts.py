"""
What a wheel of ours is, from its bytes.

The wheel is read as hostile, and checked as the client does before an installation.
"""

import re
from collections.abc import Collection, Sequence
from email.parser import BytesParser
from pathlib import Path

import msgspec
from packaging.tags import Tag, parse_tag
from packaging.utils import canonicalize_name
from packaging.version import Version

from sparkwright.audit import wheel as audit_wheel
from sparkwright.audit.report import AuditedWheel
from sparkwright.bench.server import wheel_identity
from sparkwright.builder.pipeline import BuildRecord
from sparkwright.builder.wheel.archive import BUILD_RECORD, SBOM, WheelName
from sparkwright.client import locked_wheels
from sparkwright.client.records import (
    ForkSource,
    Machine,
    Proof,
    ReleasePatch,
    ReleaseWheel,
    line,
)
from sparkwright.core.errors import WheelError
from sparkwright.core.files import sha256_bytes
from sparkwright.core.zips import member_text, zip_file, zip_members

#: Stands for the site-packages of any Python, whose name decides nothing.
SITE = "lib/python3/site-packages"
#: The ends of platform tags.
MACHINES: tuple[Machine, ...] = ("any", "x86_64", "aarch64")

_CUDA = re.compile(r"(?:^|\.)(cu\d+)\Z")


class WheelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """
    A wheel.

    Attributes:
        path: Where it lies.
        wheel: What a release says of it, as far as the wheel shows it itself.
        source: Where its fork comes from.
        metadata: METADATA. *sbom*: the one inside; empty if there is none.
        record: Its build record, and *checked*, what an installer writes, with `SITE` as
            site-packages. A published wheel is known by *wheel* alone and was not read: they are
            None, and *metadata* and *sbom* empty.
    """

    path: Path
    wheel: ReleaseWheel
    source: ForkSource
    stack: str
    metadata: bytes = b""
    sbom: bytes = b""
    record: BuildRecord | None = None
    checked: locked_wheels.CheckedWheel | None = None


def read_all(paths: Sequence[Path]) -> tuple[WheelFacts, ...]:
    """
    Return what the wheels of one release are.

    Raises:
        wheel-invalid, wheel-unsafe, archive-unsafe: A client would refuse a file; see
            `sparkwright.client.locked_wheels`.
        wheel-mismatch: Likewise; or WHEEL is of another wheel, or the build record of none; or two
            wheels are of one project and machine.
    """
    facts = dict[str, WheelFacts]()
    for read in map(_read, paths):
        key = f"{read.wheel.project} for {read.wheel.machine}"
        if key in facts:
            raise WheelError(
                "wheel-mismatch",
                "A release holds one wheel of a project for each machine.",
                details=[key],
            )
        facts[key] = read
    return tuple(facts.values())


def _headers(text: bytes, field: str) -> list[str]:
    """Return the values of *field* in METADATA or WHEEL."""
    return list(map(str, BytesParser().parsebytes(text, headersonly=True).get_all(field, [])))


def _read(path: Path) -> WheelFacts:
    name = WheelName.parse(path.name)
    locked = locked_wheels.LockedWheel(
        canonicalize_name(name.distribution), name.version, path.name, url="", sha256=""
    )
    checked = locked_wheels.check_wheel(locked, path, SITE)
    info, texts = checked.info.rpartition("/")[2], dict[str, bytes]()
    with zip_file(path) as wheel:
        listed = zip_members(wheel, path.name)
        for text in ("METADATA", "WHEEL", BUILD_RECORD, SBOM):
            if f"{info}/{text}" in listed:
                texts[text] = member_text(wheel, listed, f"{info}/{text}")
    tags = _headers(texts["WHEEL"], "Tag")
    if set[Tag]().union(*map(parse_tag, tags)) != parse_tag(name.tag):
        raise WheelError(
            "wheel-mismatch",
            f"{path.name} is another wheel inside.",
            details=[f"WHEEL: Tag {', '.join(tags) or 'is missing'}"],
        )
    if BUILD_RECORD not in texts:
        raise WheelError("wheel-mismatch", f"{path.name} was not built by sparkwright.")
    try:
        record = msgspec.json.decode(texts[BUILD_RECORD], type=BuildRecord)
    except (ValueError, RecursionError) as error:
        raise WheelError(
            "wheel-mismatch",
            f"The build record of {path.name} cannot be read.",
            details=[str(error)],
        ) from error
    files = {member: sha256 for member, sha256, _ in checked.files.values()}
    metadata, subject = texts["METADATA"], audit_wheel.read_subject(path)
    return WheelFacts(
        path=path,
        wheel=ReleaseWheel(
            name=path.name,
            size=subject.size,
            sha256=subject.sha256,
            fork=record.source.fork,
            project=subject.name,
            version=name.version,
            machine=_machine(path.name, subject),
            metadata=sha256_bytes(metadata),
            uploaded="",
            proof=Proof(policy=""),
            requires_python=line("".join(_headers(metadata, "Requires-Python")[:1])),
            content=wheel_identity.content_digest(files, info),
            isolated=record.isolation not in ("", "none") if record.plan else None,
        ),
        source=_source(name, files, record),
        stack=record.stack,
        metadata=metadata,
        sbom=texts.get(SBOM, b""),
        record=record,
        checked=checked,
    )


def _machine(name: str, subject: AuditedWheel) -> Machine:
    for machine in MACHINES:
        if all(tag.endswith(machine) for tag in subject.platforms):
            return machine
    raise WheelError(
        "wheel-mismatch",
        f"{name} is for several machines, or for none that is served.",
        details=subject.platforms,
    )


def _source(name: WheelName, members: Collection[str], record: BuildRecord) -> ForkSource:
    tree, source, version = record.source, record.source.source, Version(name.version)
    label = _CUDA.search(version.local or "")
    built = "backend"
    if record.plan:
        built = "graft" if record.base else "full"
    elif any(member.startswith(f"{name.distribution}/include/") for member in members):
        built = "headers"
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
