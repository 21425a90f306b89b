"""docs/failures.md is short, and names nothing that the program does not print."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.unit import gates_page

import sparkwright.cli.serve
from sparkwright.bench.recipes import preflight as recipe_preflight
from sparkwright.core.errors import classes
from sparkwright.gates.core import server_under_test
from sparkwright.gates.core.ladder import GATES
from sparkwright.serving import preflight

PAGE = Path(__file__).parents[2] / "docs" / "failures.md"


def references() -> set[str]:
    """Return every reference of an error, of a rule before the start, and of a reason of a gate."""
    assert sparkwright.cli.serve
    errors = {reference for kind in classes() for reference in kind.references}
    reasons = {reason for gate in GATES for reason in gates_page.reasons(gate)} | set(server_under_test.REASONS)
    calls = [node for node in ast.walk(ast.parse(Path(preflight.__file__).read_text())) if isinstance(node, ast.Call)]
    rules = {
        call.args[0].value
        for call in calls
        if isinstance(call.func, ast.Name) and call.func.id == "PreflightFinding" and isinstance(call.args[0], ast.Constant)
    }
    return errors | reasons | set(recipe_preflight.REASONS) | {str(rule) for rule in rules}


def test_each_failure_names_a_check_that_exists() -> None:
    text = PAGE.read_text("utf-8")
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ") and "symptom" not in line]
    named = [set(re.findall(r"`([a-z0-9-]+)`", row[2])) for row in rows]
    assert len(rows) > 20
    assert all(len(row) == 3 for row in rows)
    assert all(named)
    assert set.union(*named) <= references()
    assert len(text.split()) <= 600


def test_the_failures_of_the_seed_reports_are_on_the_page() -> None:
    text = PAGE.read_text("utf-8")
    wanted = {"ngram-slower", "speculation-headless", "draft-b12x", "graph-memory-negative", "cache-unpinned", "server-gone", "server-garbage"}
    assert {name for name in wanted if f"`{name}`" not in text} == set()
