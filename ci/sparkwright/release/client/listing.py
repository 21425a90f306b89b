"""What `list` shows of an index: each release, what it holds, what is missing of its proof, and which one is installed."""

from __future__ import annotations

import contextlib
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from sparkwright.core.errors import SparkwrightError
from sparkwright.release import environment
from sparkwright.release.client import state, target
from sparkwright.release.client.catalogue import Catalogue
from sparkwright.release.client.install import Wish
from sparkwright.release.manifest.records import Entry

#: What people choose a release by.
SHOWN = ("vllm", "flashinfer-python", "torch")
#: So many of the newest are shown; the index's own page has all.
MOST = 50


class Row(msgspec.Struct, frozen=True):
    """A release: *size* in bytes of its own wheels for this machine, *missing* as ``gate: state``, *fits* this machine."""

    name: str
    release: str
    stack: str
    channel: str
    made: str
    yanked: str
    versions: dict[str, str]
    size: int
    missing: tuple[str, ...]
    fits: bool
    installed: bool


def rows(index: Catalogue, wish: Wish, present: str) -> tuple[Row, ...]:
    """
    Return the releases of the wished channel and stack, newest first; yanked ones included, because they may be installed somewhere.

    Args:
        present: Address of the release that is installed, or empty.

    Raises:
        index-damaged, download-invalid, set-mixed, source-unreachable: A record cannot be had.
    """
    wanted = [
        entry
        for entry in reversed(index.manifest.entries)
        if (wish.channel == "candidate" or entry.channel == "verified")
        and wish.stack in ("", entry.stack)
        and wish.release in ("", entry.name)
    ]
    with ThreadPoolExecutor(4) as pool:
        return tuple(pool.map(lambda entry: _row(index, entry, present), wanted[:MOST]))


def _row(index: Catalogue, entry: Entry, present: str) -> Row:
    release, proof = index.release(entry), index.proof(entry)
    lock, wheels = target.lock_of(release), target.wheels_of(release)
    versions = {name: lock.packages[name] for name in SHOWN if lock and name in lock.packages}
    there = {wheel.sha256 for wheel in wheels}
    missing = sorted({f"{one.gate}: {one.state}" for proved in proof.wheels if proved.wheel in there for one in proved.missing})
    return Row(
        entry.name, entry.release, entry.stack, entry.channel, entry.made, entry.yanked, versions, sum(wheel.size for wheel in wheels),
        tuple(missing), lock is not None, entry.release == present,
    )  # fmt: skip


def present(into: Path | None) -> str:
    """Return the address of the release that is in the environment; empty where there is none, or no environment."""
    folder = into or Path(os.environ.get("VIRTUAL_ENV") or sys.prefix)
    with contextlib.suppress(SparkwrightError):
        if known := state.installed(environment.probe(folder)):
            return known.chosen.release
    return ""
