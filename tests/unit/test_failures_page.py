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


def test_each_failure_names_a_check_of_the_command_or_gate_that_has_it() -> None:
    """A part of the last column, up to a semicolon, is of the gates that it names, or of commands if it names none."""
    lines = [line for line in PAGE.read_text("utf-8").splitlines() if line.startswith("| ") and "symptom" not in line]
    rows, wrong = [line.strip("| ").split(" | ") for line in lines], []
    assert len(rows) > 20
    for _, _, caught in rows:
        assert REFERENCE.search(caught)
        for part in caught.split(";"):
            gates = re.findall(r"\bG\d\b", part)
            assert set(gates) <= set(GATES)
            owners = [gates_page.reasons(gate).keys() | server_under_test.REASONS for gate in gates] or [command_references()]
            wrong += [(part, name) for name in REFERENCE.findall(part) if not all(name in owner for owner in owners)]
    assert wrong == []


def test_every_reference_and_command_of_the_page_exists() -> None:
    """In every column and outside of the tables."""
    text = PAGE.read_text("utf-8")
    known = command_references().union(server_under_test.REASONS, *map(gates_page.reasons, GATES))
    assert set(REFERENCE.findall(text)) - known == set()
    commands = re.findall(r"`(?:sparkwright )?((?:plan|serve|model)(?: [a-z]+)*)(?: --[a-z]+)?`", text)
    assert {"plan", "serve", "model tune"} <= {*commands} <= {*COMMANDS}
    assert len(text.split()) <= 600
