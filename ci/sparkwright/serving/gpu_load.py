"""
The clocks and the power of a GPU under load.

A Spark can be stuck at about 700 MHz, or 513, until its power was disconnected; idle, it cannot be
told from a sound one, which has 2,400 of 3,003 MHz under load (eugr/spark-vllm-docker#334,
model-serving-minefield#55). Whoever sets a limit on purpose takes 2,000 or more.
"""

from __future__ import annotations

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from sparkwright.bench.machine import gemv_probe
from sparkwright.core import memory, process
from sparkwright.core.errors import CommandError

#: Seconds of load; of two looks at the clocks; until the load must have ended, torch from a cold
#: disk included. Megabytes that are read, and as many are written.
SECONDS, PERIOD, PATIENCE, MATRIX = 10.0, 0.5, 120.0, 268
#: Share of the highest clock below which a GPU under load is slow. Proposed.
SLOW = 0.5


def under_load(python: Path) -> tuple[str, str]:
    """
    Return what the first GPU has while it works for ten seconds, and what is wrong with that.

    Args:
        python: Of an environment with torch.

    Returns:
        Clocks, power, temperature and bandwidth, or an empty text if they cannot be seen; and a
        sentence, or an empty text if nothing is wrong.
    """
    words = map(str, (python, "-I", gemv_probe.__file__, MATRIX, 0, SECONDS / 2, 1))
    samples = [["0"] * 4]
    with ThreadPoolExecutor(1) as pool:
        load = pool.submit(process.output, [*words], timeout=PATIENCE)
        while not load.done():
            time.sleep(PERIOD)
            rows, _ = memory.query("gpu=clocks.sm,clocks.max.sm,power.draw,temperature.gpu")
            samples += rows[:1]
    try:
        result = json.loads(load.result())
    except (CommandError, ValueError) as error:
        return "", f"the load did not run: {error}"
    if not result["gpu"]:
        return "", "torch sees no GPU"
    # [N/A] is no number.
    columns = (
        [float(re.sub("[^0-9.]", "", word) or 0) for word in column]
        for column in zip(*samples, strict=True)
    )
    clock, most, watts, celsius = map(max, columns)
    speed = result["bytes"] / result["readings"][0]["gemv"] / 1e9
    state = f"{clock:,.0f} of {most:,.0f} MHz, {watts:.0f} W, {celsius:.0f} °C, {speed:,.0f} GB/s"
    slow = f"the GPU stays at {clock:,.0f} MHz under load; disconnect its power for some minutes"
    return state, slow if 0 < clock < SLOW * most else ""
