"""The kill matrix: every mutant, the rung that must kill it, and the check that did."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from sparkwright.gates.verdict import Check, worst


class Row(msgspec.Struct, frozen=True):
    """One mutant of the matrix: *by* names the checks that killed it, or says why it did not run."""

    mutant: str
    rung: str
    state: str
    by: str


ROWS = pytest.StashKey[list[Row]]()


class Kill:
    """Records in the matrix that a mutant died, or why it was not tried."""

    def __init__(self, rows: list[Row]) -> None:
        self._rows = rows

    def __call__(self, *, mutant: str, rung: str, sound: Sequence[Check], mutant_checks: Sequence[Check]) -> None:
        """
        Assert that *rung* passes what is sound and fails the mutant.

        Rows that could not run here (a GPU is missing) are compared as they are: the mutant must fail in one that did run, and the
        sound original must not.
        """
        bad = [check for check in sound if check.required and check.state not in ("pass", "not-run")]
        killers = [check for check in mutant_checks if check.required and check.state in ("fail", "invalid")]
        survived = not killers or bad or not any(check.state == "pass" for check in sound)
        by = ", ".join(f"{check.name} ({check.reference})" for check in killers)
        self._rows.append(Row(mutant, rung, "SURVIVED" if survived else "killed", by or "nothing"))
        assert not bad, f"the sound original is not sound: {[(check.name, check.state, check.says) for check in bad]}"
        assert any(check.state == "pass" for check in sound), "nothing passed on the sound original, so nothing was compared"
        assert killers, f"{mutant} survives {rung}: {worst(check.state for check in mutant_checks)}"

    def not_run(self, mutant: str, rung: str, reason: str) -> None:
        """List *mutant* as not tried; the test is skipped with the reason."""
        self._rows.append(Row(mutant, rung, "not run", reason))
        pytest.skip(reason)


def pytest_configure(config: pytest.Config) -> None:
    config.stash[ROWS] = []


@pytest.fixture(name="kill")
def _kill(request: pytest.FixtureRequest) -> Kill:
    return Kill(request.config.stash[ROWS])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the matrix, the survivors first."""
    found: list[Row] = config.stash[ROWS]
    rows = sorted(found, key=lambda row: (row.state != "SURVIVED", row.rung, row.mutant))
    if not rows:
        return
    widths = [max(len(getattr(row, name)) for row in rows) for name in ("mutant", "rung", "state")]
    terminalreporter.section("kill matrix")
    for row in rows:
        terminalreporter.line(f"{row.mutant:<{widths[0]}}  {row.rung:<{widths[1]}}  {row.state:<{widths[2]}}  {row.by}")
    counts = {state: sum(row.state == state for row in rows) for state in ("killed", "SURVIVED", "not run")}
    terminalreporter.line(", ".join(f"{count} {state}" for state, count in counts.items()))
