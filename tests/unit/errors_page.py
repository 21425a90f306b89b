"""
The text of docs/errors.md, made from the error classes themselves.

``python tests/unit/errors_page.py`` writes it; `test_repository` fails while it is out of date.
"""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

import sparkwright
from sparkwright.core.errors import SparkwrightError

PAGE = Path(__file__).parents[2] / "docs" / "errors.md"

HEAD = """\
# Errors

<!-- Made by tests/unit/errors_page.py; change the classes, then run it again. -->

Every expected failure has a reference that stays the same from release to release. It is the first thing after `error:`, and the field
`reference` under `--json`. The exit code is 1 unless stated otherwise.
"""


def kinds() -> list[type[SparkwrightError]]:
    """Return every kind of error in the package, wherever it is defined, in the order of their references."""
    for module in pkgutil.walk_packages(sparkwright.__path__, "sparkwright."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    found, todo = set[type[SparkwrightError]](), [SparkwrightError]
    while todo:
        todo = [child for kind in todo for child in kind.__subclasses__()]
        found.update(todo)
    # Tests define kinds of their own, which are none of the program's.
    return sorted((kind for kind in found if kind.__module__.startswith("sparkwright.")), key=lambda kind: kind.reference)


def render() -> str:
    """Return the page."""
    entries = []
    for kind in kinds():
        code = f"\n\nExit code {kind.exit_code}." if kind.exit_code != 1 else ""
        entries.append(f"\n## `{kind.reference}`\n\n{kind.means}\n\n**What to do.** {kind.todo}{code}\n")
    return HEAD + "".join(entries)


if __name__ == "__main__":
    PAGE.write_text(render(), "utf-8")
