"""How numbers, times and states are written, alike on a page and in a terminal."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from sparkwright.bench.records import METRICS, Metric
from sparkwright.bench.results import Result
from sparkwright.core.states import SIGNS

#: Stands where a record holds no number, and where there are too few for an interval.
NOT_MEASURED, NO_INTERVAL = "not measured", "too few blocks"


def verdict(result: Result) -> tuple[str, str]:
    """Return the sign and the word of *result*; what judges nothing was only measured."""
    judges = result.kind in ("gate", "verify") or result.state != "not-run"
    if not judges and any(leg.counts for leg in result.legs):
        return "•", "measured"
    return SIGNS[result.state], result.state


def number(value: float | None, digits: int = 4) -> str:
    """Return *value* with that many significant digits, and thousands apart."""
    if value is None:
        return NOT_MEASURED
    if not math.isfinite(value):
        return "∞"
    size = math.floor(math.log10(abs(value))) if value else 0
    if -4 <= size < 9:
        return f"{value:,.{max(0, digits - 1 - size)}f}"
    return f"{value:.{digits - 1}e}"


def quantity(value: float | None, metric: Metric) -> str:
    """Return *value* of a record in the unit of *metric*, without the unit."""
    return number(value if value is None else value * METRICS[metric][2])


def percent(share: float, digits: int = 1) -> str:
    """Return *share* (0.02) as ``2.0 %``."""
    return f"{100 * share:,.{digits}f} %" if abs(share) < 1e6 else f"{number(100 * share)} %"


def signed(share: float | None) -> str:
    """Return a change (0.02) as ``+2.00 %``."""
    if share is None:
        return NOT_MEASURED
    return ("+" if share > 5e-5 else "") + percent(0.0 if abs(share) < 5e-5 else share, 2)


def ratios(low: float | None, high: float | None) -> str:
    """Return the interval of a ratio as changes."""
    if low is None or high is None:
        return NO_INTERVAL
    return f"{signed(low - 1)} to {signed(high - 1)}"


def evidence(value: float) -> str:
    """Return an e-value as ``×120``."""
    return f"×{number(value, 3)}" if value < 1e5 else f"×{value:.1e}"


def blocks(values: Sequence[float]) -> str:
    """Return *values* as a curve from 0 to the largest, two of them in a character."""
    means = [(first + second) / 2 for first, second in zip(values[::2], values[1::2], strict=True)]
    most = max(means) or 1.0
    return "".join(" ▁▂▃▄▅▆▇█"[math.ceil(8 * mean / most)] for mean in means)


def moment(second: float) -> str:
    """Return *second* since 1970 as ``2026-11-22 02:40:07 UTC``; empty for 0 and absurd ones."""
    known = 0 < second < 253_402_300_800
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(second)) if known else ""
