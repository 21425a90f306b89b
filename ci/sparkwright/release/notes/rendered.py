"""Blocks as Markdown and as HTML; every string passes through the escaping of one or the other."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator
from typing import Any

from sparkwright.release import frame
from sparkwright.release.manifest.records import Proof, Release
from sparkwright.release.notes import whole, words
from sparkwright.release.notes.blocks import (
    Block,
    Bullets,
    Code,
    Grid,
    Heading,
    Inline,
    Mark,
    Says,
    Slanted,
    Strong,
    Words,
)
from sparkwright.release.notes.markdown import table, text

ROOM = "sparkwright.release.notes"

#: What opens a list or underlines a heading where a line begins with it.
_OPENING = re.compile(r"^(?:(\d+)(?=[.)](?:\s|$)))?([-+=.)])")

_ELEMENTS = {Code: "code", Strong: "strong", Slanted: "em"}


def markdown(release: Release, proof: Proof, before: Release | None) -> str:
    """
    Return the notes of *release* as Markdown.

    Args:
        before: The release of the same stack before it; None where there is none, or it is not at hand.

    Raises:
        index-damaged: The proof is of another release.
    """
    return as_markdown(whole.blocks(release, proof, before))


def html(release: Release, proof: Proof, before: Release | None) -> str:
    """Return the same as `markdown` as a fragment of HTML, whose headings begin with h2; it brings no style, script or address."""
    return as_html(whole.blocks(release, proof, before))


def as_markdown(blocks: Iterable[Block]) -> str:
    """Return *blocks* as Markdown."""
    return "\n\n".join("\n".join(_lines(block)) for block in blocks) + "\n"


def _lines(block: Block) -> Iterator[str]:
    if isinstance(block, Heading):
        yield f"{'#' * block.level} {_plain(block.text)}"
    elif isinstance(block, Says):
        yield _begun(_inline(block.words))
    elif isinstance(block, Bullets):
        yield from (f"- {_begun(_inline(item))}" for item in block.items)
    elif isinstance(block, Grid):
        # A bar ends a cell even inside code, unless it is escaped there, too.
        yield from table(block.head, ([_cell(cell) for cell in row] for row in block.rows), block.left)
    else:
        lines = [_clean(line) for line in block.lines]
        fence = "`" * max(3, *(_longest(line) + 1 for line in lines)) if lines else "```"
        yield from (f"{fence}console", *lines, fence)


def _cell(cell: Words) -> str:
    return _inline(cell, bar=r"\|")


def _inline(said: Words, bar: str = "|") -> str:
    parts = said if isinstance(said, tuple) else (said,)
    return "".join(_piece(part, bar) for part in parts)


def _piece(part: Inline, bar: str) -> str:
    if isinstance(part, Code):
        return _code(part.text, bar)
    if isinstance(part, Strong):
        return f"**{_plain(part.text)}**"
    if isinstance(part, Slanted):
        return f"*{_plain(part.text)}*"
    if isinstance(part, Mark):
        return " ".join(words.STATES[part.state])
    return _plain(part)


@functools.lru_cache(maxsize=4096)
def _plain(said: str) -> str:
    return text(said)


def _begun(line: str) -> str:
    """Return *line* so that its beginning makes no list, rule or block of code of it."""
    return _OPENING.sub(r"\1\\\2", line.lstrip(), count=1)


@functools.lru_cache(maxsize=4096)
def _clean(said: str) -> str:
    return words.clean(said)


def _code(said: str, bar: str) -> str:
    shown = _clean(said).replace("|", bar)
    fence = "`" * (_longest(shown) + 1)
    pad = " " if shown.startswith("`") or shown.endswith("`") else ""
    return f"{fence}{pad}{shown}{pad}{fence}"


def _longest(said: str) -> int:
    return max((len(run) for run in re.findall("`+", said)), default=0)


def as_html(blocks: Iterable[Block]) -> str:
    """Return *blocks* as a fragment of HTML."""
    made: str = _template("fragment.html").render(blocks=[_named(block) for block in blocks])
    return made


def _named(block: Block) -> tuple[str, Block]:
    return type(block).__name__, block


@functools.cache
def _template(name: str) -> Any:
    environment = frame.environment(ROOM)
    environment.filters["shown"] = _shown
    environment.filters["clean"] = _clean
    return environment.get_template(name)


def _shown(said: Words) -> Any:
    """Return *said* as HTML."""
    from markupsafe import Markup

    # Each piece has been escaped.
    return Markup("".join(map(_element, said)) if isinstance(said, tuple) else _element(said))  # noqa: S704


@functools.lru_cache(maxsize=4096)
def _element(part: Inline) -> str:
    from markupsafe import escape

    if isinstance(part, Mark):
        sign, word = words.STATES[part.state]
        return f'<span class="state {part.state}">{sign} {word}</span>'
    if isinstance(part, str):
        return str(escape(_clean(part)))
    return "<{0}>{1}</{0}>".format(_ELEMENTS[type(part)], escape(_clean(part.text)))
