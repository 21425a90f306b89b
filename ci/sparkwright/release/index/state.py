"""
What a generation remembers of what it was made from, so that the next one renders only what changed.

Nothing reads it but the generator; pip, uv and people never see it.
"""

from __future__ import annotations

import functools
from collections.abc import Container, Iterable
from pathlib import Path

import msgspec

from sparkwright.core.files import content_key, sha256_bytes, sha256_file
from sparkwright.release.manifest.records import Channel, Entry

NAME = "state.json"

#: Rooms of this package whose code and templates decide how pages look.
_ROOMS = ("index", "notes", "report")


class Row(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """
    A wheel of a release: what ``index.html`` says of it.

    Attributes:
        url: Only where another host keeps it. *missing*: ``gate state`` of everything that ``verified`` asks for.
    """

    filename: str
    sha256: str
    size: int
    project: str
    machine: str
    url: str
    missing: tuple[str, ...]


class Known(msgspec.Struct, frozen=True, gc=False):
    """
    An entry, and what was read of its records.

    Attributes:
        before: Address of the release before it, where the index has it, so that the notes say what changed; else empty.
        machines: Those that it has locks for.
        pages: Name of the folder of its pages, below ``b/<release>/``; the name follows from all that they show.
    """

    entry: Entry
    before: str
    machines: tuple[str, ...]
    rows: tuple[Row, ...]
    pages: str

    @property
    def projects(self) -> set[str]:
        return {row.project for row in self.rows}


class State(msgspec.Struct, frozen=True):
    """
    What a generation was made from.

    Attributes:
        program: See `program`. *url*: of the index; both are in every page.
        pages: Name below the generation → sha256, so that a page that a disk changed is not copied on.
    """

    program: str
    url: str
    releases: tuple[Known, ...] = ()
    pages: dict[str, str] = {}

    def encode(self) -> bytes:
        """Return it as a file: the sha256 of the rest, and the rest."""
        body = msgspec.json.encode(self, order="deterministic")
        return f"{sha256_bytes(body)}\n".encode() + body


def load(generation: Path, url: str) -> State:
    """Return what *generation* was made from; an empty state where this program cannot build on it."""
    try:
        named, _, body = (generation / NAME).read_bytes().partition(b"\n")
        found = msgspec.json.decode(body, type=State)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return State(program(), url)
    sound = named.decode("ascii", "replace") == sha256_bytes(body)
    return found if sound and (found.program, found.url) == (program(), url) else State(program(), url)


@functools.cache
def program() -> str:
    """Return the digest of what pages are made by; another program makes all of them again."""
    release = Path(__file__).parents[1]
    files = sorted(path for room in _ROOMS for path in (release / room).rglob("*") if path.suffix in (".py", ".html", ".css"))
    return content_key("index-program", [(path.relative_to(release).as_posix(), sha256_file(path)) for path in files])


def offered(releases: Iterable[Known], channel: Channel, names: Container[str]) -> dict[str, Known]:
    """
    Return those of the files *names* that the root *channel* has: name → the release that speaks for it.

    A file may be in several releases. One that is not yanked outweighs one that is, then a verified one, then the newest: so a file is
    yanked where every release that has it is.
    """
    found: dict[str, Known] = {}
    for one in releases:
        if channel == "candidate" or one.entry.channel == "verified":
            for row in one.rows:
                if row.filename in names:
                    other = found.get(row.filename)
                    if other is None or _weight(one.entry) >= _weight(other.entry):
                        found[row.filename] = one
    return found


def _weight(entry: Entry) -> tuple[bool, bool]:
    return not entry.yanked, entry.channel == "verified"
