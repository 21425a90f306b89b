"""
The simple API: PEP 503 as HTML and PEP 691 as JSON, with 592 (yank), 658 and 714 (metadata), 700 (sizes, times) and 740 (provenance).

A page is a head, one line for each file, sorted by file name, and a tail; so a page can be changed line by line, and the result is the
page that would have been made from nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from html import escape

import msgspec

from sparkwright.release.index.entries import File, Shown
from sparkwright.release.manifest import places
from sparkwright.release.manifest.records import Entry

#: PEP 792's, the newest; a client that knows 1.0 reads it all the same (PEP 629).
VERSION = "1.4"

_TOP = f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="pypi:repository-version" content="{VERSION}">
"""
_LIST = b"</h1>\n"
_END = b"</body>\n</html>\n"
_FILES, _FILES_END = b',"files":[\n', b"\n]}\n"

#: Where a line has its name, and that name its version; no name holds anything that is escaped (`records.Name`).
_HTML_NAME = re.compile(rb">([^<>]+)</a><br>\n")
_JSON_NAME = re.compile(rb'\{"filename":"([^"]+)"')

#: Steps from a project's page to the root of the index: in a channel, and in the folder of one release.
CHANNEL, RELEASE = 3, 4


class _Head(msgspec.Struct, frozen=True):
    """What a page as JSON says before its files."""

    versions: list[str]


class Line(msgspec.Struct, frozen=True, gc=False):
    """One file on the two pages of its project."""

    html: bytes
    json: bytes


def line(entry: Entry, wheel: File, shown: Shown, url: str, steps: int) -> Line:
    """
    Return the lines of *wheel*, as *entry* offers it.

    Args:
        url: Of the index: provenance is named by a whole address (PEP 740); files are, as a copy of the index needs it, relative.
        steps: See `CHANNEL` and `RELEASE`.
    """
    up = "../" * steps
    address = addressed(wheel.url, up)
    attested = next((url + places.evidence(one.sha256) for one in shown.evidence if one.kind == "pep740"), None)
    metadata = f"sha256={wheel.metadata}"
    attributes = {
        "data-requires-python": wheel.requires_python or None,
        "data-core-metadata": metadata,
        # What pip before 23.1 reads.
        "data-dist-info-metadata": metadata,
        "data-yanked": entry.yanked or None,
        "data-provenance": attested,
    }
    words = "".join(f' {name}="{escape(text)}"' for name, text in attributes.items() if text is not None)
    html = f'<a href="{escape(address)}#sha256={wheel.sha256}"{words}>{wheel.filename}</a><br>'
    about: dict[str, object] = {
        "filename": wheel.filename,
        "url": address,
        "hashes": {"sha256": wheel.sha256},
        **({"requires-python": wheel.requires_python} if wheel.requires_python else {}),
        "size": wheel.size,
        "upload-time": wheel.uploaded,
        "core-metadata": {"sha256": wheel.metadata},
        "yanked": entry.yanked or False,
        "provenance": attested,
        "_sparkwright": {
            "channel": entry.channel,
            "release": entry.name,
            "missing": [{"gate": one.gate, "state": one.state, "reference": one.reference} for one in shown.missing],
            "evidence": {one.kind: up + places.evidence(one.sha256) for one in shown.evidence},
        },
    }
    return Line(html.encode(), msgspec.json.encode(about))


def addressed(url: str, up: str) -> str:
    """
    Return *url* of a wheel as it is written on a page *up* steps below the root, or as it is where another host keeps it.

    Names of wheels (`records.Name`) need no escaping but for the plus, which some hosts take for a blank.
    """
    return url if "://" in url else up + url.replace("+", "%2B")


def html_page(project: str, before: bytes, changes: Mapping[str, Line | None]) -> bytes:
    """Return the page *before* (empty for none) with *changes*: file name → its line, or None for one that is no longer listed."""
    low = before.index(_LIST) + len(_LIST) if before else 0
    lines = {name: one.html + b"\n" if one else b"" for name, one in changes.items()}
    made = spliced(before, low, max(0, len(before) - len(_END)), lines, _HTML_NAME)
    title = f"Links for {project}"
    return b"".join([f"{_TOP}<title>{title}</title>\n</head>\n<body>\n<h1>{title}</h1>\n".encode(), *made, _END])


