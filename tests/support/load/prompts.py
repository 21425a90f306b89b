"""The prompts of an order, for generators that send prompts of ours."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import msgspec

from sparkwright.gates.load.order import LoadInvalid, Order

#: Tokens of random prompts: single bytes in every vocabulary that we know, so none is beyond a small one.
CODES = range(3, 256)

#: Bytes of one line of a file of texts, and lines of it.
LINE, LINES = 4 << 20, 100_000


class _Line(msgspec.Struct):
    prompt: str


def texts(path: Path) -> list[str]:
    """
    Return the prompts of the JSON lines in the file at *path*.

    Raises:
        LoadInvalid: It cannot be read, is none, or is too large (``texts-unreadable``).
    """
    found: list[str] = []
    try:
        with path.open("rb") as stream:
            while line := stream.readline(LINE + 1):
                if len(line) > LINE or len(found) == LINES:
                    raise LoadInvalid("texts-unreadable", f"{path.name} has a line of more than {LINE} bytes, or more than {LINES} lines")
                if line.strip():
                    found.append(msgspec.json.decode(line, type=_Line).prompt)
    except (OSError, ValueError, RecursionError) as error:
        raise LoadInvalid("texts-unreadable", f"{path.name} holds no prompts: {error!s:.200}") from None
    if not found:
        raise LoadInvalid("texts-unreadable", f"{path.name} holds no prompts")
    return found


def of(order: Order) -> Iterator[str | list[int]]:
    """
    Yield the prompts of *order* without end, new ones for another seed.

    Raises:
        LoadInvalid: Its file of texts cannot be read.
    """
    drawn = random.Random(order.seed)
    if order.prompts == "random":
        while True:
            yield drawn.choices(CODES, k=order.prompt)
    if order.texts is None:
        raise LoadInvalid("texts-unreadable", "prompts are to be texts, and no file of them is named")
    known = texts(order.texts)
    while True:
        drawn.shuffle(known)
        yield from known
