"""
The pages of an index, generated from its signed releases: for people, and for pip and uv.

`simple/<channel>/` is the simple API as HTML (PEP 503), with yanks (592) and METADATA (658, 714).
The pages carry no signature. They are written after the
signed metadata; what a killed run left old, the next command writes again.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from sparkwright.client.records import CHANNELS, Channel, ReleaseFile, ReleaseWheel
from sparkwright.core.console import size
from sparkwright.core.store import write_file
from sparkwright.release import release_notes
from sparkwright.release.repository import ClientWheel, IndexEntry, IndexFolder

#: The version of the simple API (PEP 629).
SIMPLE_VERSION = "1.0"
#: The project of the client.
CLIENT = "sparkwright-install"

Wheel = ReleaseWheel | ClientWheel


def write(index: IndexFolder) -> None:
    """Write all pages of *index*, and remove those of what is no longer in it."""
    folder, entries = index.folder, index.entries
    for name, entry in entries.items():
        _write_release(index, folder / "releases" / name / "index.html", entry)
    newest = list(entries.values())[::-1]
    front = release_notes.template("index.html").render(
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
    _write(folder / "index.html", front)
    for channel in CHANNELS:
        projects = _write_simple(folder / "simple" / channel, index, channel)
        _remove_others(folder / "simple" / channel, projects)
    _remove_others(folder / "releases", set(entries))


def _write_release(index: IndexFolder, path: Path, entry: IndexEntry) -> None:
    before = index.entries.get(entry.release.before)
    page = release_notes.template("release.html").render(
        title=entry.release.name,
        state=entry.state,
        url=index.facts.url,
        link=lambda file: _link(file, 2),
        **release_notes.view(entry.release, before.release if before else None),
    )
    _write(path, page)


def _write_simple(folder: Path, index: IndexFolder, channel: Channel) -> set[str]:
    """Write the simple API of *channel*, and return its projects."""
    projects: dict[str, dict[str, tuple[Wheel, str]]] = {}
    if clients := index.facts.clients:
        projects[CLIENT] = {wheel.name: (wheel, "") for wheel in clients}
    for entry in index.entries.values():
        for wheel in entry.release.wheels if channel in ("candidate", entry.state.channel) else ():
            earlier = projects.setdefault(wheel.project, {}).get(wheel.name)
            # A wheel of several releases is yanked only with all of them.
            reason = entry.state.yanked if earlier is None or earlier[1] else ""
            projects[wheel.project][wheel.name] = (wheel, reason)
    links = [{"href": f"{name}/", "attributes": {}, "text": name} for name in sorted(projects)]
    _write_page(folder, "Simple index", links)
    for project, offered in projects.items():
        links = [_html(*offered[name]) for name in sorted(offered)]
        _write_page(folder / project, f"Links for {project}", links)
    return set(projects)


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


def _link(file: ReleaseFile, depth: int) -> str:
    """Return the address of *file* on a page *depth* folders below the root."""
    # Some hosts take a plus for a blank.
    return file.url or "../" * depth + file.path.replace("+", "%2B")


def _write_page(folder: Path, title: str, links: list[dict[str, Any]]) -> None:
    page = release_notes.template("simple.html").render(
        title=title, links=links, version=SIMPLE_VERSION
    )
    _write(folder / "index.html", page)


def _write(path: Path, page: str) -> None:
    """Write *path* whole or not at all, unless it has this content."""
    data = page.encode()
    if not path.exists() or path.read_bytes() != data:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, data)


def _remove_others(folder: Path, names: set[str]) -> None:
    for path in folder.iterdir() if folder.exists() else ():
        if path.is_dir() and path.name not in names:
            shutil.rmtree(path)
