"""
G0: the audit of a wheel as checks, one for each group of rules.

An audit by the rules for any wheel, without the stack's own policy, is not a pass of the gate.
"""

from collections.abc import Mapping

from sparkwright.audit.report import RULES, AuditReport
from sparkwright.gates.core.verdict import Check, Figure, Sample, declare, failed, not_run, passed

#: Name of a check → what it shows, and the rules of the audit that it stands for.
GROUPS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "archive": (
        "every member is the one that RECORD names",
        ("record-mismatch", "record-missing", "record-surplus", "omission-present"),
    ),
    "libraries": (
        "the wheel holds the libraries of the policy, and no other",
        ("elf-unreadable", "library-missing", "library-unknown"),
    ),
    "targets": (
        "machine code is for the stack's target, and is labelled so",
        (
            "arch-contradicted",
            "arch-folded",
            "arch-foreign",
            "arch-missing",
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
    "operators": (
        "symbols and operators that a Spark needs are present",
        ("operator-missing", "symbol-missing"),
    ),
    "needs": (
        "libraries need only what the policy allows, and search nowhere else",
        ("machine-foreign", "needed-foreign", "driver-unnamed", "rpath-present"),
    ),
    "symbols": ("every symbol that a library needs is defined", ("undefined-symbol",)),
    "platform": ("the platform tag promises what the libraries need", ("tag-newer",)),
    "python": (
        "only Python's limited API is used",
        ("abi3-newer", "abi3-violated"),
    ),
    "torch": ("only torch's stable ABI is used", ("torch-newer", "torch-unstable")),
    "copies": ("the wheel holds no copy of the driver", ("vendored-driver",)),
    "size": ("the wheel and its libraries are below their ceilings", ("size-over",)),
}

CHECKS = (*declare(*GROUPS, measured=True), *declare("policy", role="reports"))

REASONS: Mapping[str, str] = {
    **RULES,
    "symbols-unchecked": "The locked wheels of torch and CUDA for the wheel's machine are not "
    "installed here, so that undefined symbols were not looked for.",
    "not-ours": "The wheel has no build record of ours, so the stack's policy was not applied. "
    "Audit it with --judge stack to apply it.",
}


def run(report: AuditReport) -> tuple[Check, ...]:
    """Return the checks of *report*, an audit of the wheel."""
    checks = [_group(report, name) for name in GROUPS]
    if report.judged != "stack":
        message = "the wheel was audited by the rules for any wheel, not by the stack's policy"
        checks.append(not_run("policy", message, "not-ours"))
    return tuple(checks)


def _group(report: AuditReport, name: str) -> Check:
    message, rules = GROUPS[name]
    failing, samples = list[str](), list[Sample]()
    for finding in report.findings:
        if finding.rule in rules:
            failing.append(finding.rule)
            library = finding.library or "(the wheel)"
            samples.append(Sample(library, RULES[finding.rule], finding.text[:200]))
    figures = [Figure("findings", len(samples), bound=0)]
    if name == "symbols" and report.not_checked:
        return not_run(name, report.not_checked, "symbols-unchecked")
    if not failing:
        return passed(name, message, figures=figures)
    message = f"{len(failing)} finding(s): {RULES[failing[0]]}"
    return failed(name, message, failing[0], figures=figures, samples=samples)
