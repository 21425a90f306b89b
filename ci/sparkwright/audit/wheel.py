"""
The audit: every library of a wheel against the policy, from the bytes that would be installed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Literal

from msgspec.structs import replace

from sparkwright.audit import checkers, device, device_code, gpu_compat, host, wheel_reader
from sparkwright.audit.checkers import Checker, HostLibrary, Outcome
from sparkwright.audit.device import Case
from sparkwright.audit.policy import AuditPolicy
from sparkwright.audit.report import AuditReport, Finding, Library
from sparkwright.audit.sass import CudaTools
from sparkwright.audit.wheel_reader import Binary, Contents, Subject
from sparkwright.builder.wheel import elf
from sparkwright.builder.wheel.elf import Buffer, ElfUnreadable
from sparkwright.core.console import console
from sparkwright.core.digest import canonical, sha256_bytes
from sparkwright.core.store import room_guard

Judged = Literal["stack", "any"]


class _Audit:
    """An audit in progress: its inputs, and its findings so far."""

    def __init__(
        self,
        about: Subject,
        contents: Contents,
        policy: AuditPolicy,
        tools: CudaTools,
        judged: Judged,
        folder: Path,
    ) -> None:
        self.about, self.contents, self.policy, self.tools = about, contents, policy, tools
        self.ours, self.folder = judged == "stack", folder
        self.findings: list[Finding] = []
        self.libraries: list[Library] = []
        self.host_libraries: list[HostLibrary] = []

    def _case(self, name: str) -> Case:
        wants = self.policy.library(self.about.name, name)
        policy = replace(self.policy, arch=wants.arch) if wants and wants.arch else self.policy
        units = tuple(unit for unit in self.contents.units if unit.library in (name, ""))

        def find(rule: str, message: str, units: Sequence[str] = ()) -> None:
            self.findings.append(Finding(name, rule, message, tuple(units)))

        capability = gpu_compat.capability(self.policy.arch)
        return Case(policy, wants, self.tools, find, capability, self.ours, units)

    def visit(self, binary: Binary) -> None:
        """Read one library."""
        case = self._case(binary.name)
        wants = case.wants
        library = Library(
            binary.name, binary.sha256, binary.size, wants.role if wants else "unknown"
        )
        if wants is None and self.ours:
            case.find("library-unknown", f"no policy for {self.about.name} names it")
        elif wants and wants.size_max is not None and binary.size > wants.size_max:
            case.find("size-over", f"{binary.size} bytes, allowed: {wants.size_max}")
        try:
            with elf.mapped(binary.path) as data:
                library = self._read(library, data, case)
        except ElfUnreadable as error:
            case.find("elf-unreadable", str(error))
        self.libraries.append(library)

    def _read(self, library: Library, data: Buffer, case: Case) -> Library:
        shared = elf.shared_object(data)
        host.check(shared, case, self.about.platforms)
        implemented, declared = host.operators(data, elf.sections(data), shared, case)
        library = replace(
            library,
            machine=shared.machine,
            needed=shared.needed,
            rpath=shared.rpath,
            glibc=shared.version("GLIBC"),
            glibcxx=shared.version("GLIBCXX"),
            operators=implemented,
            declared=declared,
        )
        # A folder each, as two members may have the same last part; a tool judges by the end of a
        # name.
        path = self.folder / str(len(self.host_libraries)) / library.name.rpartition("/")[2][-120:]
        copy = checkers.strip_fatbins(data, shared.fatbins, path)
        self.host_libraries.append(HostLibrary(library.name, copy, shared.needed))
        if shared.has_device_code:
            with tempfile.TemporaryDirectory(dir=self.folder) as folder:
                return device.inspect(library, data, shared, case, Path(folder))
        if case.target:
            case.find(
                "arch-missing",
                "it holds no device code at all",
                [unit.name for unit in case.units if unit.library],
            )
        return library

    def check_whole(self, mismatches: Sequence[wheel_reader.Mismatch]) -> None:
        """Report what concerns the wheel as a whole."""
        self.findings += [
            Finding(mismatch.member, mismatch.rule, mismatch.message) for mismatch in mismatches
        ]
        self.findings += [
            Finding(*copy) for copy in host.copies(self.about.name, self.contents.names)
        ]
        listed = self.policy.distributions.get(self.about.name)
        if listed and listed.size_max is not None and self.about.size > listed.size_max:
            self.findings.append(
                Finding("", "size-over", f"{self.about.size} bytes, allowed: {listed.size_max}")
            )
        policies = [
            self.policy.library(self.about.name, library.name) for library in self.libraries
        ]
        for wants in listed.libraries if listed and self.ours else ():
            if wants.role == "target" and wants not in policies:
                self.findings.append(
                    Finding(wants.glob, "library-missing", "the policy asks for it")
                )

    def stable(self, name: str) -> bool:
        """Return whether the policy wants the member *name* to use torch's stable ABI alone."""
        wants = self.policy.library(self.about.name, name)
        return wants is not None and wants.torch == "stable"


