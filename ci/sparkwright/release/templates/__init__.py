"""The templates of pages and notes: every string in them is escaped, and made one plain line."""

from __future__ import annotations

import functools
import unicodedata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Environment

#: Characters of the longest string; a longer one would flood the page.
LONGEST = 1000
#: State → its sign; colour never stands alone.
SIGNS = {"pass": "✓", "fail": "✗", "inconclusive": "?", "invalid": "!", "not-run": "–"}


def render(name: str, **values: Any) -> str:
    """Return the template *name* with *values*."""
    return _environment().get_template(name).render(values)


@functools.cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

    environment = Environment(
        loader=PackageLoader("sparkwright.release"),
        autoescape=select_autoescape(["html"]),
        undefined=StrictUndefined,
        finalize=_clean,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(md=_markdown, code=_markdown_code)
    environment.globals["signs"] = SIGNS
    return environment


def _clean(value: Any) -> Any:
    """Return a string without what moves a cursor or turns the direction of writing."""
    if type(value) is not str or value.isascii():
        return value
    return "".join(
        "\ufffd" if unicodedata.category(c) in ("Cf", "Cs", "Zl", "Zp") else c for c in value
    )


def _markdown(value: Any) -> str:
    """Return *value* as plain text of Markdown: no markup, no link, no mention."""
    from sparkwright.core.console import markdown_escape

    return markdown_escape(str(value)[:LONGEST])


def _markdown_code(value: Any) -> str:
    """Return *value* as code in a cell of a Markdown table."""
    text = str(value)[:LONGEST].replace("`", "'").replace("|", "\\|")
    return f"`{text}`" if text else "–"
