"""What notes are made of before they are Markdown or HTML: blocks of words, of which every string may come from a stranger."""

from __future__ import annotations

import msgspec

from sparkwright.core.states import State

#: Written where a record holds no figure.
UNMEASURED = "not measured"


class Code(msgspec.Struct, frozen=True):
    """A name, a hash or a word of a command, shown as it stands."""

    text: str


class Strong(msgspec.Struct, frozen=True):
    """Words that matter most."""

    text: str


class Slanted(msgspec.Struct, frozen=True):
    """Words in place of a fact that there is not."""

    text: str


class Mark(msgspec.Struct, frozen=True):
    """A state, with its sign and its word."""

    state: State


Inline = str | Code | Strong | Slanted | Mark
#: One line of text, in one piece or in several.
Words = Inline | tuple[Inline, ...]


class Heading(msgspec.Struct, frozen=True):
    """A heading; *level* 2 begins a section, 3 a part of one."""

    text: str
    level: int = 2


class Says(msgspec.Struct, frozen=True):
    """A paragraph."""

    words: Words


class Bullets(msgspec.Struct, frozen=True):
    """A list."""

    items: tuple[Words, ...]


class Grid(msgspec.Struct, frozen=True):
    """A table; the first *left* columns hold text, the others figures."""

    head: tuple[str, ...]
    rows: tuple[tuple[Words, ...], ...]
    left: int = 1


class Commands(msgspec.Struct, frozen=True):
    """Lines for a shell."""

    lines: tuple[str, ...]


Block = Heading | Says | Bullets | Grid | Commands

#: Where a record holds no figure.
MISSING = Slanted(UNMEASURED)


def short(sha256: str) -> Inline:
    """Return the beginning of a hash, as people compare it; nothing for none."""
    return Code(sha256[:12]) if sha256 else "–"
