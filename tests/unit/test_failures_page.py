"""docs/failures.md is short, and names nothing that the program does not print."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.unit import gates_page

import sparkwright.cli.serve
from sparkwright.bench.recipes import preflight as recipe_preflight
from sparkwright.cli.main import COMMANDS
from sparkwright.core.errors import classes
from sparkwright.gates.core import server_under_test
from sparkwright.gates.core.ladder import GATES
from sparkwright.serving import preflight

PAGE = Path(__file__).parents[2] / "docs" / "failures.md"
#: A reference has a hyphen; a command, a flag and a message of vLLM do not look like one.
REFERENCE = re.compile(r"`([a-z0-9]+(?:-[a-z0-9]+)+|emulation|repetition)`")


def command_references() -> set[str]:
    """Return every reference of an error of a command, and of a rule of `serve`."""
    assert sparkwright.cli.serve
    calls = [node for node in ast.walk(ast.parse(Path(preflight.__file__).read_text())) if isinstance(node, ast.Call)]
    rules = {
        str(call.args[0].value)
        for call in calls
        if isinstance(call.func, ast.Name) and call.func.id == "PreflightFinding" and isinstance(call.args[0], ast.Constant)
    }
    return {reference for kind in classes() for reference in kind.references} | set(recipe_preflight.REASONS) | rules


def gate_reasons(gate: str) -> set[str]:
    return set(gates_page.reasons(gate)) | set(server_under_test.REASONS)


def table_rows() -> list[list[str]]:
    lines = PAGE.read_text("utf-8").splitlines()
    return [line.strip("| ").split(" | ") for line in lines if line.startswith("| ") and "symptom" not in line]


def test_each_failure_names_a_check_of_the_command_or_gate_that_has_it() -> None:
    """A part of the last column, up to a semicolon, is of the gates that it names, or of commands if it names none."""
    rows, wrong = table_rows(), []
    assert len(rows) > 20
    assert all(len(row) == 3 for row in rows)
    for _, _, caught in rows:
        assert REFERENCE.search(caught)
        for part in caught.split(";"):
            gates = re.findall(r"\bG\d\b", part)
            assert set(gates) <= set(GATES)
            owners = [gate_reasons(gate) for gate in gates] or [command_references()]
            wrong += [(part, name) for name in REFERENCE.findall(part) if not all(name in owner for owner in owners)]
    assert wrong == []


def test_every_reference_and_command_of_the_page_exists() -> None:
    """In every column and outside of the tables."""
    text = PAGE.read_text("utf-8")
    known = command_references().union(*(gate_reasons(gate) for gate in GATES))
    assert set(REFERENCE.findall(text)) - known == set()
    commands = re.findall(r"`(?:sparkwright )?((?:plan|serve|model)(?: [a-z]+)*)(?: --[a-z]+)?`", text)
    assert {"plan", "serve", "model tune"} <= {*commands} <= {*COMMANDS}
    assert len(text.split()) <= 600


def test_the_failures_of_the_seed_reports_are_on_the_page() -> None:
    text = PAGE.read_text("utf-8")
    wanted = {"ngram-slower", "speculation-headless", "draft-b12x", "graph-memory-negative", "cache-unpinned", "server-gone", "server-garbage"}
    assert {name for name in wanted if f"`{name}`" not in text} == set()
