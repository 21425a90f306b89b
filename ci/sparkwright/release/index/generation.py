"""
A generation: every page that changes with the manifest, made beside the live one.

What the live generation was made from is known (`state`), so only what differs is rendered: a page is changed line by line, an unchanged
one becomes a hard link, and the pages of a release, which lie in a folder named after all that they show, stay where they are. The result
is, byte for byte, what would have been made from nothing.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from sparkwright.core.console import console
from sparkwright.core.files import canonical, content_key, sha256_bytes
from sparkwright.core.store import translate_disk_full
from sparkwright.release.errors import ReleaseError
from sparkwright.release.index import entries, live, pages, simple, state
from sparkwright.release.index.entries import Skimmed
from sparkwright.release.index.folder import Draft, flush, sync
from sparkwright.release.index.simple import Line
from sparkwright.release.index.state import Known, Row, State
from sparkwright.release.manifest import places
from sparkwright.release.manifest.records import Channel, Entry, Manifest, Release

CHANNELS: tuple[Channel, ...] = ("candidate", "verified")

#: What the two pages of a project are made by.
_FORMS: Mapping[str, Callable[[str, bytes, Mapping[str, Line | None]], bytes]] = {
    "index.html": simple.html_page,
    "index.json": simple.json_page,
}


def generate(root: Path, manifest: Manifest, sealed: bytes, *, fresh: bool = False) -> Path:
    """
    Make the generation of *manifest* below *root*, whole and on the disk, and return its folder; `live.flip` puts it live.

    Args:
        sealed: The signed manifest, as it is served. *fresh*: build on nothing that is there, and mend pages that a disk changed.

    Raises:
        index-damaged: A record or a file that the pages would point to is missing or not what it should be.
        verified-refused: An entry says ``verified``, and its proof does not. wheel-name-taken: Two wheels have one name.
        index-moved: Another manifest with the same serial is live. disk-full: There is no room.
    """
    root = root.absolute()
    with translate_disk_full(root):
        place, before = live.place(root, manifest.serial), live.current(root)
        if before and before[0] == manifest.serial:
            if before[1] != sealed:
                raise ReleaseError("index-moved", f"Another manifest with the serial {manifest.serial} is live already.")
            return place
        parent = live.place(root, before[0]) if before and not fresh else None
        making = Making(root, manifest, parent)
        try:
            making.releases(fresh=fresh)
            shutil.rmtree(place, ignore_errors=True)
            return making.generation(place, sealed)
        finally:
            making.drop()


class Making:
    """
    The work on one generation.

    Attributes:
        known: Every release of the manifest, in its order.
    """

    def __init__(self, root: Path, manifest: Manifest, parent: Path | None) -> None:
        self._root, self._manifest, self._parent = root, manifest, parent
        self._old = state.load(parent, manifest.url) if parent else State(state.program(), manifest.url)
        self._lines: dict[tuple[str, str], Line] = {}
        self._last: dict[str, Release] = {}
        self._drafts: list[Draft] = []
        self._present = {entry.release for entry in manifest.entries}
        self.known: list[Known] = []

    def releases(self, *, fresh: bool) -> None:
        """Read every release that the parent does not know as it stands now, and make its pages where they are not there."""
        old = {one.entry.release: one for one in self._old.releases}
        with console.progress("making the index", len(self._manifest.entries)) as progress:
            for count, entry in enumerate(self._manifest.entries, 1):
                one = old.get(entry.release)
                if one is None or one.entry != entry or (one.before and one.before not in self._present):
                    found = self._skimmed(entry)
                    entries.present(self._root, found)
                    one = self._known(found)
                    self._release(one, fresh=fresh)
                self.known.append(one)
                progress.update(count)
        self._once()
        self._settle()

    def _known(self, one: Skimmed) -> Known:
        rows = tuple(
            Row(
                wheel.filename, wheel.sha256, wheel.size, wheel.project, wheel.machine, "" if entries.near(wheel) else wheel.url,
                tuple(f"{lack.gate} {lack.state}" for lack in one.shown[wheel.sha256].missing),
            )
            for wheel in one.release.wheels
        )  # fmt: skip
        before = one.release.before if one.release.before in self._present else ""
        shown = [self._old.program, self._manifest.url, one.entry, before]
        pages = f"pages-{content_key('index-pages', shown)[:16]}"
        return Known(one.entry, before, tuple(lock.machine for lock in one.release.locks), rows, pages)

    def _made(self, one: Known) -> Path:
        return self._root / "b" / one.entry.release / one.pages

    def _skimmed(self, entry: Entry) -> Skimmed:
        """Return *entry* with what is shown of its records, and keep the lines of its files for the roots of the channels."""
        one = entries.skimmed(self._root, entry)
        for wheel in one.release.wheels:
            made = simple.line(entry, wheel, one.shown[wheel.sha256], self._manifest.url, simple.CHANNEL)
            self._lines[entry.release, wheel.filename] = made
        return one

    def _release(self, one: Known, *, fresh: bool) -> None:
        """Make the pages of one release; with *fresh*, mend those that are there."""
        place = self._made(one)
        if place.is_dir():
            if fresh:
                _mend(place, self._files(one))
            return
        draft = Draft(place)
        self._drafts.append(draft)
        for name, data in self._files(one).items():
            draft.write(name, data)

    def _files(self, known: Known) -> dict[str, bytes]:
        # Notes are written for people; whoever only reads records does not load them.
        from sparkwright.release import notes

        one, found = entries.whole(self._root, known.entry), entries.skimmed(self._root, known.entry)
        before = self._before(one.release) if known.before else None
        lines: dict[str, dict[str, Line]] = {}
        for wheel in found.release.wheels:
            made = simple.line(known.entry, wheel, found.shown[wheel.sha256], self._manifest.url, simple.RELEASE)
            lines.setdefault(wheel.project, {})[wheel.filename] = made
        return {
            "index.html": pages.release(one, known, notes.html(one.release, one.proof, before), self._manifest.url),
            "notes.md": notes.markdown(one.release, one.proof, before).encode(),
            **{f"simple/{name}": data for name, data in simple.whole(lines).items()},
        }

    def _before(self, release: Release) -> Release:
        """Return the release before *release*."""
        found = self._last.get(release.before)
        if found is None:
            found = entries.record(self._root, places.release(release.before), release.before, Release)
        # Releases come oldest first, so the next one of the stack asks for this one.
        self._last = {name: one for name, one in self._last.items() if one.stack != release.stack}
        self._last[sha256_bytes(canonical(release))] = release
        return found

    def _once(self) -> None:
        """Refuse a file name that stands for two wheels, now or in what was retired."""
        found = dict(self._manifest.retired)
        for one in self.known:
            for row in one.rows:
                if found.setdefault(row.filename, row.sha256) != row.sha256:
                    what = f"{row.filename} of {one.entry.name} has other bytes than a wheel of that name in another release."
                    raise ReleaseError("wheel-name-taken", what, details=[f"here  {row.sha256}", f"there {found[row.filename]}"])

    def _settle(self) -> None:
        """Give the new folders of pages their names, once they are on the disk, and lead to them."""
        flush(self._drafts)
        for draft in self._drafts:
            draft.finish(on_disk=False)
            if not (draft.place.parent / "pages").is_symlink():
                # Nothing points to this release before the flip; of others, what is live stays live until then.
                live.lead(draft.place.parent, draft.place.name)
        sync(*(draft.place.parent for draft in self._drafts))
        self._drafts = []

    def generation(self, place: Path, sealed: bytes) -> Path:
        """Make the folder *place*."""
        draft = Draft(place)
        self._drafts.append(draft)
        draft.write(places.MANIFEST, sealed)
        draft.write("index.html", pages.front(self._manifest, self.known))
        draft.write(live.PAGES, msgspec.json.encode({one.entry.release: one.pages for one in self.known}))
        written: dict[str, str] = {}
        for channel in CHANNELS:
            written |= self._channel(draft, channel)
        draft.write(state.NAME, State(self._old.program, self._manifest.url, tuple(self.known), written).encode())
        return draft.finish()

    def _channel(self, draft: Draft, channel: Channel) -> dict[str, str]:
        """Make the root *channel*, and return the digests of its projects' pages."""
        touched = self._touched()
        old, new = (state.offered(releases, channel, touched) for releases in (self._old.releases, self.known))
        changed: dict[str, list[str]] = {}
        for name, project in touched.items():
            was, now = old.get(name), new.get(name)
            if (was and was.entry) != (now and now.entry):
                changed.setdefault(project, []).append(name)
        projects = {project for one in self.known if channel in ("candidate", one.entry.channel) for project in one.projects}
        folder, written = places.simple(channel), {}
        for project in sorted(projects):
            for form, page in _FORMS.items():
                path = f"{folder}/{project}/{form}"
                before = self._before_page(path)
                if before and project not in changed:
                    assert self._parent
                    draft.link(path, self._parent / path)
                    written[path] = self._old.pages[path]
                    continue
                lines = {name: self._line(new.get(name), name) for name in changed[project]} if before else self._every(channel, project)
                data = page(project, before, lines)
                draft.write(path, data)
                written[path] = sha256_bytes(data)
        draft.write(f"{folder}/index.html", simple.html_root(projects))
        draft.write(f"{folder}/index.json", simple.json_root(projects))
        return written

    def _touched(self) -> dict[str, str]:
        """Return the files, each with its project, of every release that did not stand in the parent as it stands now."""
        old = {id(one) for one in self._old.releases}
        new = {id(one) for one in self.known}
        # A release that stands as it stood is the very record of the parent.
        differing = [one for one in self._old.releases if id(one) not in new] + [one for one in self.known if id(one) not in old]
        return {row.filename: row.project for one in differing for row in one.rows}

    def _every(self, channel: Channel, project: str) -> dict[str, Line | None]:
        """Return the lines of all files of a page: of a new one, and of one that is not there or that a disk changed."""
        names = {row.filename for one in self.known for row in one.rows if row.project == project}
        return {name: self._line(one, name) for name, one in state.offered(self.known, channel, names).items()}

    def _before_page(self, path: str) -> bytes:
        """Return the page *path* of the parent; nothing where it has none, or not the one that it was made with."""
        if self._parent is None or path not in self._old.pages:
            return b""
        try:
            data = (self._parent / path).read_bytes()
        except OSError:
            return b""
        return data if sha256_bytes(data) == self._old.pages[path] else b""

    def _line(self, one: Known | None, name: str) -> Line | None:
        if one is None:
            return None
        if (one.entry.release, name) not in self._lines:
            self._skimmed(one.entry)
        return self._lines[one.entry.release, name]

    def stale(self) -> list[str]:
        """Return the pages of releases that are not what they would be if they were made now; they are read as they lie."""
        found = []
        for entry in self._manifest.entries:
            one = self._known(self._skimmed(entry))
            made, place = self._files(one), self._made(one)
            found += [f"b/{entry.release}/{one.pages}/{name}" for name, data in made.items() if not same(place / name, data)]
            self.known.append(one)
        return found

    def drop(self) -> None:
        """Remove what was not finished."""
        for draft in self._drafts:
            draft.drop()


def _mend(place: Path, files: Mapping[str, bytes]) -> None:
    """Give the files below *place* the bytes that they should have."""
    for name, data in files.items():
        path = place / name
        if not same(path, data):
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(f".{path.name}.mended")
            temporary.write_bytes(data)
            sync(temporary)
            os.replace(temporary, path)


def same(path: Path, data: bytes) -> bool:
    """Return whether the file at *path* holds *data*."""
    try:
        return path.read_bytes() == data
    except OSError:
        return False
