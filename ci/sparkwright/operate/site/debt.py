"""
Patch debt: what the stacks carry, over the history of this repository, and today.

The history is read from git's objects: one walk for the changes, one process for the files, both bounded. A checkout without its history
(as CI makes one) shows as much as it has, and says so.
"""

from __future__ import annotations

import datetime
import email.utils
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from sparkwright.core import git, strict_yaml
from sparkwright.core.errors import FileError, SparkwrightError
from sparkwright.operate.site import problems
from sparkwright.operate.site.problems import Problem

#: Commits that are looked at, the newest ones. *LARGEST*: bytes of a file; a patch of ours has some kilobytes.
MOST, LARGEST = 2000, 4 << 20

_SERIES = re.compile(r"forks/([^/]+)/([^/]+)/series")
_PATCH = re.compile(r"forks/[^/]+/[^/]+/[^/]+\.patch")
_STACK = re.compile(r"forks/([^/]+)/stack\.yaml")
_LEDGER = re.compile(r"cherry_picks/[^/]+\.yaml")
_DATE = re.compile(rb"^Date: (.{1,60})$", re.M)


class Amount(msgspec.Struct, frozen=True):
    """
    What a stack carried after a commit.

    Attributes:
        day: Of the commit (UTC). *picks*: pull requests of upstream. *patches*: ours. *lines*: of our diffs.
        dates: When each of them was written, of those that say so.
    """

    day: str
    commit: str
    picks: int
    patches: int
    lines: int
    dates: tuple[str, ...] = ()

    def age(self, day: str) -> float | None:
        """Return the median age on *day*, in days; None where nothing says when it was written."""
        today = datetime.date.fromisoformat(day)
        return statistics.median((today - datetime.date.fromisoformat(date)).days for date in self.dates) if self.dates else None


class Debt(msgspec.Struct, frozen=True):
    """
    Over time.

    Attributes:
        stacks: Stack → its amounts, oldest first, one for each commit that changed it.
        partial: Why the history begins where it does; empty where it is whole.
    """

    stacks: dict[str, tuple[Amount, ...]] = {}
    partial: str = ""
    problems: tuple[Problem, ...] = ()


class _Record(msgspec.Struct, frozen=True):
    """Of a ledger's record, in whatever form it once had: where it is carried, and since when."""

    date: str = ""
    stacks: dict[str, object] = {}


class _Ledger(msgspec.Struct, frozen=True):
    records: tuple[_Record, ...] = ()


def history(root: Path) -> Debt:
    """Return the debt over the history of the checkout *root*; one that is no git repository has none, and says so."""
    try:
        shallow = git.run(["rev-parse", "--is-shallow-repository"], cwd=root)[1].strip() == b"true"
        commits = _commits(root)
    except SparkwrightError as error:
        return Debt(partial="There is no history of this repository here.", problems=(problems.of("git history", error),))
    partial = "This checkout has no older history." if shallow else f"Older than the newest {MOST} commits." if len(commits) == MOST else ""
    try:
        return _debt(root, commits, partial) if commits else Debt(partial=partial)
    except SparkwrightError as error:
        return Debt(partial=partial, problems=(problems.of("git history", error),))


def _commits(root: Path) -> list[tuple[str, str]]:
    """Return the commits that touched what stacks carry, oldest first, each with its day."""
    words = ["log", "--first-parent", f"--max-count={MOST}", "--format=%H %ct", "HEAD", "--", "forks", "cherry_picks"]
    rows = git.run(words, cwd=root)[1].decode().splitlines()
    days = ((row.split()[0], datetime.datetime.fromtimestamp(int(row.split()[1]), datetime.UTC)) for row in reversed(rows))
    return [(commit, f"{moment:%Y-%m-%d}") for commit, moment in days]


def _debt(root: Path, commits: Sequence[tuple[str, str]], partial: str) -> Debt:
    states = list(_states(root, commits))
    blobs = _Blobs(root, {blob for _, _, files in states for path, blob in files.items() if _read(path)})
    made: dict[str, list[Amount]] = {}
    wrong: dict[str, Problem] = {}
    for commit, day, files in states:
        for stack in sorted(found[1] for path in files if (found := _STACK.fullmatch(path))):
            try:
                amount = _amount(stack, commit, day, files, blobs)
            except FileError as error:
                if error.reference != "file-invalid":
                    raise
                wrong[f"{stack} at {commit[:12]}"] = problems.of(f"{stack} at {commit[:12]}", error)
                continue
            known = made.setdefault(stack, [])
            if not known or _counted(known[-1]) != _counted(amount):
                known.append(amount)
    return Debt({stack: tuple(amounts) for stack, amounts in made.items()}, partial, tuple(wrong.values()))


def _counted(one: Amount) -> tuple[object, ...]:
    return one.picks, one.patches, one.lines, one.dates


def _read(path: str) -> bool:
    return any(form.fullmatch(path) for form in (_SERIES, _PATCH, _LEDGER))


