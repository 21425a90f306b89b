"""docs/seed-systems.md has a state for every system of the seed reports, and names only commands that exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from tests.unit.test_failures_page import command_references

from sparkwright.cli.main import COMMANDS, parsers

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "seed-systems.md").read_text("utf-8")
#: A command as the page writes it: its name, and the words after it.
COMMAND = re.compile(r"`((?:(?:lab|model|patch|release) )?[a-z]+)((?: [^`]+)?)`")


def rows() -> dict[str, list[str]]:
    lines = (line.strip("| ").split(" | ") for line in TEXT.splitlines() if re.match(r"\| S\d", line))
    return {row[0]: row for row in lines}


def commands(text: str) -> list[tuple[str, list[str]]]:
    return [(name, shlex.split(words)) for name, words in COMMAND.findall(text) if name in COMMANDS]


def test_every_seed_system_has_a_state_and_what_shows_it() -> None:
    """A working one names a command; a refused one its evidence, in ideas.yaml or in the experiment."""
    table = rows()
    assert list(table) == [f"S{number}" for number in range(1, 23)]
    assert all(len(row) == 5 for row in table.values())
    extra = [line.strip("| ").split(" | ") for line in TEXT.partition("## Extra items")[2].splitlines() if line.startswith("| ")][1:]
    assert len(extra) > 5
    assert all(re.match(r"works|refused", row[2]) for row in extra)
    for _, _, _, state, where in table.values():
        parts = re.split(r"; |, ", state)
        assert re.match(r"works|refused|not run", parts[0]), state
        assert state.startswith("refused") or commands(where), where
        assert "refused" not in state or re.search(r"ideas\.yaml|experiments/|no known flags", where), where


def test_every_command_option_recipe_and_workload_of_the_page_exists() -> None:
    workloads = set(re.findall(r"^  ([a-z0-9-]+):", (ROOT / "ci" / "gates" / "workloads.yaml").read_text(), re.MULTILINE))
    seen = set()
    for name, words in commands(TEXT):
        options = {option for action in parsers(COMMANDS[name].module)[name]._actions for option in action.option_strings}
        assert {word for word in words if word.startswith("--")} <= options, (name, words)
        seen.add(name)
        if name == "serve" and words and not words[0].startswith("-"):
            assert (ROOT / "ci" / "recipes" / f"{words[0]}.yaml").exists(), words
        if "--workload" in words:
            # A workload, or a cell of its texts.
            assert words[words.index("--workload") + 1].split()[0] in workloads
    assert {"plan", "serve", "bench", "gate", "build", "lab image", "model tune", "model inspect", "patch watch"} <= seen
    named = {word for row in rows().values() for word in re.findall(r"`([a-z]+-(?:refused|unpinned|headless|b12x|slower))`", row[4])}
    assert named
    assert named <= command_references()
