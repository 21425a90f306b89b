"""The records of an audit, and their tables for people."""

from collections import Counter
from collections.abc import Mapping
from typing import Literal

import msgspec

from sparkwright.builder import BuildError
from sparkwright.core.console import console, size as as_size

#: A tampered wheel may have a finding per member; people read the first ones, ``--json`` has all.
SHOWN = 40
#: Translation units that a line of a table names.
SHOWN_UNITS = 5


class AuditedWheel(msgspec.Struct, frozen=True):
    """
    The wheel that a report is about.

    Attributes:
        file: Its file name.
        sha256: Of the whole file.
        size: Bytes.
        name: The normalised distribution name.
        version: With its local label.
        platforms: The platform tags of the file name.
    """

    file: str
    sha256: str
    size: int
    name: str
    version: str
    platforms: tuple[str, ...]


class AuditFinding(msgspec.Struct, frozen=True, order=True):
    """
    A disagreement between a wheel and its policy.

    Attributes:
        library: The member's name; empty when it concerns the whole wheel.
        rule: One of `RULES`.
        message: The state of the wheel, and what the policy asks for.
        units: The translation units concerned, such as ``csrc/a.cu (target _C)``; empty if the
            wheel has no unit manifest, or the finding is about no unit.
    """

    library: str
    rule: str
    message: str
    units: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The message after the first units, for tables and errors."""
        units = ", ".join([*self.units[:SHOWN_UNITS], *(["…"] if self.units[SHOWN_UNITS:] else [])])
        return f"{units}: {self.message}" if units else self.message


#: Every rule that a finding may name, and what breaking it means.
RULES: Mapping[str, str] = {
    "abi3-newer": "needs a newer Python than the wheel's tag and metadata promise",
    "abi3-violated": "is named abi3 and uses symbols outside Python's limited API",
    "arch-contradicted": "the table by which a driver chooses names another target than the "
    "machine code itself",
    "arch-folded": "machine code of the same generation, made for another target than the stack's",
    "arch-foreign": "machine code of another generation that no policy allows, or without a stated "
    "target",
    "arch-missing": "a library without machine code for the stack's target, or without that of a "
    "unit",
    "code-foreign": "device code that no translation unit of the build made",
    "code-missing": "a library that a Spark needs, without machine code that it could load",
    "device-unreadable": "device code that contradicts itself or has an unknown form",
    "elf-unreadable": "begins like an ELF file and is none",
    "kernel-missing": "a kernel that must be trap-free is missing",
    "library-missing": "a library that the policy asks for is not in the wheel",
    "library-unknown": "a library that no policy names",
    "machine-foreign": "made for another machine than the wheel's platform tag says",
    "needed-foreign": "needs a shared library that no policy allows, or that of another CUDA",
    "driver-unnamed": (
        "calls CUDA's driver without naming its library, so that it cannot be loaded"
    ),
    "omission-present": "a file that the build record says is left out",
    "opcode-missing": "too few of an instruction that makes the kernels fast",
    "operator-missing": "an operator that is not registered with torch, or only declared and not "
    "implemented",
    "ptx-foreign": "PTX that no policy allows",
    "record-mismatch": "RECORD has another hash or size than the member",
    "record-missing": "a member that RECORD does not list",
    "record-surplus": "RECORD lists a missing file",
    "rpath-present": "looks for shared libraries in a folder that no policy allows",
    "size-over": "larger than the policy's ceiling",
    "symbol-missing": "a dynamic symbol that the policy asks for is not defined",
    "tag-newer": "needs a newer system (glibc, libstdc++) than the wheel's platform tag promises",
    "torch-newer": "needs a newer torch than the wheel requires",
    "torch-unstable": "uses symbols of torch outside its stable ABI",
    "undefined-symbol": "needs a symbol that neither the wheel, nor the locked wheels of torch and "
    "CUDA, nor the system define, so that it cannot be loaded",
    "trap-present": "a kernel that must work ends in a trap",
    "vendored-driver": "a copy of the GPU driver, which must be the machine's own",
}


class AuditedLibrary(msgspec.Struct, frozen=True):
    """
    An ELF member, or all cubins of a folder.

    Attributes:
        role: ``target``, ``base``, or ``unknown`` when no policy names it.
        cubins: How many by target: of the stack's generation as the code itself states it, else as
            the table lists it.
        ptx: How many by arch.
        device_code: The library's part of the report's digest; empty without device code.
        spark: How many compiled units give a GPU of the stack each level of support, best first
            (`sparkwright.builder.wheel.gpu_target.SUPPORT_LEVELS`).
        opcodes: Only for the patterns of the policy.
    """

    name: str
    sha256: str
    size: int
    role: str
    cubins: dict[str, int] = {}
    ptx: dict[str, int] = {}
    device_code: str = ""
    spark: dict[str, int] = {}
    opcodes: dict[str, int] = {}


class AuditReport(msgspec.Struct, frozen=True):
    """
    The audit of a wheel.

    Attributes:
        target: What target libraries had to be made for (``sm_121f``).
        policy: The sha256 of the policy, so that a verdict names what it was judged by.
        device_code: The sha256 over the sorted, distinct `AuditedLibrary.device_code`; empty
            without device code. It does not change when only Python, host code or the version
            label does.
        judged: ``stack`` if the wheel must be what the stack's build makes; ``any`` if it was not
            built here, and is judged by what every wheel must keep to.
        deviations: Its sources of other releases than upstream pins, each with the reason, as its
            build record states them.
        unlocked: External projects that were not compiled, each with the reason, as its build
            record states them.
        left_out: Libraries and files of the official wheel that it does not hold, by name or glob,
            each with the reason.
        trimmed: Libraries of the official wheel that hold no code for other GPUs.
        not_checked: Why undefined symbols were not looked for; empty if they were.
    """

    subject: AuditedWheel
    target: str
    policy: str
    libraries: tuple[AuditedLibrary, ...]
    findings: tuple[AuditFinding, ...]
    device_code: str
    judged: Literal["stack", "any"] = "stack"
    deviations: tuple[str, ...] = ()
    unlocked: dict[str, str] = {}
    left_out: dict[str, str] = {}
    trimmed: tuple[str, ...] = ()
    not_checked: str = ""

    @property
    def passed(self) -> bool:
        return not self.findings


def raise_for_findings(*reports: AuditReport) -> None:
    """
    Raise if one of *reports* did not pass.

    Raises:
        audit-failed: The details are the first findings, one a line.
    """
    details, files = list[str](), list[str]()
    for report in reports:
        if not report.passed:
            files.append(report.subject.file)
        for finding in report.findings:
            file = finding.library or report.subject.file
            details.append(f"{finding.rule}: {file}: {finding.text}")
    if details:
        raise BuildError(
            "audit-failed",
            f"{len(details)} finding(s) in {', '.join(files)}.",
            details=details[:SHOWN],
        )


def show(*reports: AuditReport, result: bool = False) -> None:
    """
    Print *reports*, each with the libraries of its wheel.

    Args:
        result: It is what the verb was asked for (`Console.table`).
    """
    say = console.result if result else console.note
    for report in reports:
        about, broken = report.subject, Counter(finding.library for finding in report.findings)
        judged = "" if report.judged == "stack" else ", as a wheel that was not built here"
        verdict = f"{'pass' if report.passed else 'fail'} for {report.target}{judged}"
        hashes = f"sha256 {about.sha256[:16]}…, device code {report.device_code[:16] or '–'}"
        say(f"{about.file}: {verdict}, {as_size(about.size)}, {hashes}")
        libraries = [[*_cells(library), str(broken[library.name])] for library in report.libraries]
        if libraries:
            columns = ["library", "role", ">size", "cubins", "PTX", "opcodes"]
            console.table(
                "", [*columns, f"on {report.target}", ">findings"], libraries, result=result
            )
        for name, reason in report.unlocked.items():
            say(f"not compiled: {name}: {reason}")
        for name, reason in report.left_out.items():
            say(f"left out: {name}: {reason}")
        for name in report.trimmed:
            say(f"trimmed: {name}: code that a GPU for {report.target} does not load is left out")
        for sentence in filter(None, (*report.deviations, report.not_checked)):
            say(sentence)


def _cells(library: AuditedLibrary) -> list[str]:
    return [
        library.name,
        library.role,
        as_size(library.size),
        counted(library.cubins, "{name}×{count}", " ") or "–",
        counted(library.ptx, "{name}×{count}", " ") or "–",
        counted(library.opcodes, "{name} {count}", ", ") or "–",
        counted(library.spark, "{count} {name}", ", ") or "–",
    ]


def counted(numbers: Mapping[str, int], form: str, separator: str) -> str:
    """
    Return *numbers* for people, each in *form*, which has the fields ``{name}`` and ``{count}``; of
    a target the name is the number.
    """
    texts = [
        form.format(name=name.removeprefix("sm_"), count=count) for name, count in numbers.items()
    ]
    return separator.join(texts)
