"""
The text of docs/reference/errors.md, made from the error classes themselves.

``python tests/unit/errors_page.py`` writes it; `test_repository` fails while it is out of date.
"""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

import sparkwright
from sparkwright.core.errors import Advice, classes

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "errors.md"

HEAD = """\
# Errors

<!-- Made by tests/unit/errors_page.py; change the classes, then run it again. -->

Every expected failure has a reference that stays the same from release to release. It is the first thing after `error:`, and the field
`reference` under `--json`. The exit code is 1 unless stated otherwise:
2 for wrong usage, 4 where nothing is decided, 5 where the network or an upstream is out of reach.
"""


def tables() -> list[tuple[str, Advice]]:
    """Return every reference of the package with its advice, in the order of the references; one that two classes have comes twice."""
    for module in pkgutil.walk_packages(sparkwright.__path__, "sparkwright."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    # Tests define classes of their own, which are none of the program's; a class that inherits its table declares nothing.
    own = [kind for kind in classes() if kind.__module__.startswith("sparkwright.") and "references" in vars(kind)]
    return sorted(entry for kind in own for entry in kind.references.items())


def render() -> str:
    """Return the page."""
    entries = []
    for reference, advice in tables():
        code = f"\n\nExit code {advice.exit_code}." if advice.exit_code != 1 else ""
        entries.append(f"\n## `{reference}`\n\n{advice.means}\n\n**What to do.** {advice.todo}{code}\n")
    return HEAD + "".join(entries)


if __name__ == "__main__":
    PAGE.write_text(render(), "utf-8")
