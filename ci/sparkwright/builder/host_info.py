"""Facts about this machine that its programs state. A missing program is an empty fact."""

from __future__ import annotations

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from sparkwright.core import memory, process
from sparkwright.core.errors import CommandError

#: Seconds until a program, or a host, counts as unanswered.
PATIENCE = 3.0
#: Of the GPU under load: seconds of work, of two looks at the clocks, and until the work must have
#: ended, torch from a cold disk included; megabytes that are read, and as many are written.
LOAD, LOAD_PERIOD, LOAD_PATIENCE, MATRIX = 10.0, 0.5, 120.0, 268
#: Share of the highest clock below which a GPU under load is slow. Proposed.
SLOW = 0.5


class GpuInfo(msgspec.Struct, frozen=True):
    """
    A GPU as its driver names it; *capability* is CUDA's compute capability, ``12.1`` on a GB10.
    """

    name: str
    capability: str
    driver: str


def command_output(*command: str, **variables: str) -> str:
    """Return the output of *command*, empty when it is missing, fails or takes too long."""
    try:
        return process.output(command, env=process.clean_environment(**variables), timeout=PATIENCE)
    except CommandError:
        return ""


def gpus() -> tuple[GpuInfo, ...]:
    """Return the GPUs that the NVIDIA driver shows."""
    rows, _ = memory.query("gpu=name,compute_cap,driver_version")
    return tuple(GpuInfo(*row) for row in rows if len(row) == 3)


def driver_fault() -> str:
    """Return how nvidia-smi fails; empty if it does not, or is not installed."""
    _, failure = memory.query("gpu=name")
    return f"the driver is failing: {failure}" if failure else ""


def gpu_under_load(python: Path, script: str) -> tuple[str, str]:
    """
    Return what the first GPU has while it works for ten seconds, and what is wrong with that.

    A Spark can be stuck at about 700 MHz, or 513, until its power was disconnected; idle, it cannot
    be told from a sound one, which has 2,400 of 3,003 MHz under load (eugr/spark-vllm-docker#334,
    model-serving-minefield#55). Whoever sets a limit on purpose takes 2,000 or more.

    Args:
        python: Of an environment with torch. *script*: of the matrix-vector probe.

    Returns:
        Clocks, power, temperature and bandwidth, or an empty text if they cannot be seen; and a
        sentence, or an empty text if nothing is wrong.
    """
    words = map(str, (python, "-I", script, MATRIX, 0, LOAD / 2, 1))
    samples = [["0"] * 4]
    with ThreadPoolExecutor(1) as pool:
        load = pool.submit(process.output, [*words], timeout=LOAD_PATIENCE)
        while not load.done():
            time.sleep(LOAD_PERIOD)
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


def processor() -> str:
    """Return the names of the CPU's kinds of core (a GB10 has two)."""
    names = re.findall(r"^\s*Model name:\s*(.+?)\s*$", command_output("lscpu"), re.MULTILINE)
    return " + ".join(dict.fromkeys(names))
