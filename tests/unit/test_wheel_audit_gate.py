"""G0 as checks: every rule stands in one, findings fail it, and what was not asked is never a pass."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from sparkwright.audit.report import (
    RULES,
    AuditedLibrary,
    AuditedWheel,
    AuditFinding,
    AuditReport,
    OpcodeCount,
)
from sparkwright.gates import wheel_audit as audited

LIBRARY = AuditedLibrary(
    "probe/_C.so", "0" * 64, 10, "target", cubins={"sm_80": 1, "sm_121f": 3}, ptx={"sm_80": 1},
    opcodes=(OpcodeCount("OMMA", 4, 2),),
)  # fmt: skip
SOUND = AuditReport(
    AuditedWheel("probe-1-py3-none-any.whl", "0" * 64, 10, "probe", "1", ()),
    "sm_121f",
    "0" * 64,
    (LIBRARY,),
    (),
    "",
)


def test_every_rule_stands_in_exactly_one_check() -> None:
    listed = [rule for _, rules in audited.GROUPS.values() for rule in rules]
    assert sorted(listed) == sorted(RULES)


def test_a_sound_report_passes_with_its_figures() -> None:
    found = {check.name: check for check in audited.run(SOUND)}
    assert {check.state for check in found.values()} == {"pass"}
    assert [(one.name, one.value) for one in found["targets"].figures] == [
        ("findings", 0), ("cubins for the target", 3), ("cubins", 4), ("PTX files", 1)
    ]  # fmt: skip
    assert [(one.value, one.bound) for one in found["instructions"].figures[1:]] == [(4, 2)]


@pytest.mark.parametrize("rule", sorted(RULES))
def test_a_finding_of_any_rule_fails_the_gate(rule: str) -> None:
    """With the rule as its reference, and the place as a sample."""
    report = replace(SOUND, findings=(AuditFinding("probe/_C.so", rule, "it is so"),))
    (bad,) = [check for check in audited.run(report) if check.state != "pass"]
    assert (bad.state, bad.reason, bad.required, rule in audited.REASONS) == ("fail", rule, True, True)
    assert (bad.samples[0].case, bad.samples[0].actual) == ("probe/_C.so", "it is so")


def test_a_wheel_that_was_judged_as_any_other_is_no_pass() -> None:
    (bad,) = [check for check in audited.run(replace(SOUND, judged="any")) if check.state != "pass"]
    assert (bad.name, bad.state, bad.reason, bad.required) == ("policy", "not-run", "not-ours", True)
