"""
The audit: every library of a wheel against the policy, from the bytes that would be installed.
"""

from __future__ import annotations

import re
import tempfile
from fnmatch import fnmatchcase
from pathlib import Path

from msgspec.structs import replace

from sparkwright.audit import code, elf, members
from sparkwright.audit.device import Case, inspect
from sparkwright.audit.policy import AuditPolicy
from sparkwright.audit.report import AuditReport, Finding, Library
from sparkwright.audit.sass import CudaTools
from sparkwright.console import console
from sparkwright.digest import canonical, sha256_bytes
from sparkwright.store import room_guard

_MANYLINUX = re.compile(r"manylinux_(\d+)_(\d+)_\w+")


def _check_host(host: elf.Host, case: Case, platforms: tuple[str, ...]) -> None:
    if host.machine in ("x86_64", "aarch64") and not all(platform.endswith(host.machine) for platform in platforms):
        case.find("machine-foreign", f"it is for {host.machine}, the wheel for {', '.join(platforms)}")
    promised = min(((int(found[1]), int(found[2])) for platform in platforms if (found := _MANYLINUX.fullmatch(platform))), default=None)
    if promised and elf.version_key(host.glibc) > promised:
        case.find("glibc-newer", f"it wants GLIBC {host.glibc}, the tag promises {promised[0]}.{promised[1]}")
    allowed = (*case.policy.needed, *(case.wants.needed if case.wants else ()))
    for name in host.needed:
        if not any(fnmatchcase(name, pattern) for pattern in allowed):
            case.find("needed-foreign", f"it wants {name}")
    for entry in host.rpath:
        if entry not in (case.wants.rpath if case.wants else ()):
            case.find("rpath-present", f"it looks for shared libraries in {entry}")


def _audit_library(binary: members.Binary, about: members.Subject, case: Case) -> Library:
    wants = case.wants
    library = Library(binary.name, binary.sha256, binary.size, wants.role if wants else "unknown")
    if wants is None:
        case.find("library-unknown", f"no policy for {about.name} names it")
    elif wants.size_max is not None and binary.size > wants.size_max:
        case.find("size-over", f"{binary.size} bytes, allowed: {wants.size_max}")
    try:
        host = elf.host(binary.path)
    except elf.ElfUnreadable as error:
        case.find("elf-unreadable", str(error))
        return library
    _check_host(host, case, about.platforms)
    library = replace(library, machine=host.machine, needed=host.needed, rpath=host.rpath, glibc=host.glibc, glibcxx=host.glibcxx)
    if host.device:
        return inspect(library, binary.path, host, case)
    if wants and wants.role == "target":
        case.find("arch-missing", "it holds no device code at all")
    return library


def audit(wheel: Path, policy: AuditPolicy, tools: CudaTools, *, scratch: Path | None = None) -> AuditReport:
    """
    Return what is in *wheel*, and where that is not what *policy* asks for.

    What the device-code digest covers is told in `sparkwright.audit.code`.

    Args:
        scratch: An existing folder for the libraries while they are read, one at a time, up to half a gigabyte for vLLM; the
            system's temporary folder by default.

    Raises:
        WheelInvalid: It is not a wheel, is damaged, is too large, or is another distribution than its name says.
        ArchiveUnsafe: A member's name leaves its folder, or it is a link.
        ToolMissing: *tools* lacks cuobjdump or nvdisasm, and the wheel holds device code.
        DiskFull: There is no room for the largest library and its cubins.
    """
    about = members.subject(wheel)
    findings: list[Finding] = []
    libraries: list[Library] = []

    def visit(binary: members.Binary) -> None:
        def find(rule: str, message: str) -> None:
            findings.append(Finding(binary.name, rule, message))

        wants = policy.library(about.name, binary.name)
        judged = replace(policy, arch=wants.arch) if wants and wants.arch else policy
        libraries.append(_audit_library(binary, about, Case(judged, wants, tools, find)))

    place = scratch or Path(tempfile.gettempdir())
    with (
        room_guard(place),
        tempfile.TemporaryDirectory(prefix="audit-", dir=place) as folder,
        console.progress(f"auditing {wheel.name}", 0, "bytes") as progress,
    ):
        mismatches = members.walk(wheel, about, Path(folder), visit, progress.update)
    findings += [Finding(mismatch.member, mismatch.rule, mismatch.message) for mismatch in mismatches]
    listed = policy.distributions.get(about.name)
    for wants in listed.libraries if listed else ():
        if wants.role == "target" and not any(policy.library(about.name, library.name) == wants for library in libraries):
            findings.append(Finding(wants.glob, "library-missing", "the policy asks for it"))
    return AuditReport(
        subject=about,
        target=policy.target,
        policy=sha256_bytes(canonical(policy)),
        libraries=tuple(sorted(libraries, key=lambda library: library.name)),
        findings=tuple(sorted(findings, key=lambda finding: (finding.library, finding.rule, finding.message))),
        device_code=code.of_libraries(library.device_code for library in libraries),
    )
