"""
The text of docs/reference/errors.md, made from the error classes themselves.

``python tests/unit/errors_page.py`` writes it; `test_repository` fails while it is out of date.
"""

import importlib
import itertools
import pkgutil
from pathlib import Path

import sparkwright
from sparkwright.core.errors import Advice, classes

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "errors.md"

HEAD = """\
# Errors

<!-- Made by tests/unit/errors_page.py; change the classes, then run it again. -->

Every expected failure has a reference that stays the same from release to release: the first word after `error:`, and the field
`reference` under `--json`. The exit code is 1 unless the row has another: 2 for wrong usage, 4 where nothing is decided, 5 where the
network or an upstream is out of reach. Rows are grouped by the package that raises the error. Reasons of checks are in [gates.md](gates.md).
"""


def entries() -> list[tuple[str, str, Advice]]:
    """Return the package, the reference and the advice of each entry, sorted."""
    for module in pkgutil.walk_packages(sparkwright.__path__, "sparkwright."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    # Tests define classes of their own, which are none of the program's; a class that inherits its table declares nothing.
    own = [kind for kind in classes() if kind.__module__.startswith("sparkwright.") and "references" in vars(kind)]
    return sorted((kind.__module__.split(".")[1], *entry) for kind in own for entry in kind.references.items())


def row(reference: str, advice: Advice) -> str:
    """Return the line of a table."""
    code = f" (exit {advice.exit_code})" if advice.exit_code != 1 else ""
    means, todo = (text.replace("|", "\\|") for text in (advice.means, advice.todo))
    return f"|`{reference}`{code}|{means}|{todo}|\n"


def render() -> str:
    """Return the page."""
    parts = [HEAD]
    for package, group in itertools.groupby(entries(), lambda entry: entry[0]):
        parts += [f"\n## {package}\n\n|reference|meaning|what to do|\n|---|---|---|\n"]
        parts += [row(reference, advice) for _, reference, advice in group]
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(render(), "utf-8")
