"""
What people, pip and uv read of an index: pages, made from its signed records.

Pages state what records prove. What was not measured or not looked up is written so, and never
counts for the fork. `simple/<channel>/` is the simple API as HTML (PEP 503), with yanks (592)
and METADATA (658, 714). The pages carry no signature. They are written after the signed metadata;
what a killed run left old, the next command writes again.
"""

import functools
import shutil
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkwright.bench.records import METRICS
from sparkwright.client.records import (
    CHANNELS,
    Channel,
    Missing,
    Release,
    ReleaseFile,
    ReleasePatch,
    Speed,
)
from sparkwright.core import pages
from sparkwright.core.console import size
from sparkwright.core.store import write_file

if TYPE_CHECKING:
    from jinja2 import Template

    from sparkwright.release.repository import IndexFolder

#: The project of the client.
CLIENT = "sparkwright-install"


@functools.cache
def template(name: str) -> "Template":
    """Return a template of the pages."""
    return pages.environment("sparkwright.release").get_template(name)


def write(index: "IndexFolder") -> None:
    """Write all pages of *index*, and remove those of releases and wheels that it no longer has."""
    folder, entries = index.folder, index.entries
    for name, entry in entries.items():
        earlier = entries.get(entry.release.before)
        _write(
            folder / "releases" / name,
            "release.html",
            title=name,
            state=entry.state,
            url=index.facts.url,
            **view(entry.release, earlier.release if earlier else None),
        )
    _write(
        folder,
        "index.html",
        title="Wheels for DGX Spark",
        fingerprint=index.fingerprint,
        url=index.facts.url,
        project=CLIENT,
        clients=index.facts.clients,
        channels=CHANNELS,
        entries=entries.values(),
        size_of=size,
    )
    for channel in CHANNELS:
        _write_simple(folder / "simple" / channel, index, channel)
    _remove_others(folder / "releases", entries)


def _write_simple(folder: Path, index: "IndexFolder", channel: Channel) -> None:
    """Write the simple API of *channel*, and remove the pages of projects that it lacks."""
    projects = defaultdict[str, dict[str, tuple[ReleaseFile, str]]](dict)
    for client in index.facts.clients:
        projects[CLIENT][client.name] = (client, "")
    for entry in index.entries.values():
        for wheel in entry.release.wheels if channel in ("candidate", entry.state.channel) else ():
            _, earlier = projects[wheel.project].get(wheel.name, (wheel, "not offered yet"))
            # A wheel of several releases is yanked only with all of them.
            projects[wheel.project][wheel.name] = (wheel, earlier and entry.state.yanked)
    _write(folder, "simple.html", title="Simple index", projects=projects)
    for project, wheels in projects.items():
        _write(folder / project, "simple.html", title=f"Links for {project}", wheels=wheels)
    _remove_others(folder, projects)


def _link(file: ReleaseFile, depth: int) -> str:
    """Return the address of *file* on a page *depth* folders below the root."""
    # Some hosts take a plus for a blank.
    return file.url or "../" * depth + file.path.replace("+", "%2B")


def _write(folder: Path, name: str, **content: Any) -> None:
    """
    Write the page of *folder*, by the template *name*, whole or not at all, unless it has this
    content.
    """
    path, data = folder / "index.html", template(name).render(link=_link, **content).encode()
    if not path.exists() or path.read_bytes() != data:
        folder.mkdir(parents=True, exist_ok=True)
        write_file(path, data)


def _remove_others(folder: Path, names: Collection[str]) -> None:
    for path in folder.iterdir() if folder.exists() else ():
        if path.is_dir() and path.name not in names:
            shutil.rmtree(path)


def view(release: Release, before: Release | None) -> dict[str, Any]:
    """Return what the page of *release* shows; *before* is the one of the stack before it."""
    return {
        "release": release,
        "before": before,
        "patches": list(_patches(release, before)),
        "summary": _summary(release),
        "metrics": METRICS,
        "size_of": size,
        "reasons": reasons,
    }


def reasons(missing: Iterable[Missing]) -> dict[str, list[str]]:
    """Return each kind of reason why a wheel is not for ``verified``, with its gates."""
    groups = defaultdict[str, list[str]](list)
    for entry in missing:
        gates = groups[f"{entry.state} ({entry.reference})"]
        if entry.gate not in gates:
            gates.append(entry.gate)
    return groups


def _patches(release: Release, before: Release | None) -> Iterator[tuple[str, ReleasePatch, str]]:
    """Yield every patch with its fork and its change since *before*, and those that are gone."""
    now, then = _by_name(release), _by_name(before) if before else {}
    for key, patch in now.items():
        change = "added" if before else "carried"
        if key in then:
            change = "unchanged" if then[key].sha256 == patch.sha256 else "changed"
        yield key[0], patch, change
    for key in sorted(then.keys() - now.keys()):
        yield key[0], then[key], "dropped"


def _by_name(release: Release) -> dict[tuple[str, str], ReleasePatch]:
    """Return the patches of *release* by fork and name."""
    return {(fork.name, patch.name): patch for fork in release.forks for patch in fork.patches}


def _summary(release: Release) -> str:
    """Return whether it is faster than the stock wheel, in a sentence that the records prove."""
    bases = {fork.name: fork.base for fork in release.forks}
    for wheel in release.wheels:
        base = bases.get(wheel.fork, "")
        gains = [_gain(speed) for speed in wheel.proof.speeds if speed.ratio is not None]
        if base and base[:12] in wheel.proof.baseline and gains:
            return (
                f"{wheel.project} against the stock wheel: faster in {gains.count(1)}, slower in "
                f"{gains.count(-1)} of {len(gains)} measured figures."
            )
    return "It was not shown that this release is faster than the stock wheel."


def _gain(speed: Speed) -> int:
    """Return 1 if the 95 % interval of *speed* is of a faster wheel, -1 of a slower one, else 0."""
    if speed.metric not in METRICS or not speed.low or not speed.high:
        return 0
    higher = (speed.low > 1) - (speed.high < 1)
    return higher if METRICS[speed.metric][3] else -higher
