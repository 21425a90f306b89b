"""What was shown of each wheel: the gates of the ladder, the speeds, and what is missing or did not run."""

from __future__ import annotations

from collections.abc import Iterator

from sparkwright.bench.records import METRICS
from sparkwright.release.manifest.records import Proof, Proved, Release, Speed, Wheel
from sparkwright.release.notes import words
from sparkwright.release.notes.blocks import (
    MISSING,
    Block,
    Bullets,
    Code,
    Grid,
    Heading,
    Inline,
    Mark,
    Says,
    Words,
    short,
)


def pairs(release: Release, proof: Proof) -> list[tuple[Wheel, Proved | None]]:
    """Return each wheel with what is proved of it, which is nothing where the proof does not name it."""
    proved = {one.wheel: one for one in proof.wheels}
    return [(wheel, proved.get(wheel.sha256)) for wheel in release.wheels]


def missing(release: Release, proof: Proof) -> Iterator[Block]:
    """Yield what keeps the release from the channel ``verified``, or that nothing does."""
    found = pairs(release, proof)
    rows: list[tuple[Words, ...]] = []
    for wheel, proved in found:
        if proved is None:
            rows.append((wheel.project, "everything", Mark("not-run"), "", "the proof does not name this wheel"))
        else:
            rows += [(wheel.project, one.gate, Mark(one.state), Code(one.reference), one.says) for one in proved.missing]
    if not rows:
        yield Says("Nothing is missing: every verdict that the channel verified asks for is a pass, for each of these wheels.")
        return
    yield Says("For the channel verified, this is missing:")
    yield Grid(("wheel", "of", "state", "reference", "what"), tuple(rows), 5)


def gates(release: Release, proof: Proof) -> Iterator[Block]:
    """Yield the gate report of each wheel."""
    yield Heading("What the gates say")
    for wheel, proved in pairs(release, proof):
        yield Heading(f"{wheel.project} {wheel.version}{'' if wheel.machine == 'any' else f' for {wheel.machine}'}", 3)
        if proved is None or not (proved.gates or proved.speeds):
            yield Says("No gate ran on this wheel." if proved else "Nothing is proved of this wheel.")
            continue
        if proved.gates:
            rows = tuple((one.name, one.title, Mark(one.state), one.says) for one in proved.gates)
            yield Grid(("gate", "what it looks at", "state", "why"), rows, 4)
        if proved.recipes:
            yield Says(f"Shown for the recipes {', '.join(proved.recipes)}.")
        yield from speeds(proved)
        if proved.host:
            yield Says(f"On: {', '.join(f'{name} {value}' for name, value in sorted(proved.host.items()))}.")
    yield from _not_run(release, proof)


def _not_run(release: Release, proof: Proof) -> Iterator[Block]:
    """Yield what did not run, each gate and reason once, with the wheels that it is about."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for wheel, proved in pairs(release, proof):
        for one in proved.gates if proved else ():
            if one.state == "not-run":
                found.setdefault((one.name, one.title, one.says), []).append(wheel.project)
    if found:
        yield Heading("What did not run", 3)
        yield Bullets(
            tuple(
                f"{name} ({title}), for {', '.join(dict.fromkeys(projects))}: {says or 'no reason is recorded'}"
                for (name, title, says), projects in found.items()
            )
        )


def speeds(proved: Proved) -> Iterator[Block]:
    """Yield the speeds of one wheel against its baseline, with interval, margin and e-values."""
    if not proved.speeds:
        yield Says(("Speed against a baseline: ", MISSING, "."))
        return
    margin = f"a pass excludes slowdowns of {words.percent(proved.margin)}" if proved.margin is not None else "no margin is recorded"
    yield Says(f"Speed against {proved.baseline or 'a baseline that is not named'}; {margin}.")
    rows = tuple(
        (one.cell, title(one), _state(one), change(one), interval(one), _evidence(one.evidence_pass), _evidence(one.evidence_fail))
        for one in proved.speeds
    )
    yield Grid(("workload", "metric", "state", "change", "95 % interval", "evidence for pass", "for fail"), rows, 3)


def _state(speed: Speed) -> Inline:
    """Return the state; a series that was measured and does not decide is only reported."""
    return "reported" if speed.state == "not-run" and speed.ratio is not None else Mark(speed.state)


def title(speed: Speed) -> str:
    """Return the metric as people say it, and which way is better."""
    known = METRICS.get(speed.metric)  # type: ignore[call-overload]  # the record may hold any line
    return f"{known[0]} ({'more' if known[3] else 'less'} is better)" if known else speed.metric


def change(speed: Speed) -> Words:
    """Return the change of the metric itself, or that nobody measured it."""
    return MISSING if speed.ratio is None else words.signed(speed.ratio - 1)


def interval(speed: Speed) -> Words:
    """Return the interval of the change; too few blocks give none."""
    return MISSING if speed.ratio is None else words.span(speed.low, speed.high)


def _evidence(value: float | None) -> Inline:
    return "–" if value is None else words.evidence(value)


def gain(speed: Speed) -> tuple[float, float] | None:
    """Return the ends of the interval of how much faster it is (0.02: 2 %); None where that is not known."""
    known = METRICS.get(speed.metric)  # type: ignore[call-overload]
    if known is None or not speed.low or not speed.high or speed.low <= 0 or speed.high <= 0:
        return None
    return (speed.low - 1, speed.high - 1) if known[3] else (1 / speed.high - 1, 1 / speed.low - 1)


def evidence(release: Release, proof: Proof) -> Iterator[Block]:
    """Yield the files of evidence of each wheel."""
    rows: list[tuple[Words, ...]] = [
        (wheel.project, one.kind, Code(f"evidence/{one.sha256}.json"))
        for wheel, proved in pairs(release, proof)
        for one in (proved.evidence if proved else ())
    ]
    if rows:
        yield Grid(("wheel", "evidence", "file of the index"), tuple(rows), 3)
    else:
        yield Says("There are no files of evidence.")


def policy(proof: Proof) -> Words:
    """Return the policies that decided."""
    return tuple(part for sha256 in sorted({one.policy for one in proof.wheels}) for part in (short(sha256), " "))[:-1]
