"""
The audit: every library of a wheel against the policy, from the bytes that would be installed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Literal

from msgspec.structs import replace

from sparkwright.audit import abi, checkers, device_code, elf, elf_sections, gpu_compat, host, platform_tag, wheel_reader
from sparkwright.audit.checkers import Half, Outcome
from sparkwright.audit.device import Case, inspect
from sparkwright.audit.elf_sections import Buffer, ElfUnreadable
from sparkwright.audit.policy import AuditPolicy
from sparkwright.audit.report import AuditReport, Finding, Library
from sparkwright.audit.sass import CudaTools
from sparkwright.audit.wheel_reader import Binary, Contents, Subject
from sparkwright.core.console import console
from sparkwright.core.digest import canonical, sha256_bytes
from sparkwright.core.store import room_guard


class _Audit:
    """One audit while it goes on: what it was asked, and what it has found so far."""

    def __init__(self, about: Subject, contents: Contents, policy: AuditPolicy, tools: CudaTools, *, ours: bool, folder: Path) -> None:
        self.about, self.contents, self.policy, self.tools, self.ours, self.folder = about, contents, policy, tools, ours, folder
        self.findings: list[Finding] = []
        self.libraries: list[Library] = []
        self.halves: list[Half] = []

    def _case(self, name: str) -> Case:
        wants = self.policy.library(self.about.name, name)
        judged = replace(self.policy, arch=wants.arch) if wants and wants.arch else self.policy

        def find(rule: str, message: str) -> None:
            self.findings.append(Finding(name, rule, message))

        return Case(judged, wants, self.tools, find, gpu_compat.capability(self.policy.arch), self.ours)

    def visit(self, binary: Binary) -> None:
        """Read one library."""
        case = self._case(binary.name)
        wants = case.wants
        library = Library(binary.name, binary.sha256, binary.size, wants.role if wants else "unknown")
        if wants is None and self.ours:
            case.find("library-unknown", f"no policy for {self.about.name} names it")
        elif wants and wants.size_max is not None and binary.size > wants.size_max:
            case.find("size-over", f"{binary.size} bytes, allowed: {wants.size_max}")
        try:
            with elf_sections.mapped(binary.path) as data:
                library = self._read(library, data, case)
        except ElfUnreadable as error:
            case.find("elf-unreadable", str(error))
        self.libraries.append(library)

    def _read(self, library: Library, data: Buffer, case: Case) -> Library:
        found = elf.host(data)
        host.check(found, case, self.about.platforms)
        registered = host.registered(data, elf_sections.sections(data), found, case)
        declared = tuple(name for name in registered.declared if name not in registered.implemented)
        library = replace(
            library, machine=found.machine, needed=found.needed, rpath=found.rpath, glibc=found.glibc, glibcxx=found.glibcxx,
            operators=registered.implemented, declared=declared,
        )  # fmt: skip
        # A folder each, as two members may have the same last part; a tool judges by the end of a name.
        place = checkers.half(data, found.fatbins, self.folder / str(len(self.halves)) / library.name.rpartition("/")[2][-120:])
        self.halves.append(Half(library.name, place, found.needed))
        if found.device:
            with tempfile.TemporaryDirectory(dir=self.folder) as folder:
                return inspect(library, data, found, case, Path(folder))
        if case.target:
            case.find("arch-missing", "it holds no device code at all")
        return library

    def check_whole(self, mismatches: Sequence[wheel_reader.Mismatch]) -> None:
        """Find what concerns the wheel as a whole."""
        self.findings += [Finding(mismatch.member, mismatch.rule, mismatch.message) for mismatch in mismatches]
        self.findings += [Finding(*copy) for copy in host.copies(self.about.name, self.contents.names)]
        listed = self.policy.distributions.get(self.about.name)
        if listed and listed.size_max is not None and self.about.size > listed.size_max:
            self.findings.append(Finding("", "size-over", f"{self.about.size} bytes, allowed: {listed.size_max}"))
        for wants in listed.libraries if listed and self.ours else ():
            there = any(self.policy.library(self.about.name, library.name) == wants for library in self.libraries)
            if wants.role == "target" and not there:
                self.findings.append(Finding(wants.glob, "library-missing", "the policy asks for it"))

    def stable(self, name: str) -> bool:
        """Return whether the policy wants the member *name* to use torch's stable ABI alone."""
        wants = self.policy.library(self.about.name, name)
        return wants is not None and wants.torch == "stable"


