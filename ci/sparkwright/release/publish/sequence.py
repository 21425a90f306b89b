"""
One publication, step by step: files, evidence, records and locks, generation, flip.

Until the last of these nothing refers to what was added; a kill before it leaves files that the next run uses or removes, and a kill after
it a finished publication. No step writes over anything.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Mapping
from pathlib import Path

import msgspec

from sparkwright.core.console import console
from sparkwright.core.errors import StoreError, UsageError
from sparkwright.core.files import content_key
from sparkwright.core.store import translate_disk_full
from sparkwright.release import index
from sparkwright.release.manifest import change, times
from sparkwright.release.manifest.records import Channel, Manifest, Missing
from sparkwright.release.publish import ground, journal, judge, prepare
from sparkwright.release.publish.folder import Folder
from sparkwright.release.publish.hosts import Host
from sparkwright.release.publish.journal import Journal
from sparkwright.release.publish.offers import Offers, check_candidate
from sparkwright.release.publish.prepare import Decided, Publisher
from sparkwright.release.signing.urls import normalised


class Asked(msgspec.Struct, frozen=True):
    """
    What is to be published.

    Attributes:
        channel: Empty for ``verified`` or nothing.
        verdicts: Where the verdicts lie; None for beside each wheel.
        repository: ``OWNER/NAME`` on GitHub where wheels go; empty for the folder of the index.
        url: Where the index will be served; empty for what the index, or the policy, says.
    """

    wheels: tuple[Path, ...]
    channel: Channel | None = None
    verdicts: Path | None = None
    repository: str = ""
    url: str = ""
    reason: str = ""
    dry: bool = False


class Published(msgspec.Struct, frozen=True):
    """
    What a publication did.

    Attributes:
        serial: Of the manifest that offers it. *already*: it was offered before, and nothing was done.
        sent, there: Places of wheels and their METADATA that were sent, and that lay there already. *size*: bytes of those sent.
        removed: Places of what killed runs had left. *missing*: file name → what ``verified`` asks for and was not shown.
    """

    release: str
    address: str
    channel: Channel
    serial: int
    url: str
    already: bool = False
    sent: tuple[str, ...] = ()
    there: tuple[str, ...] = ()
    size: int = 0
    removed: tuple[str, ...] = ()
    missing: dict[str, tuple[Missing, ...]] = {}


def publish(publisher: Publisher, asked: Asked) -> Published:
    """
    Publish the wheels as one release, or complete what a killed run began.

    Raises:
        verified-refused: Something is missing, and the channel candidate was not asked for.
        wheel-name-taken, version-order, release-name-taken, release-yanked: The index holds what stands in its way.
        index-busy, index-moved: Another publisher. disk-full, publish-failed, github-unreachable, …: see `hosts.Host`.
    """
    with contextlib.nullcontext() if asked.dry else ground.held(publisher.root), translate_disk_full(publisher.root):
        standing = ground.manifest(publisher.root, publisher.trust)
        url = _url(publisher, asked, standing)
        manifest = standing or change.first(url, at=times.now(), days=publisher.policy.days)
        offers = Offers(publisher.root, manifest)
        publisher.observe("decide")
        decided, channel = judge.decided(publisher, asked.wheels, asked.verdicts, asked.channel)
        both = zip(decided.wheels, decided.proved, strict=True)
        missing = {wheel.filename: proved.missing for wheel, proved in both if proved.missing}
        done = Published("", "", channel, manifest.serial, url, missing=missing)
        if same := offers.same(publisher.context.project.stack, decided.wheels):
            check_candidate(same, channel)
            removed = [] if asked.dry else clean(publisher, standing)
            return msgspec.structs.replace(
                done, release=same.name, address=same.release, channel=same.channel, already=True, removed=tuple(removed)
            )
        offers.check_names(decided.wheels)
        offers.check_order(publisher.context.project.stack, channel, decided.wheels)
        if asked.dry:
            return msgspec.structs.replace(done, release=offers.name(publisher.context.project.stack))
        return _carried_out(publisher, asked, manifest, offers, decided, done)


def _carried_out(publisher: Publisher, asked: Asked, manifest: Manifest, offers: Offers, decided: Decided, done: Published) -> Published:
    asks = [manifest.serial, done.url, done.channel, asked.repository, publisher.signer.by, decided.wheels, decided.proved]
    key = content_key("publication", asks)
    found = journal.whole(publisher.root, key)
    removed = clean(publisher, manifest if manifest.serial else None, keep=key if found else "")
    if found is None:
        publisher.observe("prepare")
        with console.step("locks, evidence and records"), judge.with_installer(publisher, offers, decided, done.url) as whole:
            found = prepare.prepared(
                publisher, offers, whole, key=key, at=times.now(), channel=done.channel, url=done.url, repository=asked.repository
            )
    host = add(publisher, found, {one.wheel.sha256: one.path for one in decided.inspected}, prerelease=done.channel == "candidate")
    after = change.publish(
        manifest, found.offers, at=times.now(), by=publisher.signer.by, reason=asked.reason, days=publisher.policy.days, files=found.names
    )
    ground.turn(publisher.root, manifest.serial, after, publisher.signer, publisher.observe)
    publisher.observe("clear")
    journal.clear(publisher.root, key)
    sizes = {one.place: one.size for one in found.files}
    return msgspec.structs.replace(
        done, release=found.offers.name, address=found.offers.release, serial=after.serial, sent=tuple(host.sent), there=tuple(host.there),
        size=sum(sizes[place] for place in host.sent), removed=tuple(removed),
    )  # fmt: skip


def add(publisher: Publisher, found: Journal, paths: Mapping[str, Path], *, prerelease: bool = False) -> Host:
    """
    Bring everything that the journal names to its place, in the order in which it may be there.

    Args:
        paths: sha256 → the file, for those that the journal does not keep itself.
    """
    root, kept = publisher.root, journal.place(publisher.root, found.key)
    host = prepare.host_of(publisher, found.host, prerelease=prerelease)
    if found.files:
        host.ready()
        _room(root, found, everything=found.host == Folder.name)
        total = sum(one.size for one in found.files) * (1 if found.host == Folder.name else 2)
        with console.progress("publish", total, "bytes") as line:
            moved = [0]

            def count(more: int, name: str) -> None:
                moved[0] += more
                line.update(moved[0], name)

            for one in found.files:
                path = kept / one.sha256
                host.put(one.place, path if path.exists() else paths[one.sha256], one.sha256, count)
        publisher.observe("finish")
        host.finish()
    own = Folder(root, publisher.observe)
    for one in found.small:
        own.take(one.place, kept / one.sha256, one.sha256)
    publisher.observe("flush")
    own.flush(one.place for one in found.small)
    return host


def _room(root: Path, found: Journal, *, everything: bool) -> None:
    """Refuse to begin what cannot be ended; raises `disk-full`."""
    planned = [*(found.files if everything else ()), *found.small]
    wanted = sum(one.size for one in planned if not (root / one.place).exists())
    free = shutil.disk_usage(root).free
    if wanted > free:
        details = [f"needed: {wanted / 1e6:,.0f} MB", f"free:   {free / 1e6:,.0f} MB"]
        raise StoreError(
            "disk-full", f"There is no room for this release in {root}.", details=details, todo="Make room, and run the same command again."
        )


def clean(publisher: Publisher, manifest: Manifest | None, keep: str = "") -> list[str]:
    """Remove what killed runs left and *manifest* does not refer to, but the journal *keep*; return the places of it."""
    if journal.none(publisher.root):
        return []
    if manifest:
        # One that was killed in its last step may not have made all names at the root of a new index.
        index.flip(publisher.root, manifest.serial)
    return journal.clean(publisher.root, manifest, lambda name: prepare.host_of(publisher, name), keep)


def _url(publisher: Publisher, asked: Asked, manifest: Manifest | None) -> str:
    """Return where the index is served."""
    if manifest:
        if asked.url and normalised(asked.url) != manifest.url:
            raise UsageError("usage", f"The index in {publisher.root} is served at {manifest.url}; one at {asked.url} is another index.")
        return manifest.url
    url = asked.url or publisher.policy.url
    if not url:
        raise UsageError("usage", "Nothing says where the new index will be served.", todo="Give --url, or write it into ci/release.yaml.")
    return normalised(url)
