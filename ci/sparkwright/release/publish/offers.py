"""What the index holds beside a new release: which names are taken, what pip would take, and what the release is called."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from sparkwright.release.errors import ReleaseError
from sparkwright.release.manifest import change
from sparkwright.release.manifest.records import Channel, Entry, Manifest, Release, Wheel
from sparkwright.release.publish import ground

#: The fork that the installer counts as; its wheel is part of every release and of no matched set.
INSTALLER = "sparkwright"


class Offers:
    """
    The releases of an index, read once.

    Args:
        manifest: What it says.

    Raises:
        index-damaged: A release is not the one of its address.
    """

    def __init__(self, root: Path, manifest: Manifest) -> None:
        self.manifest = manifest
        self.releases: Mapping[str, Release] = {one.release: ground.release(root, one.release) for one in manifest.entries}
        self.wheels = {wheel.filename: wheel for release in self.releases.values() for wheel in release.wheels}

    def of(self, stack: str) -> list[tuple[Entry, Release]]:
        """Return the releases of *stack*, oldest first."""
        return [(one, self.releases[one.release]) for one in self.manifest.entries if one.stack == stack]

    def name(self, stack: str) -> str:
        """Return the name of the next release of *stack*; a number that was given once is never given again."""
        known = {one.name for one in self.manifest.entries} | {one.release for one in self.manifest.log}
        numbers = [int(end) for one in known if (end := one.removeprefix(f"{stack}.")) != one and end.isdecimal()]
        return f"{stack}.{max(numbers, default=0) + 1}"

    def before(self, stack: str) -> str:
        """Return the address of the newest release of *stack*; empty for none."""
        return next((entry.release for entry, _ in reversed(self.of(stack))), "")

    def installer(self) -> Wheel | None:
        """Return the newest installer that the index has."""
        found = [wheel for one in self.manifest.entries for wheel in self.releases[one.release].wheels if wheel.fork == INSTALLER]
        return found[-1] if found else None

    def check_names(self, wheels: Iterable[Wheel]) -> None:
        """
        Refuse a file name that the index has, or had, for other bytes.

        Raises:
            wheel-name-taken: There is one.
        """
        for wheel in wheels:
            known = self.wheels.get(wheel.filename)
            was = known.sha256 if known else self.manifest.retired.get(wheel.filename, wheel.sha256)
            if was != wheel.sha256:
                details = [f"{'there' if known else 'once there'}: {was}", f"to be: {wheel.sha256}"]
                raise ReleaseError(
                    "wheel-name-taken", f"The index {'holds' if known else 'once held'} {wheel.filename} with other bytes.", details=details
                )

    def check_order(self, stack: str, channel: Channel, wheels: Iterable[Wheel], besides: str = "") -> None:
        """
        Refuse a wheel that pip would pass over for one that *channel* offers already of the same stack.

        Args:
            besides: Address of a release that does not count: the one that is to be promoted.

        Raises:
            version-order: There is one.
        """
        from packaging.version import Version

        offered = [one for one in change.offered(self.manifest, stack, channel) if one.release != besides]
        highest: dict[tuple[str, str], tuple[Version, str, str]] = {}
        for entry in offered:
            for one in self.releases[entry.release].wheels:
                key, this = (one.project, one.machine), (Version(one.version), one.sha256, entry.name)
                highest[key] = max(highest.get(key, this), this)
        for wheel in wheels:
            if (found := highest.get((wheel.project, wheel.machine))) is None or wheel.sha256 == found[1]:
                continue
            if Version(wheel.version) <= found[0]:
                details = [f"offered: {wheel.project} {found[0]} in {found[2]}", f"this:    {wheel.project} {wheel.version}"]
                raise ReleaseError("version-order", f"pip would pass over {wheel.filename}.", details=details)

    def same(self, stack: str, wheels: Sequence[Wheel]) -> Entry | None:
        """
        Return the release that consists of exactly *wheels*, beside the installer; None where there is none.

        Raises:
            release-yanked: It was yanked; what was withdrawn is not offered again under the same file names.
        """
        wanted = {one.sha256 for one in wheels}
        for entry, release in self.of(stack):
            if {one.sha256 for one in release.wheels if one.fork != INSTALLER} == wanted:
                if entry.yanked:
                    todo = "A fix is a new version: raise `label` in stack.yaml and build again."
                    raise ReleaseError(
                        "release-yanked", f"{entry.name} has these wheels, and was yanked.", details=[f"because {entry.yanked}"], todo=todo
                    )
                return entry
        return None


def check_candidate(entry: Entry, channel: Channel) -> None:
    """
    Refuse to publish a second time what is a candidate and shall be verified.

    Raises:
        release-name-taken: It is so.
    """
    if channel == "verified" and entry.channel == "candidate":
        todo = f"Move it there: `sparkwright release promote {entry.name}`."
        raise ReleaseError("release-name-taken", f"These wheels are published, as the candidate {entry.name}.", todo=todo)
