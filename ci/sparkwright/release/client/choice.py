"""Which release is meant: a pure choice from what the manifest says."""

from __future__ import annotations

import difflib

from sparkwright.release.errors import ReleaseError
from sparkwright.release.manifest.records import Channel, Entry, Manifest


def named(manifest: Manifest, name: str, channel: Channel) -> Entry:
    """
    Return the release of that full *name*; a yanked one is had in no other way.

    Raises:
        release-unknown: There is none. release-unproved: It is a candidate, and *channel* is not.
    """
    found = next((entry for entry in manifest.entries if entry.name == name), None)
    if found is None:
        close = difflib.get_close_matches(name, [entry.name for entry in manifest.entries])
        raise ReleaseError("release-unknown", f"The index has no release {name!r}.", details=[f"near: {one}" for one in close])
    if channel == "verified" and found.channel != "verified":
        raise ReleaseError("release-unproved", f"{name} is a candidate.")
    return found


def newest(manifest: Manifest, channel: Channel, stack: str) -> tuple[Entry, ...]:
    """
    Return what is offered of *stack* (empty: of the latest one that is offered), newest first; the first that fits the machine is meant.

    Raises:
        release-unknown: There is none. release-unproved: There are candidates only. release-yanked: All that there are were yanked.
    """
    of_stack = [entry for entry in manifest.entries if stack in ("", entry.stack)]
    if not of_stack:
        raise ReleaseError("release-unknown", f"The index has no release of the stack {stack}." if stack else "The index has no release.")
    there = [entry for entry in of_stack if channel == "candidate" or entry.channel == "verified"]
    if not there:
        details = [f"candidate: {entry.name}" for entry in of_stack if not entry.yanked][-5:]
        raise ReleaseError(
            "release-unproved", "The index has no verified release" + (f" of the stack {stack}." if stack else "."), details=details
        )
    offered = [entry for entry in there if not entry.yanked]
    if not offered:
        raise ReleaseError(
            "release-yanked",
            f"Every {channel} release{f' of the stack {stack}' if stack else ''} was yanked.",
            details=[f"{entry.name}: {entry.yanked}" for entry in there][-5:],
        )
    last = stack or max(entry.stack for entry in offered)
    # The manifest has them oldest first.
    return tuple(entry for entry in reversed(offered) if entry.stack == last)
