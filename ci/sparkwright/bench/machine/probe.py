"""The matrix-vector probe, which works on the GPU: its readings, and the clocks meanwhile."""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from sparkwright.bench.machine.state_checks import ProbePolicy, Reading
from sparkwright.core import memory, process
from sparkwright.core.console import one_line
from sparkwright.core.errors import CommandError

#: Ten seconds of load: two measurements of five, of a matrix and a copy of it.
LOAD = ProbePolicy(
    matrix=268, stream=268, warmup=0, seconds=5, readings=3, band=0.1, min_ratio=0, timeout=110
)
#: Seconds between two looks at the clocks under load.
PERIOD = 0.5
#: Share of the highest clock below which a GPU under load is slow. Proposed.
SLOW = 0.5
#: GiB that the load takes: torch, its context on the GPU, and two matrices. Proposed.
TAKEN = 4.0

SCRIPT = Path(__file__).parent / "gemv_probe.py"


class ProbeError(Exception):
    """The probe gives no reading; the message says why."""


class ProbeResult(msgspec.Struct, frozen=True):
    """
    What the probe measured.

    Attributes:
        gpu: Whether it ran on a GPU. *name*: of the device and of the library.
        uuid: Of the GPU, without ``GPU-``; empty for the processor.
        bytes: Of the matrix.
        readings: At least one.
    """

    gpu: bool
    name: str
    uuid: str
    bytes: Annotated[int, Meta(gt=0)]
    readings: Annotated[tuple[Reading, ...], Meta(min_length=1)]


def probe(
    python: Path,
    policy: ProbePolicy,
    megabytes: int,
    readings: int = 1,
) -> ProbeResult:
    """
    Return *readings* of the matrix-vector probe in an environment with torch.

    A slow state of the GPU that its driver does not report shows in it: on a GB10 a matrix-vector
    product took 3.3 times as long there, while a copy was as fast as ever. The program ends after
    each call, so that it takes no memory from a server that is measured.

    Raises:
        ProbeError: The program does not start, fails, hangs or prints something else.
    """
    words = (str(number) for number in (megabytes, policy.warmup, policy.seconds, readings))
    timeout = policy.timeout + 2 * readings * (policy.warmup + policy.seconds)
    try:
        printed = process.output([python, "-I", SCRIPT, *words], timeout=timeout)
        return msgspec.json.decode(printed, type=ProbeResult)
    except CommandError as error:
        raise ProbeError(one_line(" ".join([error.what, *error.details[-1:]]), 300)) from None
    except msgspec.MsgspecError as error:
        raise ProbeError(f"it gives no reading: {error}") from None


def under_load(python: Path) -> tuple[str, str]:
    """
    Return what the first GPU has while it works for ten seconds, and what is wrong with that.

    A Spark can be stuck at about 700 MHz, or 513, until its power was disconnected; idle, it cannot
    be told from a sound one, which has 2,400 of 3,003 MHz under load (eugr/spark-vllm-docker#334,
    model-serving-minefield#55). Whoever sets a limit on purpose takes 2,000 or more.

    Args:
        python: Of an environment with torch.

    Returns:
        Clocks, power, temperature and bandwidth, or an empty text if they cannot be seen; and a
        sentence, or an empty text if nothing is wrong.
    """
    samples = [["0"] * 4]
    with ThreadPoolExecutor(1) as pool:
        load = pool.submit(probe, python, LOAD, LOAD.matrix)
        while not load.done():
            time.sleep(PERIOD)
            rows, _ = memory.query("gpu=clocks.sm,clocks.max.sm,power.draw,temperature.gpu")
            samples += rows[:1]
    try:
        result = load.result()
    except ProbeError as error:
        return "", f"the load did not run: {error}"
    if not result.gpu:
        return "", "torch sees no GPU"
    highest = list[float]()
    for column in zip(*samples, strict=True):
        # [N/A] is no number.
        highest.append(max(float(re.sub("[^0-9.]", "", word) or 0) for word in column))
    clock, most, watts, celsius = highest
    speed = result.bytes / result.readings[0].gemv / 1e9
    state = f"{clock:,.0f} of {most:,.0f} MHz, {watts:.0f} W, {celsius:.0f} °C, {speed:,.0f} GB/s"
    slow = f"the GPU stays at {clock:,.0f} MHz under load; disconnect its power for some minutes"
    return state, slow if 0 < clock < SLOW * most else ""
