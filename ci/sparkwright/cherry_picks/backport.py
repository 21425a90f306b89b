"""
Backports: picks that a stack carries in part, with a patch of ours in place of what does not apply.

The ledger names what is left out of a pick, files (``PATH``) or hunks (``PATH#NUMBER``), each with
the reason. A patch of ours replaces it where its header has a line ``Backport-Of: #NUMBER SHA256``;
the hash is that of the pinned diff, so that a backport never outlives the state that it was made
from.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

import msgspec

from sparkwright.cherry_picks.errors import PatchError
from sparkwright.cherry_picks.ledger import Ledger, Record
from sparkwright.cherry_picks.patch import Patch, sections

_TRAILER = re.compile(r"^Backport-Of: #([1-9][0-9]{0,8}) ([0-9a-f]{64})$", re.MULTILINE)


class Backport(msgspec.Struct, frozen=True):
    """
    A pick that is not carried as it is, held against its original.

    Attributes:
        hunks: The hunks of the original, of which as many are applied unchanged as *unchanged*.
        left_out: Files and hunks that are left out, each with the reason.
        patches: The names of our patches in their place.
        lines: The added lines of the original, of which *standing* are added here.
        further: The lines that only our patches add.
    """

    name: str
    title: str
    merge: str
    hunks: int
    unchanged: int
    left_out: dict[str, str]
    patches: tuple[str, ...]
    lines: int
    standing: int
    further: int


def original(patch: Patch) -> tuple[int, str]:
    """Return the pull request that *patch* is a backport of, and its diff's hash; 0 for none."""
    match = _TRAILER.search(patch.text)
    return (int(match[1]), match[2]) if match else (0, "")


def check(book: Ledger | None, stack: str, patches: Sequence[Patch]) -> None:
    """
    Check that the backports among *patches*, the series of *stack*, belong to picks as the ledger
    pins them.

    Raises:
        backport-stale: A backport is of a pull request that is not carried, or of another state of
            it, or changes files that it does not; or a pick leaves everything out and has none.
    """
    carried = {record.number: record for record in (book.carried(stack) if book else ())}
    missing = carried.keys() - {patch.pick for patch in patches}
    for patch in patches:
        number, sha256 = original(patch)
        record = carried.get(number)
        if not number:
            continue
        missing -= {number}
        fault = ""
        if not record:
            fault = f"the stack does not carry #{number}"
        elif record.sha256 != sha256:
            fault = f"it was made from the diff {sha256[:16]}…, pinned is {record.sha256[:16]}…"
        elif foreign := sorted(set(patch.files) - set(record.files)):
            fault = f"#{number} does not change {', '.join(foreign)}"
        if fault:
            what = f"{patch.name} does not correspond to the pull request."
            raise PatchError("backport-stale", what, details=[fault])
    if missing:
        names = ", ".join(f"#{number}" for number in sorted(missing))
        what = f"The stack leaves out all of {names}, and no patch is in its place."
        raise PatchError("backport-stale", what)


def compare(
    record: Record, stack: str, diff: bytes, pick: Patch, ours: Sequence[Patch]
) -> Backport:
    """
    Return how *stack* carries *record*.

    Args:
        diff: The whole diff that the record pins.
        pick: What is applied of it.
        ours: Our patches of the stack.
    """
    patches = [patch for patch in ours if original(patch)[0] == record.number]
    wanted, unchanged = _added(diff), _added(pick.data)
    present = sum((_added(patch.data) for patch in patches), unchanged)
    return Backport(
        record.name,
        record.title,
        record.merge,
        sum(len(part.hunks) for part in sections(diff)),
        sum(len(part.hunks) for part in sections(pick.data)),
        dict(record.stacks[stack]),
        tuple(patch.name for patch in patches),
        wanted.total(),
        (wanted & present).total(),
        (present - wanted).total(),
    )


def _added(diff: bytes) -> Counter[tuple[str, bytes]]:
    """Return the lines that *diff* adds, by file."""
    return Counter(
        (part.path, line)
        for part in sections(diff)
        for hunk in part.hunks
        for line in (Counter(hunk.after) - Counter(hunk.before)).elements()
    )
