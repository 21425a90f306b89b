"""The fastest earlier session on this machine, to notice one that starts in a slow state."""

from __future__ import annotations

import time
from collections.abc import Mapping

import msgspec

from sparkwright.bench.machine.state_checks import Normal, Positive, ProbePolicy
from sparkwright.bench.records import Reason
from sparkwright.core.files import content_key
from sparkwright.core.store import Store


class FastestSession(msgspec.Struct, frozen=True):
    """Median seconds of a session's first matrix-vector products, and its day."""

    gemv: Positive
    day: str


def history_key(fingerprint: Mapping[str, str], policy: ProbePolicy, device: str) -> str:
    """Return the key of a machine: another driver, device, library or matrix is another one."""
    return content_key("probe", [dict(fingerprint), policy.matrix, device])


def history_reasons(
    store: Store, key: str, normal: Normal, policy: ProbePolicy
) -> tuple[Reason, ...]:
    """Return a reason if a session that starts with *normal* is slower than the fastest one."""
    best = store.get("probe", key, FastestSession)
    if best is None or normal.median <= best.gemv * (1 + policy.band):
        return ()
    times = normal.median / best.gemv
    message = f"the GEMV takes {times:.2f} × as long as on {best.day}, with the same versions"
    return (Reason("slow-state", message),)


def store_session(store: Store, key: str, normal: Normal) -> None:
    """Store a session if it is the fastest on its machine."""
    best = store.get("probe", key, FastestSession)
    if best is None or normal.median < best.gemv:
        today = time.strftime("%Y-%m-%d", time.gmtime())
        store.put("probe", key, FastestSession(normal.median, today))
