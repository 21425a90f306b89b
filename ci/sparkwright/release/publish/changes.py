"""What is done to an index that is there: promote, yank, roll back, retain, refresh. Each is one step of the manifest, with its record."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from sparkwright.core.files import canonical, content_key, sha256_bytes, sha256_file
from sparkwright.core.store import translate_disk_full
from sparkwright.release.errors import ReleaseError
from sparkwright.release.manifest import change, places, times
from sparkwright.release.manifest.records import Entry, Manifest, Release, Wheel
from sparkwright.release.publish import ground, journal, judge, prepare, sequence, transfer
from sparkwright.release.publish.folder import Folder
from sparkwright.release.publish.journal import Draft
from sparkwright.release.publish.offers import INSTALLER, Offers
from sparkwright.release.publish.prepare import Publisher


class Changed(msgspec.Struct, frozen=True):
    """
    What was done.

    Attributes:
        serial: Of the manifest that says so; *expires*: until when clients believe it.
        releases: Names of those that it was done to.
        removed: Places of what is no longer there: what killed runs left, and what `retain` takes away. *elsewhere*: addresses of files
            at other hosts that nothing refers to any more; they are left there.
    """

    action: str
    serial: int
    expires: str
    releases: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    elsewhere: tuple[str, ...] = ()


def yank(publisher: Publisher, name: str, reason: str) -> Changed:
    """Stop offering the release *name*; raises as `change.yank`, and `index-missing`, `index-busy`, `index-moved`."""
    return _changed(publisher, lambda old, at, by, days: change.yank(old, name, at=at, by=by, reason=reason, days=days))


def refresh(publisher: Publisher, reason: str = "") -> Changed:
    """Sign again what holds, so that clients go on to believe it, and remove what killed runs left."""
    return _changed(publisher, lambda old, at, by, days: change.refresh(old, at=at, by=by, reason=reason, days=days))


def _changed(publisher: Publisher, step: Callable[[Manifest, str, str, int], Manifest]) -> Changed:
    """Take one *step* of the manifest and make it live."""
    with _there(publisher) as manifest:
        after = step(manifest, times.now(), publisher.signer.by, publisher.policy.days)
        removed = sequence.clean(publisher, manifest)
        ground.turn(publisher.root, manifest.serial, after, publisher.signer, publisher.observe)
        return _told(after, tuple(removed))


def _told(after: Manifest, removed: tuple[str, ...], elsewhere: tuple[str, ...] = (), releases: tuple[str, ...] = ()) -> Changed:
    record = after.log[-1]
    return Changed(record.action, after.serial, after.expires, releases or tuple(filter(None, [record.release])), removed, elsewhere)


@contextlib.contextmanager
def _there(publisher: Publisher) -> Iterator[Manifest]:
    """Hold the index, which has to be there, and yield its manifest."""
    if not publisher.root.is_dir():
        raise ReleaseError("index-missing", f"There is no folder {publisher.root}.")
    with ground.held(publisher.root), translate_disk_full(publisher.root):
        yield ground.required(publisher.root, publisher.trust)


def promote(publisher: Publisher, name: str, verdicts: Path, reason: str = "") -> Changed:
    """
    Move a candidate to ``verified``, once new verdicts about its very bytes show all that is asked for.

    Args:
        verdicts: The folder that they lie in; wheels that other hosts keep may lie there, too, else they are fetched.

    Raises:
        verified-refused: Something is still missing. release-unknown, release-yanked: There is no such candidate.
        version-order: ``verified`` offers a higher version already. Others: as `judge.decided`.
    """
    with _there(publisher) as manifest:
        entry = change.find(manifest, name)
        at, days = times.now(), publisher.policy.days
        # What the manifest refuses is refused before wheels are read.
        change.promote(manifest, name, entry.proof, at=at, by=publisher.signer.by, days=days)
        if entry.stack != publisher.context.project.stack:
            raise ReleaseError("release-unknown", f"{entry.name} is of stack {entry.stack}.", todo=f"Give --stack {entry.stack}.")
        offers = Offers(publisher.root, manifest)
        release = offers.releases[entry.release]
        own = [one for one in release.wheels if one.fork != INSTALLER]
        offers.check_order(entry.stack, "verified", own, besides=entry.release)
        removed = sequence.clean(publisher, manifest)
        found = _decided_again(publisher, release, entry, verdicts)
        sequence.add(publisher, found, {})
        after = change.promote(manifest, name, found.offers.proof, at=times.now(), by=publisher.signer.by, reason=reason, days=days)
        ground.turn(publisher.root, manifest.serial, after, publisher.signer, publisher.observe)
        journal.clear(publisher.root, found.key)
        return _told(after, tuple(removed))


def _decided_again(publisher: Publisher, release: Release, entry: Entry, verdicts: Path) -> journal.Journal:
    """Return the journal of a new proof, all of which is a pass."""
    publisher.observe("decide")
    with tempfile.TemporaryDirectory(dir=publisher.root / ground.WORK, prefix="wheels-") as folder:
        # Beside each other, as a build leaves them: one wheel may say where another comes from.
        paths = {one.sha256: _at_hand(publisher, one, Path(folder), verdicts) for one in release.wheels}
        own = [paths[one.sha256] for one in release.wheels if one.fork != INSTALLER]
        decided, _ = judge.decided(publisher, own, verdicts, "verified")
        decided = judge.besides(publisher, decided, [paths[one.sha256] for one in release.wheels if one.fork == INSTALLER])
        key = content_key("promotion", [entry, publisher.signer.by, decided.proved])
        draft = Draft(publisher.root, key)
        proof = canonical(prepare.proved(publisher, draft, release, decided, times.now()))
        new = msgspec.structs.replace(entry, channel="verified", proof=sha256_bytes(proof))
        draft.add(places.proof(entry.release, new.proof), proof)
        return draft.finish(new, Folder.name, (), {})


def _at_hand(publisher: Publisher, wheel: Wheel, folder: Path, verdicts: Path) -> Path:
    """Return *wheel* as a file in *folder*: a link to that of the index, or of *verdicts*, or fetched; by its hash in each case."""
    path = folder / wheel.filename
    for known in (publisher.root / places.wheel(wheel.sha256, wheel.filename), verdicts / wheel.filename):
        if known.is_file() and sha256_file(known) == wheel.sha256:
            path.symlink_to(known.absolute())
            return path
    if "://" not in wheel.url:
        raise ReleaseError(
            "index-damaged", f"{wheel.filename} is not in the index, or not what it was.", details=[f"sha256: {wheel.sha256}"]
        )
    transfer.fetch(wheel.url, path, wheel.size, wheel.sha256)
    return path


def retain(publisher: Publisher, keep: int, *, verified: bool = False, reason: str = "") -> Changed:
    """
    Remove candidates beyond the *keep* newest of each stack, with all files that nothing else refers to; their names stay taken.

    Args:
        verified: Do the same with the releases of ``verified``.
    """
    with _there(publisher) as manifest:
        offers = Offers(publisher.root, manifest)
        gone = change.surplus(manifest, keep, verified=verified)
        staying = [one for one in manifest.entries if one not in gone]
        kept = {wheel.sha256 for one in staying for wheel in offers.releases[one.release].wheels}
        after = change.retain(
            manifest, offers.releases, keep=keep, at=times.now(), by=publisher.signer.by, verified=verified, reason=reason,
            days=publisher.policy.days, kept=kept,
        )  # fmt: skip
        removed = sequence.clean(publisher, manifest)
        staying_places = {place for one in staying for place in journal.referred(publisher.root, one)}
        loose = sorted({place for one in gone for place in journal.referred(publisher.root, one)} - staying_places)
        there = tuple(place for place in loose if (publisher.root / place).exists())
        # Named before the manifest lets go of them, so that what a killed run leaves is removed by the next one.
        journal.retiring(publisher.root, manifest.serial, gone, there)
        ground.turn(publisher.root, manifest.serial, after, publisher.signer, publisher.observe)
        journal.clean(publisher.root, after, lambda name: prepare.host_of(publisher, name))
        wheels = {wheel.url for one in gone for wheel in offers.releases[one.release].wheels if wheel.sha256 not in kept}
        elsewhere = tuple(sorted(url for url in wheels if "://" in url))
        return _told(after, (*removed, *there), elsewhere, tuple(one.name for one in gone))
