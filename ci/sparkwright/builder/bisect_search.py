"""
Two searches for what changed an answer: along a line by halves, and among a set by leaving things out.

Both are pure. They ask for answers, of which some cannot be had (``skip``), and never take silence for one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, TypeVar

import msgspec

T = TypeVar("T")

Answer = Literal["good", "bad", "skip"]


class Turn(msgspec.Struct, frozen=True):
    """
    Where the answer changes on a line.

    Attributes:
        last: Number of the last place that answers as the beginning does.
        first: Number of the first that answers as the end does.
        between: Those in the midst that gave no answer; without any, *first* is the turn.
    """

    last: int
    first: int
    between: tuple[int, ...] = ()


def turn(count: int, ask: Callable[[int], Answer]) -> Turn:
    """
    Return where the answer changes between place 0 and place *count* − 1, which must differ.

    The next place is the one that is farthest from all that were asked: without a skip that is the middle, and among skips it leaves
    them by the shortest way. At most 2 + ⌈log2 *count*⌉ places are asked, and as many more as gave no answer.
    """
    answers = {0: ask(0), count - 1: ask(count - 1)}
    last, first = 0, count - 1
    while left := [place for place in range(last + 1, first) if place not in answers]:
        asked = [place for place in answers if last <= place <= first]
        place = max(left, key=lambda one: (min(abs(one - other) for other in asked), -abs(2 * one - last - first)))
        answers[place] = ask(place)
        if answers[place] == answers[0]:
            last = place
        elif answers[place] == answers[count - 1]:
            first = place
    return Turn(last, first, tuple(range(last + 1, first)))


def minimal(items: Sequence[T], ask: Callable[[tuple[T, ...]], Answer], wanted: Answer) -> tuple[T, ...]:
    """
    Return the smallest part of *items*, in their order, that still answers *wanted*, in the sense that no single one can go.

    It is Zeller and Hildebrandt's ddmin (Simplifying and isolating failure-inducing input, 2002). The whole must answer *wanted*,
    and nothing at all must not.
    """
    known: dict[tuple[int, ...], Answer] = {}

    def gives(chosen: tuple[int, ...]) -> bool:
        if chosen not in known:
            known[chosen] = ask(tuple(items[number] for number in chosen))
        return known[chosen] == wanted

    current, parts = tuple(range(len(items))), 2
    while len(current) > 1:
        chunks = [current[len(current) * n // parts : len(current) * (n + 1) // parts] for n in range(parts)]
        rest = [tuple(one for one in current if one not in chunk) for chunk in chunks]
        if smaller := next((chunk for chunk in chunks if gives(chunk)), None):
            current, parts = smaller, 2
        elif parts > 2 and (smaller := next((one for one in rest if gives(one)), None)):
            current, parts = smaller, max(parts - 1, 2)
        elif parts >= len(current):
            break
        else:
            parts = min(2 * parts, len(current))
    return tuple(items[number] for number in current)