def _states(root: Path, commits: Sequence[tuple[str, str]]) -> Iterator[tuple[str, str, dict[str, str]]]:
    """Yield each commit with its day and its files: path → blob id."""
    first = commits[0][0]
    out = git.run(["ls-tree", "-r", "-z", "--full-tree", first, "forks", "cherry_picks"], cwd=root)[1]
    files = {row.partition("\t")[2]: row.split()[2] for row in out.decode("utf-8", "replace").split("\0") if row}
    changed = dict(_changes(root, len(commits)))
    for commit, day in commits:
        if commit != first:
            for path, blob in changed.get(commit, ()):
                files = {**{name: one for name, one in files.items() if name != path}, **({path: blob} if blob.strip("0") else {})}
        yield commit, day, dict(files)


def _changes(root: Path, count: int) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Yield each commit with what it changed: paths, and the blob that each then is (zeros for none)."""
    words = ["log", "--first-parent", "-m", "--raw", "--no-abbrev", "--no-renames", "-z", f"--max-count={count}", "--format=%x01%H"]
    out = git.run([*words, "HEAD", "--", "forks", "cherry_picks"], cwd=root)[1].decode("utf-8", "replace")
    for entry in out.split("\x01")[1:]:
        commit, _, rest = entry.partition("\0")
        parts = rest.strip("\n").split("\0")
        rows = [(parts[at + 1], parts[at].split()[3]) for at in range(0, len(parts) - 1, 2) if parts[at].lstrip("\n").startswith(":")]
        yield commit.strip(), rows


class _Blobs:
    """Files by their ids, read once, each in one pass of git."""

    def __init__(self, root: Path, wanted: Iterable[str]) -> None:
        self._data = dict(_batch(root, sorted(wanted)))
        self._ledgers: dict[str, _Ledger] = {}

    def data(self, blob: str, path: str) -> bytes:
        """Return a file; raise `file-invalid` for one that is larger than any of ours, or not there."""
        if blob not in self._data:
            raise FileError("file-invalid", f"{path} is larger than {LARGEST} bytes, or not in this checkout.")
        return self._data[blob]

    def ledger(self, blob: str, path: str) -> _Ledger:
        if blob not in self._ledgers:
            self._ledgers[blob] = strict_yaml.parse(self.data(blob, path).decode("utf-8", "replace"), _Ledger, path)
        return self._ledgers[blob]


def _batch(root: Path, blobs: Sequence[str]) -> Iterator[tuple[str, bytes]]:
    asked = "".join(f"{blob}\n" for blob in blobs).encode()
    sizes = git.run(["cat-file", "--batch-check=%(objectname) %(objecttype) %(objectsize)"], cwd=root, stdin=asked)[1].decode()
    small = [row.split()[0] for row in sizes.splitlines() if row.split()[1] == "blob" and int(row.split()[2]) <= LARGEST]
    out = git.run(["cat-file", "--batch"], cwd=root, stdin="".join(f"{blob}\n" for blob in small).encode())[1] if small else b""
    at = 0
    while at < len(out):
        head, _, _ = out[at : at + 200].partition(b"\n")
        name, _, size = head.decode().split()
        begin = at + len(head) + 1
        yield name, out[begin : begin + int(size)]
        at = begin + int(size) + 1


def _amount(stack: str, commit: str, day: str, files: Mapping[str, str], blobs: _Blobs) -> Amount:
    """Return what *stack* carries in *files*; raises `file-invalid` where a ledger of then cannot be read."""
    names = [f"forks/{stack}/{fork}/{name}" for fork, name in _listed(stack, files, blobs)]
    ours = [blobs.data(files[name], name) for name in names if name in files]
    picks = [
        record
        for path, blob in files.items()
        if _LEDGER.fullmatch(path) and not path.endswith("/ideas.yaml")
        for record in blobs.ledger(blob, path).records
        if stack in record.stacks
    ]
    dates = [*map(_written, ours), *(_day(record.date) for record in picks)]
    told = tuple(sorted(date.isoformat() for date in dates if date))
    return Amount(day, commit, len(picks), len(ours), sum(map(_lines, ours)), told)


def _listed(stack: str, files: Mapping[str, str], blobs: _Blobs) -> Iterator[tuple[str, str]]:
    for path, blob in files.items():
        found = _SERIES.fullmatch(path)
        if found and found[1] == stack:
            for row in blobs.data(blob, path).decode("utf-8", "replace").splitlines():
                if name := row.partition("#")[0].strip():
                    yield found[2], name


def _lines(patch: bytes) -> int:
    """Return the lines of the diff, counted as `cherry_picks.status` counts them: without the header, whose length is no debt."""
    _, found, diff = (b"\n" + patch).partition(b"\ndiff --git ")
    return (found + diff).lstrip(b"\n").count(b"\n")


def _written(patch: bytes) -> datetime.date | None:
    found = _DATE.search(patch[:4096])
    return _or_none(lambda: email.utils.parsedate_to_datetime(found[1].decode("ascii")).date()) if found else None


def _day(text: str) -> datetime.date | None:
    return _or_none(lambda: datetime.date.fromisoformat(text))


def _or_none(read: Callable[[], datetime.date]) -> datetime.date | None:
    try:
        return read()
    except (ValueError, UnicodeDecodeError):
        return None
