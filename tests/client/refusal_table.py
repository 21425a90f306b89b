"""
Runs the hostile cases of client and publisher and the kill tests, and prints them as Markdown: case, reference, what was touched.

    PYTHONPATH=ci:. python tests/client/refusal_table.py [TEST ...]

What was touched is measured: the folder of the index, or that of the installations, is compared with what it was before.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.support.refused import KILLS, PROPERTY  # noqa: E402

#: The tests that record a row.
NAMES = "refused or kill or leaves_nothing or not_taken_for_none or not_signed"


class Rows:
    """A plugin of pytest that keeps the rows that tests record."""

    def __init__(self) -> None:
        self.refusals: list[tuple[str, str, str]] = []
        self.kills: list[tuple[str, int]] = []
        self.failed: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)
        if report.when != "call":
            return
        path, _, name = report.nodeid.removeprefix("tests/").partition("::test_")
        title = f"{path.removesuffix('.py').replace('/test_', ' ')}: {name.replace('_', ' ')}"
        for kind, value in report.user_properties:
            if kind == PROPERTY:
                self.refusals.append((title, *map(str, value)))  # type: ignore[call-overload]
            elif kind == KILLS:
                self.kills.append((title, int(str(value))))


def main(words: list[str]) -> int:
    """Print the table, and return 1 if a case came out otherwise than it should."""
    rows, tests = Rows(), words or ["tests/client", "tests/release"]
    with open(os.devnull, "w") as sink, contextlib.redirect_stdout(sink):  # noqa: PTH123
        pytest.main(
            [
                "-q",
                "-p",
                "no:cacheprovider",
                "--rootdir",
                str(ROOT),
                *(str(ROOT / test) for test in tests),
            ],
            plugins=[rows],
        )
    lines = ["| case | reference | touched |", "| --- | --- | --- |"]
    lines += [
        f"| {title} | `{reference}` | {touched} |" for title, reference, touched in rows.refusals
    ]
    untouched = sum(touched == "nothing" for _, _, touched in rows.refusals)
    lines += ["", f"{len(rows.refusals)} refusals, {untouched} of them touched nothing.", ""]
    lines += ["| killed before each file operation | kills |", "| --- | ---: |"]
    lines += [f"| {title} | {count} |" for title, count in rows.kills]
    lines += [
        "",
        f"{sum(count for _, count in rows.kills)} kills.",
        *(f"FAILED {name}" for name in rows.failed),
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    return bool(rows.failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
