"""Every leg's raw figures as text: summary, machine before and after, and its requests, or their quantiles where there are too many."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec

from sparkwright.bench.load.vllm_bench import Request
from sparkwright.bench.machine.state_checks import Snapshot
from sparkwright.bench.records import METRICS, Metric
from sparkwright.bench.report import words
from sparkwright.bench.report.view import View
from sparkwright.bench.results import CellResult, Measurement

#: Requests that a page lists one by one; with more, each leg has their quantiles.
MOST_REQUESTS = 15_000
_QUANTILES = ((0.0, "least"), (0.1, "10 %"), (0.5, "median"), (0.9, "90 %"), (1.0, "most"))
#: Errors that a leg with quantiles quotes.
_ERRORS = 5

REQUEST = (
    "began, s",
    "TTFT, ms",
    "whole, s",
    "TPOT, ms",
    "prompt, tokens",
    "answer, tokens",
    "chunks",
    "error",
)
MACHINE = (
    "",
    "time",
    "steady clock, s",
    "GEMV, ms",
    "copy, ms",
    "GPU, MHz",
    "memory, MHz",
    "GPU, °C",
    "power, W",
    "throttled",
    "free, MB",
    "other load",
    "other processes",
    "battery",
)


class Raw(msgspec.Struct, frozen=True):
    """
    A leg as the page shows it.

    Attributes:
        summary: One line of it, by column. *mark*: ``counts``, ``discarded`` or ``invalid``.
        facts: By name. *machine*: rows of `MACHINE`. *requests*: rows of `REQUEST`, the first of them a quantile's name with *many*.
    """

    summary: tuple[str, ...]
    mark: str
    reasons: tuple[tuple[str, str], ...]
    facts: tuple[tuple[str, str], ...]
    machine: tuple[tuple[str, ...], ...]
    requests: tuple[tuple[str, ...], ...]
    many: bool


SUMMARY = (
    "leg",
    "side",
    "block",
    "launch",
    "place",
    "try",
    "TPOT, ms",
    "TTFT, ms",
    "tok/s",
    "",
)


def crowded(views: Sequence[View]) -> bool:
    """Are there more requests in *views* than a page lists?"""
    return (
        sum(len(leg.run.requests) for view in views for leg in view.result.legs if leg.run)
        > MOST_REQUESTS
    )


def legs(view: View, cell: str, *, many: bool) -> Iterator[Raw]:
    """Yield each leg of *cell*."""
    for number, leg, figures in view.legs(cell):
        yield _leg(number, leg, figures, many)


def strays(view: View, *, many: bool) -> tuple[Raw, ...]:
    """Return the legs that belong to no cell of the Result."""
    known = {cell.name for cell in view.result.cells}
    found = enumerate(zip(view.result.legs, view.figures, strict=True))
    return tuple(
        _leg(number, leg, figures, many)
        for number, (leg, figures) in found
        if leg.cell not in known
    )


def unique(cells: Sequence[CellResult]) -> tuple[CellResult, ...]:
    """Return *cells*, of several with one name the first, so that no leg is shown twice."""
    return tuple(
        {cell.name: cell for cell in reversed(cells)}[name]
        for name in dict.fromkeys(cell.name for cell in cells)
    )


def _leg(number: int, leg: Measurement, figures: dict[Metric, float], many: bool) -> Raw:
    told = [words.quantity(figures.get(metric), metric) if figures else "–" for metric in METRICS]
    mark = (
        "counts"
        if leg.counts
        else "discarded"
        if leg.discarded
        else "invalid"
        if leg.reasons
        else "not measured"
    )
    place = (
        str(number),
        leg.side,
        str(leg.block),
        str(leg.launch),
        str(leg.position),
        str(leg.attempt),
    )
    return Raw(
        summary=(*place, *told, mark),
        mark=mark,
        reasons=tuple(
            (words.clean(one.reference, 60), words.clean(one.message)) for one in leg.reasons[:20]
        ),
        facts=tuple(_facts(leg)),
        machine=tuple(
            _shot(name, shot)
            for name, shot in (("before", leg.before), ("after", leg.after))
            if shot
        ),
        requests=tuple(_quantiles(leg.run.requests) if many else map(_request, leg.run.requests))
        if leg.run
        else (),
        many=many,
    )


def _facts(leg: Measurement) -> Iterator[tuple[str, str]]:
    if begun := words.moment(leg.began):
        yield "began", begun
    if leg.run:
        failed = [one.error for one in leg.run.requests if one.error]
        yield (
            "requests",
            f"{len(leg.run.requests)} in {words.number(leg.run.seconds)} s"
            + (f", {len(failed)} failed" if failed else ""),
        )
        yield (
            "generator",
            f"{words.clean(leg.run.generator, 80)}, sha256 {words.clean(leg.run.sha256, 64)}",
        )
        if failed:
            yield (
                "errors",
                "; ".join(words.clean(one, 160) for one in list(dict.fromkeys(failed))[:_ERRORS]),
            )
    if leg.speculation:
        one = leg.speculation
        drafts = f"{words.percent(one.acceptance)} of drafts accepted"
        yield (
            "speculation",
            f"{words.number(one.length)} tokens a step, {drafts}",
        )


def _shot(name: str, shot: Snapshot) -> tuple[str, ...]:
    milli = [words.number(1000 * one) if one is not None else "–" for one in (shot.gemv, shot.copy)]
    plain = [
        words.number(one) if one is not None else "–"
        for one in (shot.sm_clock, shot.memory_clock, shot.temperature, shot.power)
    ]
    lists = {
        kind: ", ".join(words.clean(one, 60) for one in getattr(shot, kind)[:8]) or "–"
        for kind in ("throttle_reasons", "gpu_processes")
    }
    battery = "yes" if shot.on_battery else "no"
    free = words.count(shot.available) if shot.available is not None else "–"
    load = words.percent(shot.other_load, 0) if shot.other_load is not None else "–"
    time = words.moment(shot.time).partition(" ")[2]
    return (
        name,
        time,
        words.number(shot.monotonic, 6),
        *milli,
        *plain,
        lists["throttle_reasons"],
        free,
        load,
        lists["gpu_processes"],
        battery,
    )


def _request(one: Request) -> tuple[str, ...]:
    times = (
        words.number(one.start),
        words.number(1000 * one.ttft),
        words.number(one.latency),
        words.number(1000 * one.tpot),
    )
    return (
        *times,
        *map(words.count, (one.prompt_tokens, one.output_tokens, one.chunks)),
        words.clean(one.error, 200),
    )


def _quantiles(requests: Sequence[Request]) -> Iterator[tuple[str, ...]]:
    """Yield the quantiles of each column, each by itself: a row of them is no request."""
    times: tuple[Callable[[Request], float], ...] = (
        lambda one: 1000 * one.ttft,
        lambda one: one.latency,
        lambda one: 1000 * one.tpot,
    )
    counts: tuple[Callable[[Request], int], ...] = (
        lambda one: one.prompt_tokens,
        lambda one: one.output_tokens,
        lambda one: one.chunks,
    )
    sorted_times = [sorted(take(one) for one in requests) for take in times]
    sorted_counts = [sorted(take(one) for one in requests) for take in counts]
    for share, name in _QUANTILES if requests else ():
        place = round(share * (len(requests) - 1))
        yield (
            name,
            *(words.number(column[place]) for column in sorted_times),
            *(words.count(column[place]) for column in sorted_counts),
        )
