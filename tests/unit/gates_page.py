"""
The text of docs/reference/gates.md and docs/reference/verdict.schema.json, made from the gates themselves.

``python tests/unit/gates_page.py`` writes both; tests fail while one is out of date.
"""

import importlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_args

import msgspec

from sparkwright.core.states import State
from sparkwright.gates.core import ladder, policy, server_under_test, verdict

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "gates.md"
SCHEMA = PAGE.with_name("verdict.schema.json")

HEAD = """\
# Gates: checks and reasons

<!-- Made by tests/unit/gates_page.py; change the gates, then run it again. -->

The checks of each gate, and the reasons that a check which is not a pass can name; a reason stays the same from release to release. `*` in
a name stands for a part that a policy, a recipe or the wheel gives. What the gates prove: [gates](../explanation/gates.md). The form of
verdicts, which `sparkwright gate --json` prints: [verdict.schema.json](verdict.schema.json). Errors of commands: [errors.md](errors.md).
"""

ROLES = {"decides": "", "informs": " (informs only)", "reports": " (never passes)"}


def reasons(gate: str) -> dict[str, str]:
    """Return every reason that the module of *gate* defines."""
    module = "wheel_audit" if gate == "G0" else policy.PACKAGES[gate]
    found: dict[str, str] = importlib.import_module(f"sparkwright.gates.{module}").REASONS
    return found


def _table(rows: Iterable[tuple[str, str]]) -> str:
    cells = [f"|`{name}`|{text.replace('|', chr(92) + '|')}|\n" for name, text in sorted(rows)]
    return "".join(["\n|reason|meaning, and what to do|\n|---|---|\n", *cells])


def render() -> str:
    """Return the page; a reason with one meaning in several gates comes once."""
    gates: dict[tuple[str, str], list[str]] = {}
    for gate in ladder.GATES:
        for reason in reasons(gate).items():
            gates.setdefault(reason, []).append(gate)
    common = {**server_under_test.REASONS, **ladder.REASONS}.items()
    shared = [reason for reason, owners in gates.items() if len(owners) > 1]
    parts = [HEAD, "\n## Several gates\n", _table({*common, *shared})]
    for gate, title in ladder.GATES.items():
        entries = [one for one in policy.declared(gate) if one not in ladder.STOPPED]
        names = ", ".join(f"`{one.name}`{ROLES[one.role]}" for one in entries)
        own = [reason for reason, owners in gates.items() if owners == [gate] and reason not in common]
        parts += [f"\n## {gate}: {title}\n\nChecks: {names}.\n", _table(own) if own else ""]
    return "".join(parts)


def schema() -> dict[str, Any]:
    """Return the JSON schema of a document of verdicts."""
    made = msgspec.json.schema(verdict.Ladder)
    state = {"state": {"enum": list(get_args(State))}}
    for name, further in (("Verdict", state), ("Ladder", {**state, "digest": {"type": "string"}})):
        record = made["$defs"][name]
        record["properties"].update(further)
        record["required"] = [*record["required"], *further]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "sparkwright verdicts",
        **made,
    }


if __name__ == "__main__":
    PAGE.write_text(render(), "utf-8")
    SCHEMA.write_text(json.dumps(schema(), indent=1) + "\n", "utf-8")
