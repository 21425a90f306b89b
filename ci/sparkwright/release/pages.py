"""
The pages of an index, generated from its signed releases: for people, and for pip and uv.

`simple/<channel>/` is the simple API as HTML (PEP 503) and JSON (PEP 691), with yanks (592),
METADATA (658, 714) and sizes (700). The pages carry no signature. They are written after the
signed metadata; what a killed run left old, the next command writes again.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from sparkwright import __version__
from sparkwright.client.records import CHANNELS, Channel, ReleaseFile, ReleaseWheel
from sparkwright.core.console import size
from sparkwright.core.files import canonical, sha256_bytes
from sparkwright.core.store import write_file
from sparkwright.release import release_notes, templates
from sparkwright.release.repository import ClientWheel, IndexEntry, IndexFolder

#: The version of the simple API (PEP 700).
SIMPLE_VERSION = "1.1"
#: The project of the client.
CLIENT = "sparkwright-install"

Wheel = ReleaseWheel | ClientWheel


def write(index: IndexFolder) -> None:
    """Write all pages of *index*, and remove those of what is no longer in it."""
    folder, entries = index.folder, index.entries
    for name, entry in entries.items():
        _write_release(index, folder / "releases" / name / "index.html", entry)
    newest = list(entries.values())[::-1]
    front = templates.render(
        "index.html",
        title="Wheels for DGX Spark",
        fingerprint=index.fingerprint,
        url=index.facts.url,
        client=[f"{CLIENT}=={wheel.version}" for wheel in index.facts.clients[-1:]],
        channels=[
            (channel, [entry for entry in newest if entry.state.channel == channel])
            for channel in reversed(CHANNELS)
        ],
        sizes={
            name: size(sum(wheel.size for wheel in entry.release.wheels))
            for name, entry in entries.items()
        },
    )
    _write(folder / "index.html", front.encode())
    for channel in CHANNELS:
        projects = _write_simple(folder / "simple" / channel, index, channel)
        _remove_others(folder / "simple" / channel, projects)
    _remove_others(folder / "releases", set(entries))


def _write_release(index: IndexFolder, path: Path, entry: IndexEntry) -> None:
    """Write the page of a release, unless it is there for this very record and state."""
    key = sha256_bytes(canonical([entry, __version__, index.facts.url]))
    last = f"<!-- {key} -->\n".encode()
    if path.exists() and path.read_bytes().endswith(last):
        return
    before = index.entries.get(entry.release.before)
    page = templates.render(
        "release.html",
        title=entry.release.name,
        state=entry.state,
        url=index.facts.url,
        link=lambda file: _link(file, 2),
        **release_notes.view(entry.release, before.release if before else None),
    )
    _write(path, page.encode() + last)


def _write_simple(folder: Path, index: IndexFolder, channel: Channel) -> set[str]:
    """Write the simple API of *channel*, and return its projects."""
    projects: dict[str, dict[str, tuple[Wheel, str]]] = {}
    if clients := index.facts.clients:
        projects[CLIENT] = {wheel.name: (wheel, "") for wheel in clients}
    for wheel, yanked in _offered(index, channel):
        earlier = projects.setdefault(wheel.project, {}).get(wheel.name)
        # A wheel of several releases is yanked only with all of them.
        reason = yanked if earlier is None or earlier[1] else ""
        projects[wheel.project][wheel.name] = (wheel, reason)
    links = [{"href": f"{name}/", "attributes": {}, "text": name} for name in sorted(projects)]
    _write_page(folder, "Simple index", links)
    meta = {"api-version": SIMPLE_VERSION}
    names = [{"name": name} for name in sorted(projects)]
    _write(folder / "index.json", msgspec.json.encode({"meta": meta, "projects": names}))
    for project, offered in projects.items():
        wheels = [offered[name] for name in sorted(offered)]
        _write_page(folder / project, f"Links for {project}", [_html(*entry) for entry in wheels])
        document = {
            "meta": meta,
            "name": project,
            "versions": sorted({wheel.version for wheel, _ in wheels}),
            "files": [_json(*entry) for entry in wheels],
        }
        _write(folder / project / "index.json", msgspec.json.encode(document))
    return set(projects)


def _offered(index: IndexFolder, channel: Channel) -> Iterator[tuple[ReleaseWheel, str]]:
    for entry in index.entries.values():
        if channel in ("candidate", entry.state.channel):
            for wheel in entry.release.wheels:
                yield wheel, entry.state.yanked


def _html(wheel: Wheel, yanked: str) -> dict[str, Any]:
    metadata = f"sha256={wheel.metadata}"
    attributes = {
        "data-requires-python": wheel.requires_python or None,
        "data-core-metadata": metadata,
        "data-dist-info-metadata": metadata,  # for pip before 23.1
        "data-yanked": yanked or None,
    }
    href = f"{_link(wheel, 3)}#sha256={wheel.sha256}"
    return {"href": href, "attributes": attributes, "text": wheel.name}


def _json(wheel: Wheel, yanked: str) -> dict[str, Any]:
    record: dict[str, Any] = {
        "filename": wheel.name,
        "url": _link(wheel, 3),
        "hashes": {"sha256": wheel.sha256},
        "size": wheel.size,
        "upload-time": wheel.uploaded,
        "core-metadata": {"sha256": wheel.metadata},
        "yanked": yanked or False,
    }
    if wheel.requires_python:
        record["requires-python"] = wheel.requires_python
    return record


def _link(file: ReleaseFile, depth: int) -> str:
    """Return the address of *file* on a page *depth* folders below the root."""
    # Some hosts take a plus for a blank.
    return file.url or "../" * depth + file.path.replace("+", "%2B")


def _write_page(folder: Path, title: str, links: list[dict[str, Any]]) -> None:
    page = templates.render("simple.html", title=title, links=links, version=SIMPLE_VERSION)
    _write(folder / "index.html", page.encode())


def _write(path: Path, data: bytes) -> None:
    """Write *path* whole or not at all, unless it has this content."""
    if path.exists() and path.read_bytes() == data:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, data)


def _remove_others(folder: Path, names: set[str]) -> None:
    for path in folder.iterdir() if folder.exists() else ():
        if path.is_dir() and path.name not in names:
            shutil.rmtree(path)
