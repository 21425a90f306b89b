"""
What may happen to a manifest, as pure functions: each takes one and returns the next, with the serial one higher and one record more.

Of an entry nothing changes but its channel, its proof and why it is yanked. Times and names of signers are given, never taken from here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import msgspec
from msgspec.structs import replace

from sparkwright.core.errors import UsageError
from sparkwright.release.errors import ReleaseError
from sparkwright.release.manifest import times
from sparkwright.release.manifest.records import (
    Action,
    Channel,
    Entry,
    Line,
    Manifest,
    Record,
    Release,
    Time,
)
from sparkwright.release.signing.urls import normalised

#: How long clients believe a manifest; a publisher who is away for longer runs `refresh` by a timer.
DAYS = 30


def first(url: str, *, at: Time, days: int = DAYS) -> Manifest:
    """Return the state before the first publication of the index at *url*: serial 0, which is never signed."""
    return Manifest(0, at, times.after(at, days), normalised(url))


def publish(
    manifest: Manifest,
    entry: Entry,
    *,
    at: Time,
    by: str,
    reason: str = "",
    days: int = DAYS,
    files: Mapping[str, str] | None = None,
) -> Manifest:
    """
    Add *entry* as the newest.

    Args:
        files: File name → sha256 of its wheels, which are held against those that `retain` removed.

    Raises:
        release-name-taken: The index holds the release, or ever held its name. wheel-name-taken: It once held other bytes under that name.
    """
    names = {one.name for one in manifest.entries} | {one.release for one in manifest.log if one.action == "publish"}
    if entry.name in names or any(one.release == entry.release for one in manifest.entries):
        raise ReleaseError("release-name-taken", f"The index holds or once held {entry.name}.", details=[f"address {entry.release}"])
    for name, sha256 in (files or {}).items():
        if manifest.retired.get(name, sha256) != sha256:
            details = [f"then {manifest.retired[name]}", f"now  {sha256}"]
            raise ReleaseError("wheel-name-taken", f"{name} was published before, with other bytes.", details=details)
    return _next(manifest, "publish", entry.name, reason, at, by, days, (*manifest.entries, entry))


def promote(manifest: Manifest, name: str, proof: str, *, at: Time, by: str, reason: str = "", days: int = DAYS) -> Manifest:
    """
    Move the candidate *name* to ``verified``, where *proof* (its address) shows that nothing is missing.

    Raises:
        release-unknown: There is no candidate of that name. release-yanked: It is yanked.
    """
    entry = find(manifest, name)
    if entry.channel != "candidate":
        raise ReleaseError("release-unknown", f"{entry.name} is no candidate.", details=[f"it is in the channel {entry.channel} already"])
    _offered(entry)
    return _next(manifest, "promote", entry.name, reason, at, by, days, _changed(manifest, replace(entry, channel="verified", proof=proof)))


def yank(manifest: Manifest, name: str, *, at: Time, by: str, reason: str, days: int = DAYS) -> Manifest:
    """
    Stop offering the release *name*; its files stay, so that what pins it keeps working.

    Raises:
        release-unknown: There is none. release-yanked: It is yanked already. UsageError: No reason is given.
    """
    entry = find(manifest, name)
    _offered(entry)
    return _next(manifest, "yank", entry.name, reason, at, by, days, _changed(manifest, replace(entry, yanked=_reason(reason))))


def retain(
    manifest: Manifest,
    removed: Mapping[str, Release],
    *,
    keep: int,
    at: Time,
    by: str,
    verified: bool = False,
    reason: str = "",
    days: int = DAYS,
    kept: Collection[str] = (),
) -> Manifest:
    """
    Remove what `surplus` names, and remember the names of its files for good.

    Args:
        removed: Address → release, of at least those. *kept*: sha256 of wheels that other releases still use, which are not removed.

    Raises:
        UsageError: *keep* is below 1.
    """
    gone = surplus(manifest, keep, verified=verified)
    wheels = [wheel for entry in gone for wheel in removed[entry.release].wheels if wheel.sha256 not in kept]
    retired = manifest.retired | {wheel.filename: wheel.sha256 for wheel in wheels}
    said = reason or f"kept {keep}, removed {', '.join(entry.name for entry in gone) or 'nothing'}"
    addresses = {entry.release for entry in gone}
    entries = tuple(entry for entry in manifest.entries if entry.release not in addresses)
    return replace(_next(manifest, "retain", "", said[:1000], at, by, days, entries), retired=retired)


def refresh(manifest: Manifest, *, at: Time, by: str, reason: str = "", days: int = DAYS) -> Manifest:
    """Say again what holds, so that clients believe it for another *days* days."""
    return _next(manifest, "refresh", "", reason, at, by, days, manifest.entries)


def find(manifest: Manifest, name: str) -> Entry:
    """Return the entry of the release with that name or address; raises `release-unknown`."""
    for entry in manifest.entries:
        if name in (entry.name, entry.release):
            return entry
    raise ReleaseError("release-unknown", f"The index holds no release {name!r:.200}.")


def offered(manifest: Manifest, stack: str, channel: Channel) -> Sequence[Entry]:
    """Return what *channel* offers of *stack*, oldest first; ``candidate`` offers what is verified, too."""
    return [one for one in manifest.entries if one.stack == stack and not one.yanked and channel in ("candidate", one.channel)]


def surplus(manifest: Manifest, keep: int, *, verified: bool = False) -> Sequence[Entry]:
    """
    Return what `retain` removes: of each stack the candidates older than the *keep* newest that are offered.

    A yanked one does not count among those, so that whatever goes, as many can still be installed.

    Args:
        verified: Do the same with the releases of ``verified``, by themselves.

    Raises:
        UsageError: *keep* is below 1.
    """
    if keep < 1:
        raise UsageError("usage", "At least one release of each stack and channel is kept.")
    newer: dict[tuple[str, str], int] = {}
    gone = []
    for entry in reversed(manifest.entries):
        kind = entry.stack, entry.channel
        if newer.get(kind, 0) >= keep and (verified or entry.channel == "candidate"):
            gone.append(entry)
        newer[kind] = newer.get(kind, 0) + (not entry.yanked)
    return gone[::-1]


def _next(
    manifest: Manifest, action: Action, release: str, reason: str, at: Time, by: str, days: int, entries: tuple[Entry, ...]
) -> Manifest:
    try:
        msgspec.convert(reason, Line)
    except msgspec.ValidationError as error:
        raise UsageError("usage", "A reason is one line of at most 1000 characters, without control characters.") from error
    serial = manifest.serial + 1
    log = (*manifest.log, Record(serial, at, action, release, reason, by))
    return replace(manifest, serial=serial, made=at, expires=times.after(at, days), entries=entries, log=log)


def _changed(manifest: Manifest, entry: Entry) -> tuple[Entry, ...]:
    return tuple(entry if one.release == entry.release else one for one in manifest.entries)


def _offered(entry: Entry) -> None:
    if entry.yanked:
        raise ReleaseError(
            "release-yanked", f"{entry.name} is yanked.", details=[f"because {entry.yanked}"], todo="Publish a new release instead."
        )


def _reason(reason: str) -> str:
    if not reason.strip():
        raise UsageError(
            "usage", "A release is not yanked without a reason, which people and pip will show.", todo="Give it with --reason TEXT."
        )
    return reason
