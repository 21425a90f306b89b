"""Which leg stands where: blocks of launches, and A B B A inside them, in an order that a seed decides before anything is measured."""

from __future__ import annotations

import random
from typing import Literal

import msgspec

from sparkwright.bench.records import Side

#: ``both``: two servers at once, legs take turns. ``turns``: one server at a time, each launch runs one leg of each cell.
Resident = Literal["both", "turns"]


class Slot(msgspec.Struct, frozen=True, order=True):
    """
    Where a leg stands in a block.

    Attributes:
        launch: Of the block, from 0 on; which side it is, `sides` says.
        cell: Its index.
        quad, position: In A B B A; a bench has no positions.
    """

    launch: int
    cell: int
    quad: int
    position: int


def sides(seed: int, block: int) -> tuple[Side, Side, Side, Side]:
    """Return the order of a block's quads: A B B A or B A A B, by a coin that falls once for each block."""
    first: bool = random.Random(f"{seed}/order/{block}").random() < 0.5  # noqa: S311  fairness, not secrecy
    outer, inner = ("baseline", "candidate") if first else ("candidate", "baseline")
    return outer, inner, inner, outer  # type: ignore[return-value]  # mypy widens the literals of a conditional tuple


def prompts_seed(seed: int, block: int, place: Slot, attempt: int) -> int:
    """Return the seed of a leg's prompts: another one for each leg, so that no cache has seen them."""
    draw = random.Random(f"{seed}/{block}/{place.launch}/{place.cell}/{place.quad}/{place.position}/{attempt}")  # noqa: S311
    return draw.randrange(1, 2**31)


def launches(resident: Resident, seed: int, block: int) -> tuple[tuple[Side, ...], ...]:
    """Return the launches of a block, one after the other; those in one tuple run at the same time."""
    order = sides(seed, block)
    return ((order[0], order[1]),) if resident == "both" else tuple((side,) for side in order)


def legs(resident: Resident, turn: int, cells: int, quads: int) -> list[Slot]:
    """
    Return the legs of the launch number *turn* of a block, in their order.

    With both servers there, each cell has its quads one after the other. With one at a time, a launch is one position of one quad, so a
    block has one quad, however many were asked for.
    """
    if resident == "turns":
        return [Slot(turn, cell, 0, turn) for cell in range(cells)]
    return [Slot(0, cell, quad, position) for cell in range(cells) for quad in range(quads) for position in range(4)]
