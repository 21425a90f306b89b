"""How numbers, changes and times are written, alike on a page and in a terminal."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from sparkwright.bench.records import METRICS, Metric

#: Stands where a record holds no number.
NOT_MEASURED = "not measured"


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
    return f"{100 * share:,.{digits}f} %"


def signed(share: float) -> str:
    """Return a change (0.02) in percent without the unit, as ``+2.00``."""
    return f"{100 * share:+,.2f}"


def interval(ends: Sequence[float | None], write: Callable[[float], str]) -> str:
    """Return two *ends*, each as *write* gives it; a dash where one is unknown."""
    known = [write(end) for end in ends if end is not None]
    return " … ".join(known) if len(known) == len(ends) else "–"


def blocks(values: Sequence[float]) -> str:
    """Return *values* as a curve from 0 to the largest, two of them in a character."""
    means = [(first + second) / 2 for first, second in zip(values[::2], values[1::2], strict=True)]
    most = max(means) or 1.0
    return "".join(" ▁▂▃▄▅▆▇█"[math.ceil(8 * mean / most)] for mean in means)


def moment(second: float) -> str:
    """Return *second* since 1970 as ``2026-11-22 02:40:07 UTC``; empty for 0 and absurd ones."""
    known = 0 < second < 253_402_300_800
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(second)) if known else ""
