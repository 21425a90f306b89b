"""How states, numbers and other people's strings are written, the same on the page, in Markdown and in a terminal."""

from __future__ import annotations

import math
import time
import unicodedata

from sparkwright.bench.records import METRICS, Metric
from sparkwright.bench.results import Result
from sparkwright.core.states import State

#: State → sign and word. Colour never stands alone.
STATES: dict[State, tuple[str, str]] = {
    "pass": ("✓", "pass"),
    "fail": ("✗", "fail"),
    "inconclusive": ("?", "inconclusive"),
    "invalid": ("!", "invalid"),
    "not-run": ("–", "not run"),
}
TITLES = {
    "gate": "Throughput gate",
    "bench": "Measurement",
    "calibration": "A/A calibration",
    "verify": "Verification of a recipe",
}

#: Written where a record holds no number.
NONE = "not measured"

#: Characters of one string; a longer one was made to flood the page.
LONGEST = 600


def clean(text: str, longest: int = LONGEST) -> str:
    """Return *text* without what moves a cursor, turns the direction of writing or breaks a line; a long one is cut."""
    shown = "".join(
        f"\\x{ord(one):02x}" if unicodedata.category(one) in ("Cc", "Cf", "Cs", "Zl", "Zp") else one
        for one in text[: longest + 1]
    )
    return shown if len(shown) <= longest else shown[: longest - 1] + "…"


def verdict(result: Result) -> tuple[str, str]:
    """Return the sign and the word of *result*; a measurement that judges nothing has no verdict."""
    if result.kind in ("bench", "calibration") and result.state == "not-run":
        return ("•", "measured") if any(leg.counts for leg in result.legs) else STATES["not-run"]
    return STATES[result.state]


def number(value: float | None, digits: int = 4) -> str:
    """Return *value* with that many significant digits and no needless zeros of an exponent; `NONE` for none."""
    if value is None:
        return NONE
    try:
        value = float(value)
    except OverflowError:
        return "∞"
    if not math.isfinite(value):
        return "∞"
    if value == 0:
        return "0"
    size = math.floor(math.log10(abs(value)))
    if not -4 <= size < 9:
        return (
            f"{value:.{max(0, digits - 1)}e}".replace("e+0", "e")
            .replace("e+", "e")
            .replace("e-0", "e-")
        )
    return f"{value:,.{max(0, digits - 1 - size)}f}"


def count(value: int) -> str:
    """Return a whole number with its thousands apart."""
    return f"{value:,}" if abs(value) < 1 << 63 else number(value)


def quantity(value: float | None, metric: Metric) -> str:
    """Return *value* of a record in the unit of *metric*, without the unit."""
    return NONE if value is None else number(value * METRICS[metric][2])


def measured(value: float | None, metric: Metric) -> str:
    """Return *value* of a record with the unit of *metric*."""
    return NONE if value is None else f"{quantity(value, metric)} {METRICS[metric][1]}"


def percent(share: float | None, digits: int = 1) -> str:
    """Return *share* (0.02) as ``2.0 %``."""
    return (
        NONE
        if share is None
        else f"{100 * share:,.{digits}f} %"
        if abs(share) < 1e6
        else f"{number(100 * share)} %"
    )


def signed(share: float | None) -> str:
    """Return a change (0.02) as ``+2.00 %``, with a real minus."""
    if share is None:
        return NONE
    if abs(share) < 5e-5:
        return "0.00 %"
    text = f"{100 * share:+,.2f} %" if abs(share) < 1e6 else f"{number(100 * share)} %"
    return text.replace("-", "−")


def span(low: float | None, high: float | None, form: str = "ratio") -> str:
    """Return an interval of a ratio as changes in per cent; ``too few blocks`` where there is none."""
    if low is None or high is None:
        return "too few blocks"
    return (
        f"{signed(low - 1)} to {signed(high - 1)}"
        if form == "ratio"
        else f"{number(low)} to {number(high)}"
    )


def evidence(value: float) -> str:
    """Return an e-value as ``×120``: how often the stake was multiplied that bets against one hypothesis."""
    if value and math.isfinite(value) and not 1e-3 <= abs(value) < 1e5:
        return "×" + f"{value:.1e}".replace("e+0", "e").replace("e+", "e").replace(
            "e-0", "e-"
        ).replace("-", "−")
    return f"×{number(value, 3)}"


def moment(second: float) -> str:
    """Return *second* since 1970 as ``2026-11-22 02:40:07 UTC``; nothing for none or one that no calendar has."""
    if not 0 < second < 253_402_300_800:
        return ""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(second))
