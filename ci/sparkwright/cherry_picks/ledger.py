"""
The ledger: ``cherry_picks/<fork>.yaml``, one record per upstream pull request that we carry or
watch.

A record is a pointer and pins, never the diff: which commits, and what their diff hashes to when it
is rendered in our one way. A field whose value is not known is ``unresolved``; the pins of a record
that a stack carries must not be.
"""

import datetime
from collections import Counter
from pathlib import Path
from typing import Annotated, Literal, Self

import msgspec

from sparkwright.core import strict_yaml
from sparkwright.core.store import UNFINISHED, write_file
from sparkwright.forks.stack import UNRESOLVED, ObjectId

Day = Annotated[str, msgspec.Meta(pattern=r"\A([0-9]{4}-[0-9]{2}-[0-9]{2}|never|unresolved)\Z")]


class PickRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """
    An upstream pull request.

    Attributes:
        state: As it was when it was last *seen* (a day, UTC, or ``never``); git does not show
            whether an unmerged one is closed, and ``unresolved`` stands for that.
        date: The day (UTC) of the commit whose tree has it: of *merge*, else of *head*.
        head: The commit that its author pushed last.
        base: The commit that the diff is taken against: the parent of *merge*, or where *head* left
            the target branch.
        merge: The commit that brought it into the target branch; empty when none did.
        sha256, patch_id: Of its diff as `patch.render` gives it; the patch-id of an empty diff is
            empty.
        files: Paths that the diff touches.
        reason: Why we carry or watch it.
        drop_when: What has to be true for the record's patch to go.
        stacks: The stacks that carry it, each with the files (``PATH``) and hunks
            (``PATH#NUMBER``) of the diff that it leaves out, and why.
    """

    number: Annotated[int, msgspec.Meta(ge=1)]
    title: str
    author: str
    state: Literal["open", "merged", "closed", "unresolved"]
    seen: Day
    date: Day
    head: ObjectId
    base: ObjectId
    sha256: Annotated[str, msgspec.Meta(pattern=r"\A([0-9a-f]{64}|unresolved)\Z")]
    patch_id: Annotated[str, msgspec.Meta(pattern=r"\A([0-9a-f]{40}|unresolved|)\Z")]
    reason: strict_yaml.Prose
    drop_when: strict_yaml.Prose
    merge: Annotated[str, msgspec.Meta(pattern=r"\A([0-9a-f]{40}|)\Z")] = ""
    files: tuple[str, ...] = ()
    stacks: dict[str, dict[str, strict_yaml.Prose]] = {}

    def __post_init__(self) -> None:
        for day in {self.seen, self.date} - {"never", UNRESOLVED}:
            datetime.date.fromisoformat(day)
        if self.stacks and UNRESOLVED in (self.base, self.sha256, self.patch_id, self.tip):
            raise ValueError(
                f"#{self.number} is carried by {', '.join(self.stacks)}, but its diff is not pinned"
            )

    @property
    def name(self) -> str:
        return f"#{self.number}"

    @property
    def tip(self) -> str:
        """The commit whose tree has the change: *merge* of a merged one, else *head*."""
        return self.merge or self.head

    def dropped_by(self, stack: str) -> Self:
        """Return the record, not carried by *stack*."""
        stacks = {name: paths for name, paths in self.stacks.items() if name != stack}
        return msgspec.structs.replace(self, stacks=stacks)


class Ledger(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    The pull requests of one upstream.

    Attributes:
        url: The repository, as the stacks' locks call it.
        branch: The branch that pull requests are merged into.
        records: In the order in which stacks apply them.
    """

    url: Annotated[str, msgspec.Meta(min_length=1)]
    branch: str = "main"
    records: tuple[PickRecord, ...] = ()

    def __post_init__(self) -> None:
        names = Counter(record.name for record in self.records)
        if twice := names - Counter(set(names)):
            raise ValueError(f"listed twice: {', '.join(sorted(twice))}")

    @property
    def by_number(self) -> dict[int, PickRecord]:
        """The records by the numbers of their pull requests."""
        return {record.number: record for record in self.records}

    def carried(self, stack: str) -> tuple[PickRecord, ...]:
        """Return the records that *stack* carries, in order."""
        return tuple(record for record in self.records if stack in record.stacks)

    def with_record(self, record: PickRecord) -> Self:
        """Return the ledger with *record* in its old place, or at the end."""
        records = self.by_number | {record.number: record}
        return msgspec.structs.replace(self, records=tuple(records.values()))

    def page(self, number: int) -> str:
        """Return the address where people read about pull request *number*."""
        return f"{self.url.removesuffix('.git')}/pull/{number}"


def path_of(root: Path, fork: str) -> Path:
    """Return the file of the ledger of *fork* in the checkout *root*."""
    return root / "cherry_picks" / f"{fork}.yaml"


def load_ledger(root: Path, fork: str) -> Ledger:
    """
    Return the ledger of *fork*; one without an address and records if it has none.

    Raises:
        file-invalid: It is damaged, lists a pull request twice, or lets a stack carry one that is
            not pinned.
    """
    path = path_of(root, fork)
    return strict_yaml.load(path, Ledger) if path.exists() else Ledger("")


def render(ledger: Ledger) -> str:
    """Return the text of the file: records as blocks, defaults left out."""
    return (
        "# Pins of upstream pull requests; `sparkwright patch pick` writes them, people write "
        "reasons.\n" + strict_yaml.dump(ledger).replace("\n- ", "\n\n- ")
    )


def write_reviewed(path: Path, data: bytes) -> None:
    """
    Write *data* to the reviewed file *path*, whole or not at all, and remove what killed runs left
    beside it; the caller holds the checkout (`Project.editing`).
    """
    for left in path.parent.glob(f"{UNFINISHED}*"):
        left.unlink(missing_ok=True)
    write_file(path, data)
