"""
The audit: every library of a wheel against the policy, from the bytes that would be installed.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Literal

from msgspec.structs import replace

from sparkwright.audit import device_code, tools, wheel_reader
from sparkwright.audit.library import DRIVER_FILES, LibraryAudit
from sparkwright.audit.policy import AuditPolicy, DistributionPolicy
from sparkwright.audit.report import (
    AuditedLibrary,
    AuditedWheel,
    AuditFinding,
    AuditReport,
    Checker,
)
from sparkwright.audit.tools import CheckerResult, HostLibrary
from sparkwright.audit.wheel_reader import Binary
from sparkwright.builder.wheel import elf
from sparkwright.builder.wheel.elf import ElfUnreadable
from sparkwright.core.digest import canonical, sha256_bytes
from sparkwright.core.errors import WheelError
from sparkwright.core.store import translate_disk_full

#: Libraries of torch, the CUDA wheels and the system.
_OTHERS = re.compile(
    r"lib(torch\w*|c10\w*|cudart|cublas\w*|cudnn\w*|cufft\w*|curand|cusolver\w*|cusparse\w*|cupti"
    r"|nvrtc[\w-]*|nvJitLink|nvshmem\w*|nccl|stdc\+\+|gcc_s|gomp|c|m|pthread|dl|rt)"
    r"(-[0-9a-f]{8})?\.so(\.\d+)*"
)
#: Bytes that the compressed device code of all libraries may unpack to: minutes of work.
MOST_UNPACKED = 64 * 1024**3
#: Distributions whose libraries these are.
_OWNERS = re.compile(r"torch|triton|nvidia-.+|cuda-.+")


def audit(
    wheel: Path,
    policy: AuditPolicy,
    programs: Path,
    *,
    scratch: Path | None = None,
    judged: Literal["stack", "any"] = "stack",
    checkers: Sequence[tools.Name] = tools.ALL,
) -> AuditReport:
    """
    Return the contents of *wheel*, and the differences from *policy*.

    `sparkwright.audit.device_code` describes the device-code digest.

    Args:
        programs: The folder of nvdisasm.
        scratch: An existing folder for the libraries while they are read; the system's temporary
            folder by default.
        judged: See `AuditReport.judged`.
        checkers: Other projects' tools to run; the others are reported as not run.

    Raises:
        wheel-invalid: It is not a wheel, is damaged, is too large, or is another distribution than
            its name states.
        archive-unsafe: A member's name leaves its folder, or it is a link.
        tool-missing: *programs* lacks nvdisasm, and a kernel is to be read.
        disk-full: There is no room for the largest library and its cubins.
    """
    about = wheel_reader.subject(wheel)
    contents = wheel_reader.contents(wheel, about)
    listed = policy.distributions.get(about.name) or DistributionPolicy("not listed")
    libraries, hosts, unpacked = list[AuditedLibrary](), list[HostLibrary](), 0
    findings = [*_whole(about, contents.names, listed)]
    parent = scratch or Path(tempfile.gettempdir())
    with (
        translate_disk_full(parent),
        tempfile.TemporaryDirectory(prefix="audit-", dir=parent) as temporary,
        ThreadPoolExecutor(2) as pool,
    ):
        folder = Path(temporary)
        runs = {
            "abi3audit": partial(tools.abi3, about, contents, hosts, folder),
            "torch-abi-audit": partial(
                tools.torch,
                contents,
                hosts,
                lambda name: (
                    (wants := policy.library(about.name, name)) is not None
                    and wants.torch == "stable"
                ),
                folder,
            ),
            "auditwheel": partial(tools.platform_tag, wheel, about, folder),
        }

        def visit(binary: Binary) -> None:
            nonlocal unpacked
            unpacked += _packed_bytes(binary)
            if unpacked > MOST_UNPACKED:
                what = f"{about.file} holds more device code than any wheel."
                raise WheelError("wheel-invalid", what, details=[f"library: {binary.name}"])
            library = LibraryAudit(
                policy, about.name, binary.name, contents, programs, ours=judged == "stack"
            )
            libraries.append(_inspect(library, binary, about, hosts, folder))
            findings.extend(library.findings)

        # auditwheel reads the wheel itself; the others need the libraries.
        late = ("abi3audit", "torch-abi-audit")
        jobs = {name: pool.submit(runs[name]) for name in checkers if name not in late}
        findings += wheel_reader.walk(wheel, about, folder, visit)
        jobs |= {name: pool.submit(runs[name]) for name in checkers if name not in jobs}
        skipped = "it was not asked for"
        outcomes = [
            jobs[name].result()
            if name in jobs
            else CheckerResult(Checker(name, "not-run", skipped))
            for name in tools.ALL
        ]
    if judged == "stack":
        present = [policy.library(about.name, library.name) for library in libraries]
        findings += [
            AuditFinding(wants.glob, "library-missing", "the policy asks for it")
            for wants in listed.libraries
            if wants.role == "target" and wants not in present
        ]
    findings += [finding for outcome in outcomes for finding in outcome.findings]
    return AuditReport(
        subject=about,
        target=policy.target,
        policy=sha256_bytes(canonical(policy)),
        libraries=tuple(sorted(libraries, key=lambda library: library.name)),
        findings=tuple(sorted(findings)),
        device_code=device_code.wheel_digest(library.device_code for library in libraries),
        judged=judged,
        checkers=tuple(outcome.checker for outcome in outcomes),
    )


def _whole(
    about: AuditedWheel, names: Sequence[str], listed: DistributionPolicy
) -> Iterator[AuditFinding]:
    """Yield findings about the wheel's size, and copies of others' libraries among its members."""
    if listed.size_max is not None and about.size > listed.size_max:
        yield AuditFinding("", "size-over", f"{about.size} bytes, allowed: {listed.size_max}")
    if _OWNERS.fullmatch(about.name):
        return
    for name in names:
        folder, _, file = name.rpartition("/")
        if DRIVER_FILES.fullmatch(file):
            message = "the driver is the machine's own, and a copy of another version breaks it"
            yield AuditFinding(name, "vendored-driver", message)
        elif _OTHERS.fullmatch(file) or folder.partition("/")[0].endswith(".libs"):
            message = "two copies of a library in one process do not share their state"
            yield AuditFinding(name, "vendored-library", message)


def _packed_bytes(binary: Binary) -> int:
    """Return `device_code.packed_bytes` of a library; 0 for one that cannot be read."""
    try:
        with elf.mapped(binary.path) as data:
            return device_code.packed_bytes(data, elf.shared_object(data))
    except ElfUnreadable:
        return 0


def _inspect(
    audited: LibraryAudit,
    binary: Binary,
    about: AuditedWheel,
    hosts: list[HostLibrary],
    folder: Path,
) -> AuditedLibrary:
    """Return the contents of one library, and add it without its device code to *hosts*."""
    wants = audited.wants
    library = AuditedLibrary(
        binary.name, binary.sha256, binary.size, wants.role if wants else "unknown"
    )
    if wants is None and audited.ours:
        audited.find("library-unknown", f"no policy for {about.name} names it")
    elif wants and wants.size_max is not None and binary.size > wants.size_max:
        audited.find("size-over", f"{binary.size} bytes, allowed: {wants.size_max}")
    try:
        with elf.mapped(binary.path) as data, tempfile.TemporaryDirectory(dir=folder) as cubins:
            shared = elf.shared_object(data)
            audited.check_host(data, shared, about.platforms)
            library = replace(library, machine=shared.machine)
            # Two members may have the same last part, and a checker goes by the end of a name.
            path = folder / str(len(hosts)) / binary.name.rpartition("/")[2][-120:]
            tools.strip_fatbins(data, shared.fatbins, path)
            hosts.append(HostLibrary(library.name, path, shared.needed))
            library = audited.check_device(library, data, shared, Path(cubins))
    except ElfUnreadable as error:
        audited.find("elf-unreadable", str(error))
    return library
