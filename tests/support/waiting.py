"""How tests wait for what another process or thread does."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def until(condition: Callable[[], Any], seconds: float = 60) -> Any:
    """Return the first true value of *condition*, which has to come within *seconds*."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, f"it does not happen within {seconds:g} s"
        time.sleep(0.02)
    return value
