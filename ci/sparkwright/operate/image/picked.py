"""Which release an image is made of: taken from an index as `install` takes it, for the machine that the image is for."""

from __future__ import annotations

from functools import partial

import msgspec

from sparkwright.forks.context import RunContext, StandaloneContext
from sparkwright.operate.errors import ImageError
from sparkwright.release.client import address, choice, install, target
from sparkwright.release.client.catalogue import MOST_MANIFEST, Catalogue
from sparkwright.release.client.install import Wish
from sparkwright.release.errors import ReleaseError
from sparkwright.release.manifest import places, signed
from sparkwright.release.manifest.records import Entry, Missing, Release, Wheel

#: Platforms of images, in the engine's words → their machine, in Python's.
PLATFORMS = {"linux/arm64": "aarch64", "linux/amd64": "x86_64"}


class Picked(msgspec.Struct, frozen=True):
    """
    A release whose signature, expiry and evidence were checked.

    Attributes:
        manifest: The signed bytes that offer it. *missing*: what is not proved of it.
        installer: The release's own sparkwright, which installs it inside, and serves.
    """

    index: Catalogue
    manifest: bytes
    entry: Entry
    release: Release
    missing: tuple[Missing, ...]
    installer: Wheel
    machine: str

    @property
    def wheels(self) -> tuple[Wheel, ...]:
        """Our wheels of the release for that machine, by project."""
        return tuple(sorted(target.wheels_of(self.release, self.machine), key=lambda one: one.project))


def outside(context: RunContext) -> StandaloneContext:
    """Return what of *context* a client of an index works with."""
    return StandaloneContext(context.store, context.offline, context.mirrors)


def pick(context: RunContext, wish: Wish, machine: str) -> Picked:
    """
    Return the release that *wish* means for *machine*.

    Raises:
        release-unknown: There is none for it. release-unproved, release-yanked: See `choice`. installer-unfit: It brings no installer.
        SparkwrightError: As `install.opened` and `target.proved`: the index, its signature or its evidence is not what it should be.
    """
    index = install.opened(outside(context), wish)
    if wish.release:
        entries: tuple[Entry, ...] = (choice.named(index.manifest, wish.release, wish.channel),)
    else:
        entries = choice.newest(index.manifest, wish.channel, wish.stack)
    entry, release = target.first_fitting(index, entries, machine)
    missing = target.proved(index, entry, release, wish.channel, machine)
    found = next((wheel for wheel in target.wheels_of(release, machine) if wheel.fork == target.SELF), None)
    if found is None:
        raise ImageError("installer-unfit", f"{entry.name} was published without an installer.")
    return Picked(index, _bytes(index), entry, release, missing, found, machine)


def _bytes(index: Catalogue) -> bytes:
    """Return the signed file of the manifest, for the installer inside to check again."""
    what = f"the manifest of {index.address}"
    data = address.small(
        index.address, places.MANIFEST, most=MOST_MANIFEST, failure=partial(ReleaseError, "manifest-invalid"), offline=index.context.offline
    )
    if data is None or signed.read(data, index.trust, what=what, asked=index.manifest.url) != index.manifest:
        raise ReleaseError("manifest-invalid", f"{what} changed while it was read.", todo="Run again.")
    return data
