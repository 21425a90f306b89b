"""The templates of an index's pages and of release notes."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from sparkwright.core import pages

if TYPE_CHECKING:
    from jinja2 import Environment


def render(name: str, **values: Any) -> str:
    """Return the template *name* with *values*."""
    return _environment().get_template(name).render(values)


@functools.cache
def _environment() -> Environment:
    environment = pages.environment("sparkwright.release")
    environment.filters.update(md=_markdown, code=_markdown_code)
    return environment


def _markdown(value: Any) -> str:
    """Return *value* as plain text of Markdown: no markup, no link, no mention."""
    from sparkwright.core.console import markdown_escape

    return markdown_escape(str(value)[: pages.LONGEST])


def _markdown_code(value: Any) -> str:
    """Return *value* as code in a cell of a Markdown table."""
    text = str(value)[: pages.LONGEST].replace("`", "'").replace("|", "\\|")
    return f"`{text}`" if text else "–"
