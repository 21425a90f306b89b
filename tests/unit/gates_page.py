"""
The text of docs/gates.md and docs/verdict.schema.json, made from the gates themselves.

``python tests/unit/gates_page.py`` writes both; tests fail while one is out of date.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
from collections.abc import Mapping
from pathlib import Path

import sparkwright.gates
from sparkwright.gates.core import ladder

PAGE = Path(__file__).parents[2] / "docs" / "gates.md"
SCHEMA = PAGE.with_name("verdict.schema.json")

HEAD = """\
# Gates: states and reasons

<!-- Made by tests/unit/gates_page.py; change the gates, then run it again. -->

Every check of a gate is *pass*, *fail*, *inconclusive*, *invalid* or *not-run*, and all but the first name a reason that stays the same
from release to release. A gate is as good as its worst required check, a ladder as its worst gate; what did not run is never a pass.
`sparkwright gate --json` prints the verdicts; [verdict.schema.json](verdict.schema.json) is their form.
"""


def reasons() -> dict[str, Mapping[str, str]]:
    """Return the reasons of every module of the gates that has some, by its title."""
    found: dict[str, Mapping[str, str]] = {}
    for module in pkgutil.walk_packages(sparkwright.gates.__path__, "sparkwright.gates."):
        # What runs in another environment is no module of this one.
        if "inside" in module.name.split("."):
            continue
        loaded = importlib.import_module(module.name)
        if hasattr(loaded, "REASONS"):
            title = getattr(loaded, "TITLE", "") or str(loaded.__doc__).strip().splitlines()[0].rstrip(".")
            found[title] = {**found.get(title, {}), **loaded.REASONS}
    return found


def page() -> str:
    """Return the page."""
    parts = [HEAD]
    for title, rows in sorted(reasons().items()):
        parts.append(f"\n## {title[0].upper()}{title[1:]}\n\n| reason | means, and what to do |\n|---|---|\n")
        parts += [f"| `{name}` | {text.replace('|', chr(92) + '|')} |\n" for name, text in sorted(rows.items())]
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
    SCHEMA.write_text(json.dumps(ladder.schema(), indent=1) + "\n", "utf-8")
