"""What earlier sessions on this machine read, so that one that begins in the slow state is noticed, too."""

from __future__ import annotations

import time
from collections.abc import Mapping

import msgspec

from sparkwright.bench.machine.conditions import Normal
from sparkwright.bench.machine.policy import SentinelPolicy
from sparkwright.bench.records import Reason
from sparkwright.core.files import content_key
from sparkwright.core.store import Store

#: Sessions that are kept, the newest.
MOST = 30


class Session(msgspec.Struct, frozen=True):
    """The medians of a session's first readings, in seconds, and its day."""

    gemv: float
    copy: float
    day: str


class History(msgspec.Struct, frozen=True):
    """Sessions on one machine with one driver, firmware and kernel, oldest first."""

    sessions: tuple[Session, ...] = ()

    def __post_init__(self) -> None:
        if not all(0 < one.gemv < 1e6 and 0 < one.copy < 1e6 for one in self.sessions):
            raise ValueError("sessions have seconds above 0")


class Kept:
    """
    The history in *store* of a machine with that *fingerprint*.

    Readings of another size, of another library or another device are another history, and so are those of another driver.
    """

    def __init__(self, store: Store, fingerprint: Mapping[str, str], policy: SentinelPolicy, device: str) -> None:
        self._store = store
        self._key = content_key("sentinel", [dict(fingerprint), policy.matrix, device])
        self.sessions = (store.get("sentinel", self._key, History) or History()).sessions

    def slower(self, normal: Normal) -> tuple[Reason, ...]:
        """Return that this session begins slower than the best that is kept; memory is never faster by chance."""
        if not self.sessions:
            return ()
        best = min(self.sessions, key=lambda one: one.gemv)
        if normal.gemv.middle <= best.gemv * (1 + normal.band):
            return ()
        times = normal.gemv.middle / best.gemv
        says = f"the fixed GEMV takes {times:.2f} times as long as on {best.day}, on this machine with these versions"
        return (Reason("slow-state", says),)

    def keep(self, normal: Normal) -> None:
        """Add this session."""
        added = Session(normal.gemv.middle, normal.copy.middle, time.strftime("%Y-%m-%d", time.gmtime()))
        self.sessions = (*self.sessions, added)[-MOST:]
        self._store.put("sentinel", self._key, History(self.sessions))