def json_page(project: str, before: bytes, changes: Mapping[str, Line | None]) -> bytes:
    """Return the same as `html_page`, as JSON."""
    low = before.index(_FILES) + len(_FILES) if before else 0
    lines = {name: one.json + b",\n" if one else b"" for name, one in changes.items()}
    made = [one for one in spliced(before, low, max(0, len(before) - len(_FILES_END)), lines, _JSON_NAME, b",\n") if one]
    if made:
        made[-1] = made[-1][:-2]
    versions = set(_versions(before)) if before and all(changes.values()) else None
    if versions is None:
        versions = {_version(one[1].decode()) for one in _JSON_NAME.finditer(b"".join(made))}
    found = sorted(versions | {_version(name) for name, one in changes.items() if one})
    head = msgspec.json.encode({"meta": {"api-version": VERSION}, "name": project, "versions": found})
    return b"".join([head[:-1], _FILES, *made, _FILES_END])


def _versions(page: bytes) -> list[str]:
    """Return the versions that a page of ours, as JSON, lists before its files."""
    head = msgspec.json.decode(page.partition(_FILES)[0] + b"}", type=_Head)
    return head.versions


def _version(filename: str) -> str:
    # `entries.skimmed` has seen that the name of a wheel states its version.
    return filename.split("-", 2)[1]


def spliced(
    page: bytes, low: int, high: int, changes: Mapping[str, bytes], name: re.Pattern[bytes], lost: bytes = b""
) -> list[bytes | memoryview]:
    """
    Return, in pieces, the lines of *page* between *low* and *high*, which are sorted by name, with *changes*: name → line, or nothing.

    A change is put in its place by halving what is left to look through; the other lines, of which there are thousands, are not read.

    Args:
        name: Finds the name in a line. *lost*: What the last line lacks of the end that all others have.
    """
    view, pieces = memoryview(page), list[bytes | memoryview]()

    def keep(begin: int, end: int) -> None:
        pieces.extend([view[begin:end], lost if begin < end == high else b""])

    for one in sorted(changes):
        begin, end = _place(page, low, high, one.encode(), name)
        keep(low, begin)
        pieces.append(changes[one])
        low = end
    keep(low, high)
    return pieces


def _place(page: bytes, low: int, high: int, wanted: bytes, name: re.Pattern[bytes]) -> tuple[int, int]:
    """Return where the line *wanted* begins and ends between *low* and *high*; for a line that is not there, where it belongs, twice."""
    last = high
    while low < high:
        begin = page.rfind(b"\n", low, (low + high) // 2) + 1 or low
        end = min(page.index(b"\n", begin) + 1, last)
        found = name.search(page, begin)
        assert found, "every line has a name"
        if found[1] == wanted:
            return begin, end
        low, high = (end, high) if found[1] < wanted else (low, begin)
    return low, low


def html_root(projects: Iterable[str]) -> bytes:
    """Return the list of projects as HTML."""
    links = "".join(f'<a href="{escape(name)}/">{escape(name)}</a><br>\n' for name in sorted(projects))
    return f"{_TOP}<title>Simple index</title>\n</head>\n<body>\n{links}".encode() + _END


def json_root(projects: Iterable[str]) -> bytes:
    """Return the list of projects as JSON."""
    return msgspec.json.encode({"meta": {"api-version": VERSION}, "projects": [{"name": name} for name in sorted(projects)]}) + b"\n"


def whole(lines: Mapping[str, Mapping[str, Line]]) -> dict[str, bytes]:
    """Return the files below a ``simple`` folder: project → file name → line."""
    made = {"index.html": html_root(lines), "index.json": json_root(lines)}
    for project, files in lines.items():
        made[f"{project}/index.html"] = html_page(project, b"", files)
        made[f"{project}/index.json"] = json_page(project, b"", files)
    return made
