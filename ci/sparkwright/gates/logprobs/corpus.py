"""
The texts whose tokens the distributions gate scores: reviewed paragraphs of several genres, in orders and with lines made by code.

The same file gives the same texts on every machine, whatever Python it has: the numbers come from a hash, not from a random generator.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path

from sparkwright.core import strict_yaml
from sparkwright.core.errors import FileError
from sparkwright.core.files import canonical, sha256_bytes

#: Characters of a text: enough for 512 tokens of any tokenizer whose tokens have less than 12 characters on average.
LENGTH = 6000

NAMES = ("Ada", "Bruno", "Chen", "Dalia", "Emeka", "Farah", "Goran", "Hana", "Ivo", "Jun", "Katya", "Luis", "Mira", "Noor", "Oskar")
THINGS = ("apples", "books", "candles", "drums", "envelopes", "forks", "gloves", "hammers", "jars", "keys", "lamps", "maps", "nails")


class _Draw:
    """Numbers in an order that only *seed* decides."""

    def __init__(self, seed: str) -> None:
        self._seed, self._count = seed, 0

    def below(self, limit: int) -> int:
        self._count += 1
        return int.from_bytes(hashlib.sha256(f"{self._seed}/{self._count}".encode()).digest()[:8], "big") % limit


def _sums(draw: _Draw) -> str:
    lines = []
    for _ in range(12):
        a, b = draw.below(900) + 100, draw.below(90) + 10
        lines.append((f"{a} + {b} = {a + b}", f"{a} - {b} = {a - b}", f"{a} * {b} = {a * b}")[draw.below(3)])
    return "\n".join(lines)


def _stories(draw: _Draw) -> str:
    lines = []
    for _ in range(4):
        who, other = NAMES[draw.below(len(NAMES))], NAMES[draw.below(len(NAMES))]
        what, many, some = THINGS[draw.below(len(THINGS))], draw.below(60) + 20, draw.below(19) + 1
        lines.append(f"{who} has {many} {what} and gives {some} of them to {other}. Now {who} has {many - some} {what} left.")
    return "\n".join(lines)


def _records(draw: _Draw) -> str:
    lines = ["id,name,item,count,price"]
    for row in range(10):
        name, thing = NAMES[draw.below(len(NAMES))], THINGS[draw.below(len(THINGS))]
        lines.append(f"{1000 + row * 7},{name},{thing},{draw.below(40) + 1},{draw.below(90) + 1}.{draw.below(100):02d}")
    return "\n".join(lines)


def _functions(draw: _Draw) -> str:
    lines = []
    for _ in range(3):
        thing, factor, offset = THINGS[draw.below(len(THINGS))], draw.below(12) + 2, draw.below(50)
        lines += [f"def price_of_{thing}(count: int) -> int:", f"    return {factor} * count + {offset}", ""]
    return "\n".join(lines)


MADE: tuple[Callable[[_Draw], str], ...] = (_sums, _stories, _records, _functions)


def load(path: Path) -> Mapping[str, tuple[str, ...]]:
    """
    Return the paragraphs in the file at *path*, by genre.

    Raises:
        file-invalid: It is not such a file, or has a genre without a paragraph.
    """
    read = strict_yaml.load(path, dict[str, tuple[str, ...]])
    if not read or any(not paragraphs or not all(map(str.strip, paragraphs)) for paragraphs in read.values()):
        raise FileError("file-invalid", f"{path} has a genre without a paragraph.")
    return read


def texts(paragraphs: Mapping[str, tuple[str, ...]], count: int) -> tuple[str, ...]:
    """Return *count* texts of at least `LENGTH` characters, each with another beginning and another order of genres."""
    return tuple(_text(paragraphs, number) for number in range(count))


def _text(paragraphs: Mapping[str, tuple[str, ...]], number: int) -> str:
    genres, draw = sorted(paragraphs), _Draw(f"text {number}")
    parts: list[str] = []
    # The first paragraphs are scored whole, so the genres take turns in coming first.
    genre = genres[number % len(genres)]
    while sum(map(len, parts)) < LENGTH:
        parts.append(paragraphs[genre][draw.below(len(paragraphs[genre]))].strip())
        if draw.below(3) == 0:
            parts.append(MADE[draw.below(len(MADE))](draw))
        genre = genres[draw.below(len(genres))]
    return "\n\n".join(parts)


def digest_of(made: tuple[str, ...]) -> str:
    """Return the sha256 of texts."""
    return sha256_bytes(canonical(made))
