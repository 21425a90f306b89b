"""
The findings of an audit, as frozen records and as tables for people; several audits in one table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from string import ascii_uppercase
from typing import ClassVar, Literal

import msgspec

from sparkwright.audit.checkers import Checker
from sparkwright.audit.gpu_compat import FP4_OPCODES, Spark
from sparkwright.audit.wheel_reader import Subject
from sparkwright.core.console import console
from sparkwright.core.console import size as as_size
from sparkwright.core.errors import Advice, SparkwrightError

#: A tampered wheel may have a finding per member; people read the first ones, ``--json`` and the
#: report hold all.
SHOWN = 40
#: Translation units that a line of a table names.
SHOWN_UNITS = 5


class AuditError(SparkwrightError):
    """A wheel does not meet the audit policy."""

    references: ClassVar[Mapping[str, Advice]] = {
        "audit-failed": Advice(
            "The machine code inside the wheel is not what the policy in ci/audit.yaml asks for.",
            "Do not publish the wheel. Compare the findings with the plan of the same build.",
        ),
    }


class Finding(msgspec.Struct, frozen=True):
    """
    One disagreement between a wheel and its policy.

    Attributes:
        library: The member's name; empty when it concerns the whole wheel.
        rule: One of `RULES`.
        message: What was found, and what was asked for.
        units: The translation units concerned, such as ``csrc/a.cu (target _C)``; empty where the
            wheel
            has no unit manifest, or the finding is about no unit.
    """

    library: str
    rule: str
    message: str
    units: tuple[str, ...] = ()

    @property
    def subject(self) -> str:
        """The library and the first units, for tables."""
        more = (
            [f"and {len(self.units) - SHOWN_UNITS} more"] if len(self.units) > SHOWN_UNITS else []
        )
        return "\n".join([self.library or "(the wheel)", *self.units[:SHOWN_UNITS], *more])


#: Every rule that a finding may name, and what breaking it means.
RULES: Mapping[str, str] = {
    "abi3-newer": "needs a newer Python than the wheel's tag and metadata promise",
    "abi3-violated": "is named abi3 and uses what is no part of the limited API of Python",
    "arch-contradicted": "the table by which a driver chooses names another target than the "
    "machine code itself",
    "arch-folded": "machine code of the same generation, made for another target than the stack's",
    "arch-foreign": "machine code of another generation that no policy allows",
    "arch-missing": "a unit, or a whole library, without machine code for the stack's target",
    "arch-unknown": "machine code that does not say what it was made for",
    "code-foreign": "device code that no translation unit of the build made",
    "code-missing": "a library that a Spark needs, without machine code that it could load",
    "device-unreadable": "device code that contradicts itself, or in a form that is not known here",
    "elf-unreadable": "begins like ELF and is not",
    "glibc-newer": "wants a newer GLIBC than the wheel's platform tag promises",
    "kernel-missing": "a kernel that must be trap-free is not there at all",
    "library-missing": "a library that the policy asks for is not in the wheel",
    "library-unknown": "a library that no policy names",
    "machine-foreign": "made for another machine than the wheel's platform tag says",
    "needed-foreign": "wants a shared library that no policy allows",
    "driver-unnamed": "calls CUDA's driver without wanting its library, so that it cannot be "
    "loaded",
    "opcode-missing": "too few of an instruction that makes the kernels fast",
    "operator-missing": "an operator that is not registered with torch, or only declared and not "
    "implemented",
    "ptx-foreign": "PTX that no policy allows",
    "record-mismatch": "RECORD has another hash or size than the member",
    "record-missing": "a member that RECORD does not list",
    "record-surplus": "RECORD lists what is not there",
    "rpath-present": "looks for shared libraries in a folder that no policy allows",
    "size-over": "larger than the policy's ceiling",
    "symbol-missing": "a dynamic symbol that the policy asks for is not defined",
    "tag-newer": "by the symbols that it wants, auditwheel gives the wheel a newer platform tag "
    "than its name has",
    "torch-newer": "needs a newer torch than the wheel requires",
    "torch-unstable": "uses symbols of torch beside its stable ABI",
    "trap-present": "a kernel that must work ends in a trap",
    "vendored-driver": "a copy of the GPU driver, which must be the machine's own",
    "vendored-library": "a copy of a library that torch, CUDA or the system brings",
}


class OpcodeCount(msgspec.Struct, frozen=True):
    """
    How often an opcode pattern of the policy occurs.

    Attributes:
        arch: The real target of the code that was counted: the stack's where there is any, else
            what such a GPU would load. kernels: How many kernels hold it. found: How many
            instructions, over all kernels. least: How many the policy asks for.
    """

    pattern: str
    arch: str
    kernels: int
    found: int
    least: int


class Library(msgspec.Struct, frozen=True):
    """
    One ELF member.

    Attributes:
        role: ``target``, ``base``, or ``unknown`` when no policy names it.
        cubins: How many by target: of the stack's generation as the code itself says, else as the
            table lists it. ptx: How many by arch. device_code: The library's part of the report's
            digest; empty without device code. spark: What a GPU of the stack gets from it.
            operators, declared: The operators of torch that it implements, and those that it only
            declares. opcodes: Filled only where the policy asks for some. traps: In the kernels
            that the policy wants trap-free.
    """

    name: str
    sha256: str
    size: int
    role: str
    machine: str = ""
    needed: tuple[str, ...] = ()
    rpath: tuple[str, ...] = ()
    glibc: str = ""
    glibcxx: str = ""
    cubins: dict[str, int] = {}
    ptx: dict[str, int] = {}
    device_code: str = ""
    spark: Spark = Spark("")
    operators: tuple[str, ...] = ()
    declared: tuple[str, ...] = ()
    opcodes: tuple[OpcodeCount, ...] = ()
    traps: int = 0


class AuditReport(msgspec.Struct, frozen=True):
    """
    The audit of one wheel.

    Attributes:
        target: What target libraries had to be made for (``sm_121f``).
        judged: ``stack`` where the wheel must be what the stack's build makes; ``any`` where it was
            not built here, and is read for what a
            Spark gets from it, and judged by what every wheel must keep to.
        checkers: What others' tools did.
        policy: The sha256 of the policy, so that a verdict names what it was judged by.
        device_code: The sha256 over the sorted, distinct `Library.device_code` of all libraries;
            empty without device code. It does
            not change when only Python, host code or the version label does.
    """

    subject: Subject
    target: str
    policy: str
    libraries: tuple[Library, ...]
    findings: tuple[Finding, ...]
    device_code: str
    judged: Literal["stack", "any"] = "stack"
    checkers: tuple[Checker, ...] = ()

    @property
    def passed(self) -> bool:
        return not self.findings


def raise_for_findings(report: AuditReport) -> None:
    """
    Do nothing when the *report* passed.

    Raises:
        audit-failed: It did not; the details are the findings, one a line.
    """
    if report.passed:
        return
    where = len({finding.library for finding in report.findings})
    raise AuditError(
        "audit-failed",
        f"{report.subject.file} has {len(report.findings)} finding(s) in {where} place(s).",
        details=[
            f"{finding.rule}: {_place(report, finding)}: {finding.message}"
            for finding in report.findings
        ],
    )


def _place(report: AuditReport, finding: Finding) -> str:
    units = ", ".join(finding.units[:SHOWN_UNITS])
    return f"{finding.library or report.subject.file}{f': {units}' if units else ''}"


def _counts(by_arch: Mapping[str, int]) -> str:
    """Return ``{"sm_120f": 35}`` as ``120f×35``."""
    return " ".join(f"{arch.removeprefix('sm_')}×{count}" for arch, count in by_arch.items()) or "–"


def show(report: AuditReport, *, result: bool = False) -> None:
    """
    Print *report*: a line per library, then its findings.

    Args:
        result: It is what the verb was asked for (`Console.table`).
    """
    broken = Counter(finding.library for finding in report.findings)
    rows = []
    for library in report.libraries:
        opcodes = [f"{count.pattern} {count.found}≥{count.least}" for count in library.opcodes]
        if library.opcodes or library.traps:
            opcodes.append(f"traps {library.traps}")
        verdict = f"{broken[library.name]} finding(s)" if broken[library.name] else "pass"
        codes = (
            _counts(library.cubins),
            _counts(library.ptx),
            ", ".join(opcodes) or "–",
            library.spark.says,
        )
        rows.append([library.name, library.role, as_size(library.size), *codes, verdict])
    about = report.subject
    judged = (
        ""
        if report.judged == "stack"
        else " (not built here: judged by what every wheel must keep to)"
    )
    title = f"{about.file}: {'pass' if report.passed else 'fail'} for {report.target}{judged}, "
    title += f"sha256 {about.sha256[:16]}…, {as_size(about.size)}"
    title += f", device code {report.device_code[:16]}…" if report.device_code else ""
    if not rows:
        rows = [["(none)", "–", "–", "–", "–", "–", "–", "pass" if report.passed else "fail"]]
    console.table(
        title,
        ["library", "role", ">size", "cubins", "PTX", "opcodes", "what a Spark gets", "verdict"],
        rows,
        result=result,
    )
    if report.checkers:
        tools = [
            [checker.name, checker.version or "–", checker.state.replace("-", " "), checker.says]
            for checker in report.checkers
        ]
        console.table("", ["tool", "version", "state", "says"], tools, result=result)
    if report.findings:
        lines = [
            [finding.rule, finding.subject, finding.message] for finding in report.findings[:SHOWN]
        ]
        console.table("", ["rule", "library and units", "finding"], lines, result=result)
    if len(report.findings) > SHOWN:
        console.note(f"… and {len(report.findings) - SHOWN} more")


_COLUMNS = (
    "library",
    "wheel",
    ">size",
    "cubins for SM 12",
    "others",
    "PTX",
    ">OMMA",
    ">F2FP",
    ">FP4 traps",
    ">operators",
    "what a Spark gets",
)


def comparison(reports: Mapping[str, AuditReport]) -> list[list[str]]:
    """
    Return a row for each library of each report, those of one name together; without libraries that
    hold no device code anywhere.

    Args:
        reports: By the short name of the wheel.
    """
    by_name: dict[str, dict[str, list[str]]] = {}
    with_code: set[str] = set()
    for letter, report in reports.items():
        for library in report.libraries:
            by_name.setdefault(library.name, {})[letter] = _cells(
                library, report.target.rstrip("af")[:-1]
            )
            if library.cubins or library.ptx:
                with_code.add(library.name)
    absent = ["–"] * 8 + ["not in this wheel"]
    return [
        [name if number == 0 else "", letter, *by_name[name].get(letter, absent)]
        for name in sorted(with_code)
        for number, letter in enumerate(reports)
    ]


def _cells(library: Library, generation: str) -> list[str]:
    native = {arch: count for arch, count in library.cubins.items() if arch.startswith(generation)}
    others = sum(library.cubins.values()) - sum(native.values())
    opcodes = [
        str(library.spark.instructions.get(pattern, 0)) if native else "–"
        for pattern in FP4_OPCODES
    ]
    traps = str(library.spark.traps) if native else "–"
    registered = len(library.operators) + len(library.declared)
    operators = f"{len(library.operators)}/{registered}" if registered else "–"
    code = [_counts(native), str(others or "–"), _counts(library.ptx)]
    return [as_size(library.size), *code, *opcodes, traps, operators, library.spark.says]


def show_comparison(reports: Sequence[AuditReport]) -> None:
    """Print the wheels, their libraries side by side, and the findings of each."""
    letters = [
        *ascii_uppercase[: len(reports)],
        *map(str, range(len(ascii_uppercase) + 1, len(reports) + 1)),
    ]
    named = dict(zip(letters, reports, strict=True))
    wheels, findings = [], []
    for letter, report in named.items():
        built = "ours" if report.judged == "stack" else "not built here"
        verdict = "pass" if report.passed else f"{len(report.findings)} finding(s)"
        about = report.subject
        wheels.append(
            [
                letter,
                about.file,
                built,
                as_size(about.size),
                report.device_code[:16] or "–",
                verdict,
            ]
        )
        findings += [
            [letter, one.rule, one.subject, one.message] for one in report.findings[:SHOWN]
        ]
    console.table(
        "wheels", ["", "wheel", "judged as", ">size", "device code", "verdict"], wheels, result=True
    )
    console.table("", _COLUMNS, comparison(named), result=True)
    console.note(
        "operators: implemented/declared. Others: cubins that no GPU of this generation loads."
        " Libraries without device code are left out."
    )
    if findings:
        console.table("", ["", "rule", "library and units", "finding"], findings, result=True)
