"""The kill matrix: every mutant, the gate that must kill it, and the check that did."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from sparkwright.gates.core.verdict import Check, worst


class Row(msgspec.Struct, frozen=True):
    """One mutant of the matrix: *by* names the checks that killed it, or says why it did not run."""

    mutant: str
    gate: str
    state: str
    by: str


#: The rows of the matrix, and the key under which a test's report carries its own; a test may run in another process.
ROWS, PROPERTY = pytest.StashKey[list[Row]](), "mutant"


class Kill:
    """Records in the matrix that a mutant died, or why it was not tried."""

    def __init__(self, properties: list[tuple[str, object]]) -> None:
        self._properties = properties

    def _record(self, row: Row) -> None:
        self._properties.append((PROPERTY, msgspec.to_builtins(row)))

    def __call__(self, *, mutant: str, gate: str, sound: Sequence[Check], mutant_checks: Sequence[Check]) -> None:
        """
        Assert that *gate* passes what is sound and fails the mutant.

        Rows that could not run here (a GPU is missing) are compared as they are: the mutant must fail in one that did run, and the
        sound original must not.
        """
        bad = [check for check in sound if check.required and check.state not in ("pass", "not-run")]
        killers = [check for check in mutant_checks if check.required and check.state in ("fail", "invalid")]
        survived = not killers or bad or not any(check.state == "pass" for check in sound)
        by = ", ".join(f"{check.name} ({check.reason})" for check in killers)
        self._record(Row(mutant, gate, "SURVIVED" if survived else "killed", by or "nothing"))
        assert not bad, f"the sound original is not sound: {[(check.name, check.state, check.message) for check in bad]}"
        assert any(check.state == "pass" for check in sound), "nothing passed on the sound original, so nothing was compared"
        assert killers, f"{mutant} survives {gate}: {worst(check.state for check in mutant_checks)}"

    def not_run(self, mutant: str, gate: str, reason: str) -> None:
        """List *mutant* as not tried; the test is skipped with the reason."""
        self._record(Row(mutant, gate, "not run", reason))
        pytest.skip(reason)


class Matrix:
    """Gathers the rows of all tests, in the process that prints them."""

    def __init__(self, rows: list[Row]) -> None:
        self._rows = rows

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take what the last report of a test carries."""
        if report.when == "teardown":
            self._rows += (msgspec.convert(value, Row) for name, value in report.user_properties if name == PROPERTY)


def pytest_configure(config: pytest.Config) -> None:
    config.stash[ROWS] = []
    config.pluginmanager.register(Matrix(config.stash[ROWS]))


@pytest.fixture(name="kill")
def _kill(request: pytest.FixtureRequest) -> Kill:
    return Kill(request.node.user_properties)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the matrix, the survivors first."""
    found: list[Row] = config.stash[ROWS]
    rows = sorted(found, key=lambda row: (row.state != "SURVIVED", row.gate, row.mutant))
    if not rows:
        return
    widths = [max(len(getattr(row, name)) for row in rows) for name in ("mutant", "gate", "state")]
    terminalreporter.section("kill matrix")
    for row in rows:
        terminalreporter.line(f"{row.mutant:<{widths[0]}}  {row.gate:<{widths[1]}}  {row.state:<{widths[2]}}  {row.by}")
    counts = {state: sum(row.state == state for row in rows) for state in ("killed", "SURVIVED", "not run")}
    terminalreporter.line(", ".join(f"{count} {state}" for state, count in counts.items()))
