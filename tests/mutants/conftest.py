"""The kill matrix: every mutant, the gate that must kill it, and the checks that did."""

from collections.abc import Sequence

import pytest
from tests.server.conftest import _broken, _context, _server, _toy, _trained, _vllm_python

from sparkwright.gates.core.verdict import Check, worst

__all__ = ["_broken", "_context", "_server", "_toy", "_trained", "_vllm_python"]

#: The property of a test's report that is its row of the matrix: mutant, gate, state, and the checks; a test may run in another process.
PROPERTY = "mutant"


class Kill:
    """Records in the matrix that a mutant died."""

    def __init__(self, properties: list[tuple[str, object]]) -> None:
        self._properties = properties

    def __call__(self, *, mutant: str, gate: str, sound: Sequence[Check], mutant_checks: Sequence[Check]) -> None:
        """
        Assert that *gate* passes what is sound and fails the mutant.

        Rows that could not run here (a GPU is missing) are compared as they are: the mutant must fail in one that did run, and the
        sound original must not.
        """
        bad = [check for check in sound if check.required and check.state not in ("pass", "not-run")]
        killers = [check for check in mutant_checks if check.required and check.state in ("fail", "invalid")]
        survived = not killers or bad or all(check.state != "pass" for check in sound)
        by = ", ".join(f"{check.name} ({check.reason})" for check in killers)
        self._properties.append((PROPERTY, [mutant, gate, "SURVIVED" if survived else "killed", by or "nothing"]))
        assert not bad, f"the sound original is not sound: {[(check.name, check.state, check.message) for check in bad]}"
        assert any(check.state == "pass" for check in sound), "nothing passed on the sound original, so nothing was compared"
        assert killers, f"{mutant} survives {gate}: {worst(check.state for check in mutant_checks)}"


@pytest.fixture(name="kill")
def _kill(request: pytest.FixtureRequest) -> Kill:
    return Kill(request.node.user_properties)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the matrix, the survivors first."""
    reports = [report for reports in terminalreporter.stats.values() for report in reports if getattr(report, "when", "") == "call"]
    rows = [value for report in reports for name, value in report.user_properties if name == PROPERTY]
    if rows:
        terminalreporter.section("kill matrix")
        for mutant, gate, state, by in sorted(rows, key=lambda row: (row[2] != "SURVIVED", row[1], row[0])):
            terminalreporter.line(f"{mutant:<60}  {gate}  {state:<8}  {by}")
        terminalreporter.line(", ".join(f"{sum(row[2] == state for row in rows)} {state}" for state in ("killed", "SURVIVED")))
