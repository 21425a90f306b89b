"""
Several audits in one table: what each wheel has in each library, and what a Spark gets from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_uppercase

from sparkwright.audit.device import FP4_OPCODES
from sparkwright.audit.report import SHOWN, AuditReport, Library, counts
from sparkwright.core.console import console
from sparkwright.core.console import size as as_size

COLUMNS = (
    "library", "wheel", ">size", "cubins for SM 12", "others", "PTX", ">OMMA", ">F2FP", ">FP4 traps", ">operators", "what a Spark gets"
)  # fmt: skip


def letters(reports: Sequence[AuditReport]) -> list[str]:
    """Return a short name for each report."""
    return [ascii_uppercase[index] if index < len(ascii_uppercase) else str(index + 1) for index in range(len(reports))]


def _cells(library: Library, generation: str) -> list[str]:
    native = {arch: count for arch, count in library.cubins.items() if arch.startswith(generation)}
    others = sum(library.cubins.values()) - sum(native.values())
    opcodes = [str(library.spark.instructions.get(pattern, 0)) if native else "–" for pattern in FP4_OPCODES]
    traps = str(library.spark.traps) if native else "–"
    registered = len(library.operators) + len(library.declared)
    operators = f"{len(library.operators)}/{registered}" if registered else "–"
    return [as_size(library.size), counts(native), str(others or "–"), counts(library.ptx), *opcodes, traps, operators, library.spark.says]


def rows(reports: Sequence[AuditReport]) -> list[list[str]]:
    """Return a row for each library of each report, those of one name together; without those that hold no device code anywhere."""
    named = list(zip(letters(reports), reports, strict=True))
    by_name: dict[str, dict[str, tuple[Library, str]]] = {}
    for letter, report in named:
        for library in report.libraries:
            by_name.setdefault(library.name, {})[letter] = (library, report.target.rstrip("af")[:-1])
    made = []
    for name, found in sorted(by_name.items()):
        if not any(library.cubins or library.ptx for library, _ in found.values()):
            continue
        for number, (letter, _) in enumerate(named):
            cells = _cells(*found[letter]) if letter in found else ["–"] * 8 + ["not in this wheel"]
            made.append([name if number == 0 else "", letter, *cells])
    return made


def show(reports: Sequence[AuditReport]) -> None:
    """Print the wheels, the table, and the findings of each."""
    wheels = []
    for letter, report in zip(letters(reports), reports, strict=True):
        built = "ours" if report.judged == "stack" else "not built here"
        verdict = "pass" if report.passed else f"{len(report.findings)} finding(s)"
        wheels.append([letter, report.subject.file, built, as_size(report.subject.size), report.device_code[:16] or "–", verdict])
    console.table("wheels", ["", "wheel", "judged as", ">size", "device code", "verdict"], wheels, result=True)
    console.table("", COLUMNS, rows(reports), result=True)
    console.note(
        "operators: implemented/declared. Others: cubins that no GPU of this generation loads. Libraries without device code are left out."
    )
    found = [
        [letter, finding.rule, finding.library or "(the wheel)", finding.message]
        for letter, report in zip(letters(reports), reports, strict=True)
        for finding in report.findings[:SHOWN]
    ]
    if found:
        console.table("", ["", "rule", "library", "finding"], found, result=True)
