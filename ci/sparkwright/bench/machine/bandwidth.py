"""How fast this machine's memory is read, measured by the sentinel's child; see `sparkwright.bench.model.roofline` for what it is for."""

from __future__ import annotations

from sparkwright.bench.machine.sentinel import Sentinel
from sparkwright.bench.model import roofline
from sparkwright.bench.model.roofline import Bandwidth
from sparkwright.builder import host_info
from sparkwright.core.store import Store


def measure(sentinel: Sentinel, store: Store) -> Bandwidth:
    """
    Return the bandwidth of reading, measured now, and keep it in *store* for what needs a figure later.

    It is the fastest of three ways to read an array once: a ceiling that is too low would call good measurements impossible.

    Raises:
        sparkwright.bench.machine.sentinel.Silent: The child gave no answer.
    """
    device = sentinel.hello()
    name = str(device) if device.kind == "cuda" else f"{host_info.processor()} by {device.by}"
    found = Bandwidth(round(sentinel.stream().read / 1e9, 2), "measured", name)
    roofline.keep(store, found)
    return found
