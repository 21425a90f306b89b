"""
What every page of ours has in common: one HTML file that needs nothing else, runs nothing, and escapes every string.

A room has its templates in ``templates/`` beside its code, where ``{% extends "base.html" %}`` finds the frame of this one, and may have
a ``style.css`` of its own there that comes after this one's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import resources
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup


def environment(room: str, finalize: Callable[[Any], Any] | None = None) -> Environment:
    """Return the templates of the package *room*; *finalize* makes of each value what may be written."""
    from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

    return Environment(
        loader=ChoiceLoader([PackageLoader(room), PackageLoader(__name__)]), autoescape=True, undefined=StrictUndefined, finalize=finalize,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip


@functools.cache
def style(*rooms: str) -> Markup:
    """Return the style of all pages, and after it those of the packages *rooms*."""
    from markupsafe import Markup

    files = (resources.files(room).joinpath("templates/style.css") for room in (__name__, *rooms))
    # The styles are ours, and a style element knows no escaping.
    return Markup("".join(file.read_text("utf-8") for file in files))  # noqa: S704
