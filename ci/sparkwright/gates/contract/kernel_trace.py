"""
The kernels that a profiler saw, by name: what ran, where a log only says what was meant to.

Three forms are read: a trace of torch's profiler (JSON, packed or not; vLLM writes one when it is told to profile), the table of kernels
that ``nsys stats`` prints as CSV, and the database that ``nsys export`` makes.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import json
import sqlite3
import zlib
from collections import Counter
from pathlib import Path

import msgspec

from sparkwright.bench.server.client import Client

#: Bytes of a profile, unpacked; a second of serving gives some tens of megabytes.
LARGEST = 256 * 1024 * 1024
#: Different names that are kept.
MOST = 100_000


class ProfileInvalid(Exception):
    """The file is no profile of a known form; *says* tells why."""

    def __init__(self, says: str) -> None:
        self.says = says
        super().__init__(says)


def flags(folder: Path) -> tuple[str, ...]:
    """Return the arguments with which a server of vLLM 0.20 or later can be told to write profiles to *folder*."""
    # Without the calls of Python, of which there are a hundred for each kernel, and without the process that only takes requests.
    wanted = {"profiler": "torch", "torch_profiler_dir": str(folder), "torch_profiler_with_stack": False, "ignore_frontend": True}
    return ("--profiler-config", json.dumps(wanted))


def take(client: Client, folder: Path) -> Path:
    """
    Return a profile of one short completion, written to *folder* by a server that was started with `flags`.

    Raises:
        ServerInvalid: The server does not profile, or does not answer.
        ProfileInvalid: It wrote nothing.
    """
    there = set(folder.rglob("*.json*"))
    with client.profile():
        client.complete("One, two, three,", max_tokens=4, ignore_eos=True)
    # The processes that run the model are named by their rank; the one that takes requests has a profile of its own.
    new = sorted(path for path in set(folder.rglob("*.json*")) - there if "async_llm" not in path.name)
    if not new:
        raise ProfileInvalid("the server wrote no profile")
    return new[0]


class _Event(msgspec.Struct):
    name: object = ""
    cat: object = ""


class _Trace(msgspec.Struct):
    traceEvents: list[_Event]  # noqa: N815  the trace's own name


def kernels(profile: Path, kinds: frozenset[str] = frozenset({"kernel"})) -> Counter[str]:
    """
    Return how often each kernel ran.

    Args:
        kinds: Categories of torch's events that count; on a CPU there are no kernels but operators, ``cpu_op``.

    Raises:
        ProfileInvalid: The file cannot be read, is too large, or has none of the three forms.
    """
    try:
        if not profile.is_file():
            raise OSError("it is no file")
        with profile.open("rb") as source:
            begin = source.read(16)
        if begin.startswith(b"SQLite format 3\0"):
            return _database(profile)
        data = _read(profile, packed=begin.startswith(b"\x1f\x8b"))
    except (OSError, EOFError, zlib.error) as error:
        raise ProfileInvalid(f"it cannot be read: {error}") from None
    return _trace(data, kinds) if data.lstrip()[:1] in (b"{", b"[") else _table(data)


def _read(profile: Path, *, packed: bool) -> bytes:
    with gzip.open(profile) if packed else profile.open("rb") as source:
        data = source.read(LARGEST + 1)
    if len(data) > LARGEST:
        raise ProfileInvalid(f"it has more than {LARGEST} bytes")
    return bytes(data)


def _trace(data: bytes, kinds: frozenset[str]) -> Counter[str]:
    try:
        events = msgspec.json.decode(data, type=_Trace).traceEvents
    except (ValueError, RecursionError) as error:
        raise ProfileInvalid(f"it is no trace of torch's profiler: {error}") from None
    return Counter(event.name for event in events if event.cat in kinds and isinstance(event.name, str))


def _table(data: bytes) -> Counter[str]:
    rows = csv.reader(io.StringIO(data.decode("utf-8", "replace")))
    found: Counter[str] = Counter()
    try:
        # nsys says what it does before the table begins.
        head = next((row for row in rows if "Name" in row and "Instances" in row), None)
        if head is None:
            raise ProfileInvalid("it is no trace of torch's profiler, no database of nsys, and no table with Name and Instances")
        name, count = head.index("Name"), head.index("Instances")
        for row in rows:
            if len(row) == len(head) and row[count].isdecimal() and len(row[count]) < 16 and len(found) < MOST:
                found[row[name]] += int(row[count])
    except csv.Error as error:
        raise ProfileInvalid(f"its table cannot be read: {error}") from None
    return found


def _database(profile: Path) -> Counter[str]:
    query = (
        "SELECT s.value, count(*) FROM CUPTI_ACTIVITY_KIND_KERNEL k JOIN StringIds s ON s.id = k.demangledName GROUP BY s.value LIMIT ?"
    )
    try:
        with contextlib.closing(sqlite3.connect(f"{profile.absolute().as_uri()}?mode=ro&immutable=1", uri=True)) as database:
            # A damaged database may send a query round in circles; 100 million steps take some seconds.
            steps = iter(range(1000))
            database.set_progress_handler(lambda: next(steps, None) is None, 100_000)
            return Counter({str(name): int(count) for name, count in database.execute(query, (MOST,))})
    except (sqlite3.Error, ValueError) as error:
        raise ProfileInvalid(f"its database cannot be read: {error}") from None