def audit(
    wheel: Path,
    policy: AuditPolicy,
    tools: CudaTools,
    *,
    scratch: Path | None = None,
    judged: Judged = "stack",
    which: Sequence[checkers.Name] = checkers.ALL,
) -> AuditReport:
    """
    Return what is in *wheel*, and where that is not what *policy* asks for.

    `sparkwright.audit.device_code` describes the device-code digest.

    Args:
        scratch: An existing folder for the libraries while they are read, one at a time, up to half
            a
            gigabyte for vLLM; the system's temporary folder by default.
        judged: See `AuditReport.judged`.
        which: Others' tools to run, where the wheel has what they check; those left out are
            reported as
            not run.

    Raises:
        wheel-invalid: It is not a wheel, is damaged, is too large, or is another distribution than
            its
            name says.
        archive-unsafe: A member's name leaves its folder, or it is a link.
        tool-missing: *tools* lacks nvdisasm, and a kernel is to be read.
        disk-full: There is no room for the largest library and its cubins.
    """
    about = wheel_reader.subject(wheel)
    contents = wheel_reader.contents(wheel, about)
    parent = scratch or Path(tempfile.gettempdir())
    with (
        room_guard(parent),
        tempfile.TemporaryDirectory(prefix="audit-", dir=parent) as temporary,
        console.progress(f"auditing {wheel.name}", 0, "bytes") as progress,
        ThreadPoolExecutor(2) as pool,
    ):
        folder = Path(temporary)
        state = _Audit(about, contents, policy, tools, judged, folder)
        answers = folder / "checkers"
        answers.mkdir()
        runs = {
            "abi3audit": partial(checkers.abi3, about, contents, state.host_libraries, answers),
            "torch-abi-audit": partial(
                checkers.torch, contents, state.host_libraries, state.stable, answers
            ),
            "auditwheel": partial(checkers.platform_tag, wheel, about, answers),
        }
        # auditwheel reads the wheel itself; the others need the libraries.
        early = pool.submit(runs.pop("auditwheel")) if "auditwheel" in which else None
        state.check_whole(wheel_reader.walk(wheel, about, folder, state.visit, progress.update))
        jobs = {name: pool.submit(run) for name, run in runs.items() if name in which}
        jobs |= {"auditwheel": early} if early else {}
        left_out = {
            name: Outcome(Checker(name, "not-run", "it was not asked for")) for name in checkers.ALL
        }
        outcomes = [
            jobs[name].result() if name in jobs else left_out[name] for name in checkers.ALL
        ]
    findings = [
        *state.findings,
        *(Finding(*one) for outcome in outcomes for one in outcome.findings),
    ]
    return AuditReport(
        subject=about,
        target=policy.target,
        policy=sha256_bytes(canonical(policy)),
        libraries=tuple(sorted(state.libraries, key=lambda library: library.name)),
        findings=tuple(
            sorted(
                findings,
                key=lambda finding: (finding.library, finding.rule, finding.message, finding.units),
            )
        ),
        device_code=device_code.wheel_digest(library.device_code for library in state.libraries),
        judged=judged,
        checkers=tuple(outcome.checker for outcome in outcomes),
    )
