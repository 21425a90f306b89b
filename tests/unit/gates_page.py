"""
The text of docs/reference/gates.md and docs/reference/verdict.schema.json, made from the gates themselves.

``python tests/unit/gates_page.py`` writes both; tests fail while one is out of date.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import msgspec

import sparkwright.gates
from sparkwright.core.states import State
from sparkwright.gates.core import ladder, policy, server_under_test
from sparkwright.gates.core.ladder import GATES
from sparkwright.gates.core.verdict import Ladder

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "gates.md"
SCHEMA = PAGE.with_name("verdict.schema.json")

HEAD = """\
# Gates: checks and reasons

<!-- Made by tests/unit/gates_page.py; change the gates, then run it again. -->

Every check of a gate is *pass*, *fail*, *inconclusive*, *invalid* or *not-run*, and all but the first name a reason that stays the
same from release to release. A gate is as good as its worst required check, a ladder as its worst gate; a check that did not run is
never a pass. `*` in a name stands for a part that a policy, a recipe or the wheel gives.
`sparkwright gate --json` prints the verdicts; [verdict.schema.json](verdict.schema.json) is their form.
"""

ROLES = {"decides": "", "informs": " (informs only)", "reports": " (never passes)"}


def reasons(gate: str) -> dict[str, str]:
    """Return every reason that the modules of *gate* define."""
    folder = "wheel_audit" if gate == "G0" else policy.PACKAGES[gate]
    found: dict[str, str] = {}
    for module in pkgutil.walk_packages(sparkwright.gates.__path__, "sparkwright.gates."):
        parts = module.name.split(".")
        # Scripts for another environment are not modules of this one.
        if parts[2] == folder and "target_env_scripts" not in parts:
            found |= getattr(importlib.import_module(module.name), "REASONS", {})
    return found


def _table(rows: Mapping[str, str]) -> str:
    cells = [
        f"| `{name}` | {text.replace('|', chr(92) + '|')} |\n"
        for name, text in sorted(rows.items())
    ]
    return "".join(["\n| reason | meaning, and what to do |\n|---|---|\n", *cells])


def page() -> str:
    """Return the page."""
    common = {**server_under_test.REASONS, **ladder.REASONS}
    parts = [HEAD, "\n## Every gate\n", _table(common)]
    for gate, title in GATES.items():
        entries = [one for one in policy.declared(gate) if one not in ladder.STOPPED]
        names = ", ".join(f"`{one.name}`{ROLES[one.role]}" for one in entries)
        parts += [f"\n## {gate}: {title}\n\nChecks: {names}.\n", _table(reasons(gate))]
    return "".join(parts)


def schema() -> dict[str, Any]:
    """Return the JSON schema of a document of verdicts."""
    made = msgspec.json.schema(Ladder)
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
    PAGE.write_text(page(), "utf-8")
    SCHEMA.write_text(json.dumps(schema(), indent=1) + "\n", "utf-8")
