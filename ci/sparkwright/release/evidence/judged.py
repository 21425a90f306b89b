"""
The raw files of the gates, read again by whoever installs: are they about this wheel, and do they say what is claimed?

States are computed from the checks, never taken. Only the records of gates are used here, none of what measures.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import msgspec

from sparkwright.bench.results import CellResult, Result, Series
from sparkwright.core.files import sha256_bytes
from sparkwright.core.states import State
from sparkwright.gates.core import ladder, verdict_file
from sparkwright.gates.core.verdict import ORDER, Check, Ladder
from sparkwright.release.errors import ReleaseError, TrustError
from sparkwright.release.manifest.records import Missing, Proved, Speed, Wheel, line

#: The gate that stands on a file of its own.
THROUGHPUT = "G8"


class Tests(NamedTuple):
    """Checks by what they are to a test result, as ``G0/archive``; *informing* are those not required that did not pass."""

    passed: tuple[str, ...]
    warned: tuple[str, ...]
    failed: tuple[str, ...]
    informing: tuple[str, ...]


def verdicts(data: bytes, wheel: Wheel) -> Ladder:
    """
    Return the verdicts in *data*, every one of them about *wheel*, every pass with something behind it.

    Raises:
        evidence-invalid: It is no document of verdicts, or the states in it do not follow from its checks.
        verdict-foreign: They are about other bytes.
        verdict-hollow: A gate passes and no required check of it shows a figure or a sample.
    """
    try:
        found = verdict_file.read(data)
    except (ValueError, msgspec.DecodeError, RecursionError) as error:
        raise TrustError("evidence-invalid", f"The verdicts about {wheel.filename} cannot be read.", details=[str(error)]) from error
    _about(wheel, "The verdicts", found.wheel.sha256 if found.wheel else "", *(one.wheel for one in found.verdicts))
    if wheel.device_code and found.device_code and wheel.device_code != found.device_code:
        details = [f"wheel:    {wheel.device_code}", f"verdicts: {found.device_code}"]
        raise ReleaseError("verdict-foreign", f"The verdicts about {wheel.filename} tell of other device code.", details=details)
    names = [one.label for one in found.verdicts]
    if len(set(names)) != len(names) or found.states.keys() - ladder.GATES.keys():
        raise TrustError(
            "evidence-invalid", f"The verdicts about {wheel.filename} name a gate twice, or one that does not exist.", details=names
        )
    if hollow := [one for one in found.verdicts if one.state == "pass" and not any(map(_shows, one.checks))]:
        raise ReleaseError(
            "verdict-hollow",
            f"{len(hollow)} gate(s) of {wheel.filename} pass without a figure or a sample.",
            details=[f"{one.gate} ({one.title}): {len(one.checks)} checks" for one in hollow],
        )
    return found


def _shows(check: Check) -> bool:
    return check.required and bool(check.figures or check.samples)


def _about(wheel: Wheel, what: str, *named: str) -> None:
    if other := sorted(set(named) - {wheel.sha256}):
        details = [f"wheel: {wheel.sha256}", *(f"about: {one or 'no wheel'}" for one in other)]
        raise ReleaseError("verdict-foreign", f"{what} that came with {wheel.filename} are about another wheel.", details=details)


def tests(found: Ladder) -> Tests:
    """Return the checks of *found* by what they are to a test result."""

    def named(states: Sequence[State], *, required: bool = True) -> tuple[str, ...]:
        every = ((one.label, check) for one in found.verdicts for check in one.checks)
        return tuple(f"{gate}/{check.name}" for gate, check in every if check.state in states and check.required == required)

    return Tests(named(("pass",)), named(("not-run", "inconclusive")), named(("fail", "invalid")), named(ORDER[:-1], required=False))


def result(found: Tests, missing: Iterable[Missing]) -> Literal["PASSED", "WARNED", "FAILED"]:
    """Return the result of a test result: PASSED only where every required check passed and nothing is missing."""
    if found.failed:
        return "FAILED"
    return "PASSED" if found.passed and not found.warned and not list(missing) else "WARNED"


def gates(proved: Proved, found: Ladder | None, wheel: Wheel) -> None:
    """
    Require that neither gates nor recipes are claimed to be better than the verdicts say; what they do not name did not run.

    Raises:
        evidence-invalid: One is.
    """
    seen: dict[str, State] = found.states if found else {}
    better = [
        f"{one.name}: claimed {one.state}, found {seen.get(one.name, 'not-run')}"
        for one in proved.gates
        if ORDER.index(one.state) > ORDER.index(seen.get(one.name, "not-run"))
    ]
    better += [f"{recipe}: not every gate of it passes" for recipe in proved.recipes if not found or not found.passes(recipe)]
    if better:
        raise TrustError("evidence-invalid", f"{wheel.filename} is said to have passed what its verdicts do not say.", details=better)


def throughput(data: bytes, wheel: Wheel, verdicts: Ladder, proved: Proved) -> Result:
    """
    Return the measurement in *data*: of *wheel* against a baseline, the one that its verdict names, with the speeds that are claimed.

    Raises:
        evidence-invalid: It is no measurement, or says something else than is claimed. verdict-foreign: It measured other bytes.
        verdict-hollow: The gate passes, and no leg counts or a series that decides has no blocks.
    """
    try:
        found = msgspec.json.decode(data, type=Result)
    except (msgspec.DecodeError, RecursionError) as error:
        raise TrustError("evidence-invalid", f"The measurement of {wheel.filename} cannot be read.", details=[str(error)]) from error
    _about(wheel, "The measurements", found.candidate.sha256)
    verdict = next((one for one in verdicts.verdicts if (one.gate, one.recipe) == (THROUGHPUT, found.recipe)), None)
    if verdict and verdict.state == "pass":
        _measured(found, wheel)
        if (sha256_bytes(data), found.state) != (verdict.evidence, "pass"):
            details = [f"measured: {found.state}, sha256 {sha256_bytes(data)}", f"verdict:  pass by {verdict.evidence or 'no measurement'}"]
            raise TrustError("evidence-invalid", f"The measurement of {wheel.filename} is not the one that was judged.", details=details)
    measured = speeds(found)
    wrong = [f"{one.cell}: {one.metric}" for one in proved.speeds if one not in measured]
    if wrong or proved.margin not in (None, found.margin):
        details = [*wrong, f"margin: claimed {proved.margin}, measured {found.margin}"]
        raise TrustError("evidence-invalid", f"The speeds of {wheel.filename} are not those that were measured.", details=details)
    return found


def _measured(found: Result, wheel: Wheel) -> None:
    counted = {leg.side for leg in found.legs if leg.counts}
    deciding = [(cell, series) for cell in found.cells for series in cell.series if series.primary]
    empty = [f"{cell.name}: {series.metric}: no block" for cell, series in deciding if not series.differences]
    if found.kind != "gate" or counted - {"control"} != {"baseline", "candidate"} or not deciding or empty:
        details = [f"legs that count: {sum(leg.counts for leg in found.legs)} of {len(found.legs)}", *empty]
        raise ReleaseError("verdict-hollow", f"{THROUGHPUT} of {wheel.filename} passes, and nothing was measured.", details=details)


def speeds(found: Result) -> tuple[Speed, ...]:
    """Return what *found* says of each series, as a proof tells it; only series that decide have a state."""
    series = ((cell, one) for cell in found.cells for one in cell.series) if found.kind == "gate" else ()
    return tuple(_speed(cell, one) for cell, one in series)


def _speed(cell: CellResult, one: Series) -> Speed:
    ratio = one.candidate / one.baseline if one.candidate is not None and one.baseline else None
    passing, failing = (path[-1] if path else None for path in (one.pass_evidence, one.fail_evidence))
    figures = (value if value is not None and math.isfinite(value) else None for value in (ratio, one.low, one.high, passing, failing))
    return Speed(line(cell.name), one.metric, one.state if one.primary else "not-run", *figures)
