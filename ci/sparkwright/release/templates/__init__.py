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
    return pages.environment("sparkwright.release")
