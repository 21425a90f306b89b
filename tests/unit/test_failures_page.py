"""docs/failures.md is short, docs/seed-systems.md has a state for every system, and neither names what the program does not have."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from tests.unit import gates_page

import sparkwright.cli.serve
from sparkwright.bench.recipes import preflight as recipe_preflight
from sparkwright.cli.main import COMMANDS, parsers
from sparkwright.core.errors import classes
from sparkwright.gates.core import server_under_test
from sparkwright.gates.core.ladder import GATES
from sparkwright.serving import preflight

ROOT = Path(__file__).parents[2]
FAILURES, SYSTEMS = ((ROOT / "docs" / name).read_text("utf-8") for name in ("failures.md", "seed-systems.md"))
#: A reference has a hyphen; a command, a flag and a message of vLLM do not look like one.
REFERENCE = re.compile(r"`([a-z0-9]+(?:-[a-z0-9]+)+|emulation|repetition)`")
#: A command as a page writes it: its name, and the words after it.
COMMAND = re.compile(r"`(?:sparkwright )?((?:(?:lab|model|patch|release) )?[a-z]+)((?: [^`]+)?)`")


def command_references() -> set[str]:
    """Return every reference of an error of a command, and of a rule of `serve`."""
    assert sparkwright.cli.serve
    rules = re.findall(r'PreflightFinding\(\s*"([a-z0-9-]+)"', Path(preflight.__file__).read_text())
    return {reference for kind in classes() for reference in kind.references} | {*recipe_preflight.REASONS, *rules}


def test_each_failure_names_a_check_of_the_command_or_gate_that_has_it() -> None:
    """A part of the last column, up to a semicolon, is of the gates that it names, or of commands if it names none."""
    rows, wrong = re.findall(r"^\| (?!symptom)(.+) \| (.+) \| (.+) \|$", FAILURES, re.MULTILINE), []
    assert len(rows) > 20
    for _, _, caught in rows:
        assert REFERENCE.search(caught)
        for part in caught.split(";"):
            gates = re.findall(r"\bG\d\b", part)
            assert set(gates) <= set(GATES)
            owners = [gates_page.reasons(gate).keys() | server_under_test.REASONS for gate in gates] or [command_references()]
            wrong += [(part, name) for name in REFERENCE.findall(part) if not all(name in owner for owner in owners)]
    assert wrong == []


def test_every_reference_of_the_pages_exists() -> None:
    known = command_references().union(server_under_test.REASONS, *map(gates_page.reasons, GATES))
    assert set(REFERENCE.findall(FAILURES)) <= known
    assert set(re.findall(r"`([a-z]+-(?:refused|unpinned|headless|b12x|slower))`", SYSTEMS)) <= known
    assert len(FAILURES.split()) <= 600


@pytest.mark.parametrize(("page", "least"), [(FAILURES, {"plan", "serve", "model tune"}), (SYSTEMS, {"build", "lab image", "model inspect", "patch watch"})])
def test_every_command_option_recipe_and_workload_of_the_pages_exists(page: str, least: set[str]) -> None:
    workloads = (ROOT / "ci" / "gates" / "workloads.yaml").read_text()
    found = [(name, shlex.split(text)) for name, text in COMMAND.findall(page) if name in COMMANDS]
    assert least <= {name for name, _ in found}
    for name, words in found:
        options = {option for action in parsers(COMMANDS[name].module)[name]._actions for option in action.option_strings}
        assert {word for word in words if word.startswith("--")} <= options, (name, words)
        assert name != "serve" or not words or words[0].startswith("-") or (ROOT / "ci" / "recipes" / f"{words[0]}.yaml").exists(), words
        # A workload, or a cell of its texts.
        assert "--workload" not in words or f"\n  {words[words.index('--workload') + 1].split()[0]}:" in workloads, words


def test_every_seed_system_has_a_state_and_what_shows_it() -> None:
    """A working one names a command; a refused one its evidence, in ideas.yaml or in the experiment."""
    rows = re.findall(r"^\| (S\d+) \| .+ \| (.+) \| (.+) \|$", SYSTEMS, re.MULTILINE)
    assert [name for name, _, _ in rows] == [f"S{number}" for number in range(1, 23)]
    for _, state, where in rows:
        assert re.match(r"works|refused|not run", state), state
        shown = re.search(r"ideas\.yaml|experiments/|no known flags", where) if "refused" in state else COMMAND.search(where)
        assert shown, where
