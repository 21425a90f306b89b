"""docs/seed-systems.md has a state for every system of the seed reports, and names only commands that exist."""

from __future__ import annotations

import re
from pathlib import Path

from tests.unit.test_failures_page import command_references

from sparkwright.cli.main import COMMANDS, parsers

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "seed-systems.md").read_text("utf-8")
#: A command as the page writes it: its name, and the words after it.
COMMAND = re.compile(r"`((?:(?:lab|model|patch|release) )?[a-z]+)((?: [^`]+)?)`")


def test_every_seed_system_has_a_state_and_what_shows_it() -> None:
    """A working one names a command; a refused one its evidence, in ideas.yaml or in the experiment."""
    rows = [line.strip("| ").split(" | ") for line in TEXT.splitlines() if re.match(r"\| S\d", line)]
    assert [row[0] for row in rows] == [f"S{number}" for number in range(1, 23)]
    for _, _, _, state, where in rows:
        assert re.match(r"works|refused|not run", state), state
        shown = re.search(r"ideas\.yaml|experiments/|no known flags", where) if "refused" in state else COMMAND.search(where)
        assert shown, where


def test_every_command_option_recipe_and_workload_of_the_page_exists() -> None:
    workloads = set(re.findall(r"^  ([a-z0-9-]+):", (ROOT / "ci" / "gates" / "workloads.yaml").read_text(), re.MULTILINE))
    found = [(name, text.split()) for name, text in COMMAND.findall(TEXT) if name in COMMANDS]
    for name, words in found:
        options = {option for action in parsers(COMMANDS[name].module)[name]._actions for option in action.option_strings}
        assert {word for word in words if word.startswith("--")} <= options, (name, words)
        if name == "serve" and words and not words[0].startswith("-"):
            assert (ROOT / "ci" / "recipes" / f"{words[0]}.yaml").exists(), words
        assert "--workload" not in words or words[words.index("--workload") + 1] in workloads
    assert {"plan", "serve", "bench", "gate", "build", "lab image", "model tune", "model inspect", "patch watch"} <= {name for name, _ in found}
    assert set(re.findall(r"`([a-z]+-(?:refused|unpinned|headless|b12x|slower))`", TEXT)) <= command_references()
