"""
"Do you still need this fork?": patch by patch, library by library, and what somebody measured.

It says what records prove. Where nobody looked or measured, that is what it says, and it never counts for the fork.
"""

from __future__ import annotations

from collections.abc import Iterator

from sparkwright.core.console import size
from sparkwright.release.manifest.records import (
    Fork,
    Need,
    Patch,
    Proof,
    Release,
    Speed,
    Wheel,
)
from sparkwright.release.notes import changes, shown, sizes, words
from sparkwright.release.notes.blocks import (
    MISSING,
    Block,
    Bullets,
    Code,
    Grid,
    Heading,
    Says,
    Strong,
    Words,
    short,
)

STATES = {"needed": "needed", "upstream": "upstream has it", "unknown": "unknown"}
NOBODY = "nobody looked when this release was made"


def section(release: Release, proof: Proof) -> Iterator[Block]:
    """Yield the whole answer."""
    yield Heading("Do you still need this fork?")
    yield Bullets(tuple(_facts(release, proof)))
    yield from _patches(release)
    for fork, wheel in grafts(release):
        yield Heading(f"Code of {wheel.project} for {wheel.machine}", 3)
        yield from _code(fork, wheel)
    yield from _measured(release, proof)


def grafts(release: Release) -> list[tuple[Fork, Wheel]]:
    """Return the wheels that have a stock wheel under them."""
    forks = {fork.name: fork for fork in release.forks if fork.base}
    return [(forks[wheel.fork], wheel) for wheel in release.wheels if wheel.fork in forks]


def needs(release: Release) -> list[tuple[Fork, Patch, Need]]:
    """Return every patch with what was found of it; one of which the record says nothing is unknown."""
    found = {(need.fork, need.patch): need for need in release.needs}
    return [
        (fork, one, found.get((fork.name, one.name), Need(fork.name, one.name, "unknown", NOBODY)))
        for fork in release.forks
        for one in fork.patches
    ]


def _patches(release: Release) -> Iterator[Block]:
    rows: list[tuple[Words, ...]] = [
        (fork.name, changes.name(one), one.subject, Strong(STATES[need.state]), need.says) for fork, one, need in needs(release)
    ]
    if rows:
        yield Heading("Patch by patch", 3)
        yield Grid(("fork", "patch", "what it does", "still needed?", "because"), tuple(rows), 5)


def _code(fork: Fork, wheel: Wheel) -> Iterator[Block]:
    mine = [one for one in wheel.libraries if one.origin == "compiled"]
    rest = len(wheel.libraries) - len(mine)
    if mine:
        rows = tuple((Code(one.name), sizes.code(one), size(one.size)) for one in mine)
        yield Grid(("library, compiled here", "is for", "size"), rows, 2)
    else:
        yield Says("No library of it was compiled here.")
    if rest:
        yield Says((f"{rest} more {'is' if rest == 1 else 'are'} from the official wheel ", short(fork.base), ", byte for byte."))


def _measured(release: Release, proof: Proof) -> Iterator[Block]:
    yield Heading("Measured against a baseline", 3)
    found = [(wheel, proved) for wheel, proved in shown.pairs(release, proof) if proved and measured(proved.speeds)]
    for wheel, proved in found:
        yield Says(f"{wheel.project} {wheel.version} against {proved.baseline or 'a baseline that is not named'}:")
        rows = tuple((one.cell, shown.title(one), _says(one), shown.interval(one)) for one in proved.speeds)
        yield Grid(("workload", "metric", "what the interval supports", "95 % interval of the metric"), rows, 4)
    if not found:
        yield Says(("Speed against the stock wheel: ", MISSING, "."))


def measured(speeds: tuple[Speed, ...]) -> tuple[Speed, ...]:
    """Return those of *speeds* that were measured."""
    return tuple(one for one in speeds if one.ratio is not None)


def _says(one: Speed) -> Words:
    """Return what an interval supports and nothing more."""
    if one.ratio is None:
        return MISSING
    ends = shown.gain(one)
    if ends is None:
        return "too few blocks for a statement" if one.low is None or one.high is None else "which way is better is not known"
    low, high = ends
    if low > 0:
        return f"at least {words.percent(low)} faster"
    if high < 0:
        return f"at least {words.percent(1 / (1 + high) - 1)} slower"
    return f"no difference shown: {words.percent(1 / (1 + low) - 1)} slower to {words.percent(high)} faster"


def _facts(release: Release, proof: Proof) -> Iterator[Words]:
    """Yield the plain sentences that the facts allow."""
    states = [need.state for _, _, need in needs(release)]
    if states:
        told = ", ".join(f"{states.count(state)} {said}" for state, said in STATES.items() if state in states)
        yield f"Of {len(states)} patch{'' if len(states) == 1 else 'es'}: {told}."
        if set(states) == {"upstream"}:
            yield "Upstream has every patch that this release carries."
        elif "unknown" in states:
            yield "An unknown patch counts neither for the fork nor against it."
    else:
        yield "It carries no patch."
    found = [(fork, one) for fork, wheel in grafts(release) for one in wheel.libraries if one.origin == "compiled"]
    if found:
        archs = sorted({arch for _, one in found for arch in one.code})
        yield f"{len(found)} {'library was' if len(found) == 1 else 'libraries were'} compiled here, for {', '.join(archs) or 'no GPU'}."
    yield from _speed(release, proof)


def _speed(release: Release, proof: Proof) -> Iterator[Words]:
    """Yield what was measured, in a sentence; whether the baseline is the stock wheel counts only where its hash is named."""
    pairs = [(wheel, proved) for wheel, proved in shown.pairs(release, proof) if proved and measured(proved.speeds)]
    if not pairs:
        yield Strong("Nobody has measured that this release is faster than the stock wheel.")
        return
    bases = {fork.name: fork.base for fork in release.forks}
    for wheel, proved in pairs:
        known = measured(proved.speeds)
        ends = [shown.gain(one) for one in known]
        faster, slower = sum(one is not None and one[0] > 0 for one in ends), sum(one is not None and one[1] < 0 for one in ends)
        base = bases.get(wheel.fork, "")
        against = "the stock wheel" if base and base[:12] in proved.baseline else "its baseline"
        yield (
            f"{wheel.project} against {against}: faster in {faster}, slower in {slower} of {len(known)} figures that were measured; "
            f"the other {len(known) - faster - slower} show neither."
        )
        if against != "the stock wheel":
            yield f"The record does not say by hash that this baseline ({proved.baseline or 'not named'}) is the stock wheel."
        elif not faster:
            yield Strong("Nobody has measured that this release is faster than the stock wheel.")
