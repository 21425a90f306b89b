"""Two configurations held against each other, in sentences that say what their intervals support, and no more."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

from sparkwright.bench.report import words
from sparkwright.bench.report.compare import MOST_COLUMNS, ROWS, Column
from sparkwright.bench.report.view import Shift, Value, View, shift


class Pair(msgspec.Struct, frozen=True):
    """
    Two configurations held against each other.

    Attributes:
        title: ``NVFP4 against AWQ``. *says*: what the intervals support. *how*: how the two were measured.
        rows: Workload, and what its interval says.
    """

    title: str
    says: str
    how: str
    rows: tuple[tuple[str, str], ...]


def pairs(views: Sequence[View]) -> Iterator[Pair]:
    """Yield each candidate against its own baseline, and the first Result against each of the others."""
    for view in views:
        if view.result.baseline:
            rows = [
                (cell.name, found)
                for cell in view.result.cells
                for one in cell.series
                if one.metric == "tpot" and (found := shift(one))
            ]
            yield _pair(
                _against(view.result.candidate.label, view.result.baseline.label),
                rows,
                "In turns in the same session, block by block.",
            )
    for other in views[1:MOST_COLUMNS]:
        yield _across(views[0], other)


def _against(one: str, other: str) -> str:
    return f"{words.clean(one, 80)} against {words.clean(other, 80)}"


def _across(first: View, other: View) -> Pair:
    one, two = first.result, other.result
    formats = one.quantization and two.quantization and one.quantization != two.quantization
    title = (
        _against(one.quantization, two.quantization)
        if formats
        else _against(one.candidate.label, two.candidate.label)
    )
    rows = []
    for cell in one.cells:
        same = Column("", other, "candidate").cell((cell.prompt, cell.answer), cell.concurrency)
        mine, theirs = first.value(cell, "tpot"), other.value(same, "tpot") if same else None
        if mine and theirs:
            rows.append((cell.name, _apart(mine, theirs)))
    how = "In sessions of their own: drift from one to the other is not in the intervals."
    differ = [
        name
        for name in ("gpu", "driver", "kernel", "memory")
        if one.host.get(name) != two.host.get(name)
    ]
    how += f" Not the same machine or software: {', '.join(differ)} differ." if differ else ""
    how += (
        f" Other checkpoints: {words.clean(one.model, 80)} and {words.clean(two.model, 80)}."
        if one.model != two.model
        else ""
    )
    return _pair(title, rows, how)


def _apart(mine: Value, theirs: Value) -> Shift:
    """Return by how much *mine* is slower, with the farthest ends that the two intervals allow: wider than either needs."""
    middle = mine.middle / theirs.middle - 1
    if mine.low is None or mine.high is None or theirs.low is None or theirs.high is None:
        return Shift(middle, None, None)
    return Shift(middle, mine.low / theirs.high - 1, mine.high / theirs.low - 1)


def _pair(title: str, rows: Sequence[tuple[str, Shift]], how: str) -> Pair:
    told = [found for _, found in rows if found.low is not None and found.high is not None]
    says = [
        _several(
            "faster",
            [1 / (1 + one.high) - 1 for one in told if one.high is not None and one.high < 0],
            len(rows),
        ),
        _several(
            "slower", [one.low for one in told if one.low is not None and one.low > 0], len(rows)
        ),
    ]
    open_ = sum(
        one.low is not None and one.high is not None and one.low <= 0 <= one.high for one in told
    )
    says.append(
        f"in {open_} of {len(rows)} workloads the intervals show no difference" if open_ else ""
    )
    says.append(
        f"for {len(rows) - len(told)} of {len(rows)} there are too few launches for a statement"
        if len(told) < len(rows)
        else ""
    )
    sentence = "; ".join(one for one in says if one) or "no workload was measured on both"
    return Pair(
        title,
        f"Per token, {sentence}.",
        how,
        tuple((words.clean(name, 60), found.says()) for name, found in rows[:ROWS]),
    )


def _several(word: Literal["faster", "slower"], least: Sequence[float], of: int) -> str:
    if not least:
        return ""
    ends = sorted({words.percent(min(least)), words.percent(max(least))}, key=len)
    how = f"by at least {words.percent(min(least))} to {words.percent(max(least))} (median {words.percent(statistics.median(least))})"
    return f"{word} in {len(least)} of {of} workloads {f'by at least {ends[0]}' if len(ends) == 1 else how}"
