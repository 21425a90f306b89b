"""
Templates of pages: self-contained HTML files that run nothing and escape every string.

The templates of a package lie in its folder ``templates``, and extend ``base.html`` of this one.
"""

import unicodedata
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from sparkwright.core.states import SIGNS

if TYPE_CHECKING:
    from jinja2 import Environment

#: Characters of the longest string; a longer one would flood the page.
LONGEST = 1000
#: Categories of characters that move a cursor, turn the direction of writing or break a line.
_UNSAFE = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})


class Table(msgspec.Struct, frozen=True):
    """
    A table of the page.

    Attributes:
        heads: Headings; one that begins with ``>`` is of numbers.
    """

    title: str
    heads: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    note: str = ""


def clean(text: str, longest: int = LONGEST) -> str:
    """Return *text* as one line of at most *longest* harmless characters."""
    cut = text if len(text) <= longest else text[: longest - 1] + "…"
    return "".join("\ufffd" if unicodedata.category(c) in _UNSAFE else c for c in cut)


def environment(package: str) -> "Environment":
    """Return the templates of *package*, which make each string that they write harmless."""
    from jinja2 import (
        ChoiceLoader,
        Environment,
        PackageLoader,
        StrictUndefined,
        select_autoescape,
    )

    templates = Environment(
        loader=ChoiceLoader([PackageLoader(package), PackageLoader("sparkwright.core")]),
        autoescape=select_autoescape(["html"]),
        undefined=StrictUndefined,
        # Markup is a subclass of str, and was made by a template or escaped already.
        finalize=lambda value: clean(value) if type(value) is str else value,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    templates.globals.update(signs=SIGNS)
    return templates
