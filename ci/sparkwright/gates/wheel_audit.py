"""
G0: the audit of a wheel as checks, one for each group of rules.

The findings decide; the figures say how much was looked at. An audit that was made of a wheel that is not ours, by what every wheel must
keep to, is never a pass of the gate: it says nothing of the stack's own policy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from sparkwright.audit.report import RULES, AuditFinding, AuditReport
from sparkwright.gates.core.verdict import Check, Figure, Sample, declare, failed, not_run, passed

TITLE = "the bytes in the wheel"

#: Name of a check → what it looks at, and the rules of the audit that it stands for.
GROUPS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "archive": ("every member is the one that RECORD names", ("record-mismatch", "record-missing", "record-surplus")),
    "libraries": ("the wheel holds the libraries of the policy, and no other", ("elf-unreadable", "library-missing", "library-unknown")),
    "targets": (
        "machine code is for the stack's target, and says so",
        (
            "arch-contradicted",
            "arch-folded",
            "arch-foreign",
            "arch-missing",
            "arch-unknown",
            "code-foreign",
            "code-missing",
            "device-unreadable",
            "ptx-foreign",
        ),
    ),
    "instructions": (
        "the kernels for FP4 hold its instructions, and no trap",
        ("kernel-missing", "opcode-missing", "trap-present"),
    ),
    "operators": ("symbols and operators that a Spark needs are there", ("operator-missing", "symbol-missing")),
    "needs": (
        "libraries want what the policy allows, and look for it nowhere else",
        ("machine-foreign", "needed-foreign", "driver-unnamed", "rpath-present"),
    ),
    "platform": ("the platform tag promises what the libraries want", ("tag-newer",)),
    "python": ("the limited API of Python is kept to", ("abi3-newer", "abi3-violated")),
    "torch": ("torch's stable ABI is kept to", ("torch-newer", "torch-unstable")),
    "copies": ("no driver, and no library of others, is in the wheel", ("vendored-driver", "vendored-library")),
    "size": ("the wheel and its libraries keep to their ceilings", ("size-over",)),
}

CHECKS = (*declare(*GROUPS, measured=True), *declare("policy", "audit", role="reports"))

REASONS: Mapping[str, str] = {
    **RULES,
    "not-ours": "The wheel has no build record of ours, so the stack's policy was not asked. Audit it with --judge stack to ask it.",
}


def run(report: AuditReport) -> tuple[Check, ...]:
    """Return the checks of *report*, an audit that was made of the wheel at hand."""
    checks = [_group(report, name) for name in GROUPS]
    if report.judged != "stack":
        checks.append(not_run("policy", "the wheel was judged by what every wheel must keep to, not by the stack's policy", "not-ours"))
    return tuple(checks)


def _group(report: AuditReport, name: str) -> Check:
    says, rules = GROUPS[name]
    found = [finding for finding in report.findings if finding.rule in rules]
    if found:
        whole = f"{len(found)} finding(s): {RULES[found[0].rule]}"
        return failed(name, whole, found[0].rule, figures=_figures(report, name, len(found)), samples=_samples(found))
    return passed(name, says, figures=_figures(report, name, 0))


def _samples(found: Iterable[AuditFinding]) -> list[Sample]:
    return [Sample(finding.library or "(the wheel)", RULES[finding.rule], finding.text[:200]) for finding in found]


def _figures(report: AuditReport, name: str, findings: int) -> list[Figure]:
    libraries = report.libraries
    own: dict[str, list[Figure]] = {
        "libraries": [Figure("libraries", len(libraries))],
        "targets": [
            Figure("cubins for the target", sum(library.cubins.get(report.target, 0) for library in libraries)),
            Figure("cubins", sum(sum(library.cubins.values()) for library in libraries)),
            Figure("PTX files", sum(sum(library.ptx.values()) for library in libraries)),
        ],
        "instructions": [
            Figure(f"{opcode.pattern} in {library.name}", opcode.count, bound=opcode.least)
            for library in libraries
            for opcode in library.opcodes
        ],
        "size": [Figure("size of the wheel", report.subject.size, "B")],
    }
    return [Figure("findings", findings, bound=0), *own.get(name, [])]