def _elsewhere(wheel: Path, audit: _Audit, which: Sequence[checkers.Name], pool: ThreadPoolExecutor) -> Callable[[], list[Outcome]]:
    """Start auditwheel, which reads the wheel itself; return what starts the others, once the libraries were read, and waits for all."""
    scratch = audit.folder / "checkers"
    scratch.mkdir()
    begun: Future[Outcome] | None = pool.submit(platform_tag.platform_tag, wheel, audit.about, scratch) if "auditwheel" in which else None

    def rest() -> list[Outcome]:
        jobs: dict[checkers.Name, Future[Outcome] | None] = {"auditwheel": begun}
        if "abi3audit" in which:
            jobs["abi3audit"] = pool.submit(abi.abi3, audit.about, audit.contents, audit.halves, scratch)
        if "torch-abi-audit" in which:
            jobs["torch-abi-audit"] = pool.submit(abi.torch, audit.contents, audit.halves, audit.stable, scratch)
        left_out = {name: Outcome(checkers.Checker(name, "not-run", "it was not asked for")) for name in checkers.ALL}
        return [job.result() if (job := jobs.get(name)) else left_out[name] for name in checkers.ALL]

    return rest


def audit(
    wheel: Path,
    policy: AuditPolicy,
    tools: CudaTools,
    *,
    scratch: Path | None = None,
    judged: Literal["stack", "any"] = "stack",
    which: Sequence[checkers.Name] = checkers.ALL,
) -> AuditReport:
    """
    Return what is in *wheel*, and where that is not what *policy* asks for.

    What the device-code digest covers is told in `sparkwright.audit.device_code`.

    Args:
        scratch: An existing folder for the libraries while they are read, one at a time, up to half a gigabyte for vLLM; the
            system's temporary folder by default.
        judged: See `AuditReport.judged`.
        which: Others' tools to run, where the wheel has what they check; those left out are reported as not run.

    Raises:
        wheel-invalid: It is not a wheel, is damaged, is too large, or is another distribution than its name says.
        archive-unsafe: A member's name leaves its folder, or it is a link.
        tool-missing: *tools* lacks nvdisasm, and a kernel is to be read.
        disk-full: There is no room for the largest library and its cubins.
    """
    about = wheel_reader.subject(wheel)
    contents = wheel_reader.contents(wheel, about)
    place = scratch or Path(tempfile.gettempdir())
    with (
        room_guard(place),
        tempfile.TemporaryDirectory(prefix="audit-", dir=place) as folder,
        console.progress(f"auditing {wheel.name}", 0, "bytes") as progress,
        ThreadPoolExecutor(2) as pool,
    ):
        made = _Audit(about, contents, policy, tools, ours=judged == "stack", folder=Path(folder))
        others = _elsewhere(wheel, made, which, pool)
        made.check_whole(wheel_reader.walk(wheel, about, Path(folder), made.visit, progress.update))
        outcomes = others()
    findings = [*made.findings, *(Finding(*finding) for outcome in outcomes for finding in outcome.findings)]
    return AuditReport(
        subject=about,
        target=policy.target,
        policy=sha256_bytes(canonical(policy)),
        libraries=tuple(sorted(made.libraries, key=lambda library: library.name)),
        findings=tuple(sorted(findings, key=lambda finding: (finding.library, finding.rule, finding.message))),
        device_code=device_code.of_libraries(library.device_code for library in made.libraries),
        judged=judged,
        checkers=tuple(outcome.checker for outcome in outcomes),
    )
