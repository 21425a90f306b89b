"""
Patches: ours, as ``git format-patch`` writes them, and the diffs of the pull requests that we
carry.

git applies them. This module reads them, because git lets pass what a build must refuse: links,
submodules, paths outside of the tree (git-apply(1)), and sections that were cut off. The conflict
report needs the hunks, too.
"""

import contextlib
import email.policy
import re
from collections import Counter
from collections.abc import Collection, Mapping
from email.errors import HeaderParseError
from email.header import decode_header, make_header
from email.parser import HeaderParser
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import ClassVar

import msgspec

from sparkwright.core.errors import Advice, SparkwrightError
from sparkwright.core.files import list_folder, sha256_bytes
from sparkwright.core.git import SUBMODULE, Objects

#: What upstream knows of a change; the vocabulary is Yocto's, less what does not apply to a fork.
STATUSES = ("Pending", "Submitted", "Backport", "Inappropriate", "Denied")
TRAILERS = ("Upstream-Status", "Reason", "Drop-When")

#: Every flag that a configuration or a newer git could set otherwise (git-diff(1)).
FLAGS = (
    "-r",
    "-p",
    "--binary",
    "--full-index",
    "--no-renames",
    "--no-color",
    "--no-ext-diff",
    "--no-textconv",
    "--no-relative",
    "--src-prefix=a/",
    "--dst-prefix=b/",
    "--diff-algorithm=myers",
    "--no-indent-heuristic",
    "--inter-hunk-context=0",
    "--ignore-submodules=none",
    "--submodule=short",
)

#: Context of the patches that we write: the smallest that git accepts.
CONTEXT = 1
#: Share of the lines of a change that a revert of it takes back at least. Of 56 reverts in vLLM's
#: history up to 2026-08 that name one pull request, 50 take back as much.
REVERTED = 0.9

#: A line of a series: a name, an option of quilt that says how we strip paths anyway, a comment.
_ENTRY = re.compile(r"^[^\S\n]*([^#\s][^#\n]*?)(?:\s+-p(?:1|ab))?[^\S\n]*(?:#.*)?$", re.MULTILINE)
_TRAILER = re.compile(rf"^({'|'.join(TRAILERS)}): +(\S.*)$", re.MULTILINE)
_BODY = re.compile(rb"^(@@ |GIT binary patch|Binary files )", re.MULTILINE)
_FIELD = re.compile(
    rb"^(--- |(?:rename|copy) (?:from|to) |(?:new|deleted) file mode |new mode |index )(.*)$",
    re.MULTILINE,
)
_HUNK = re.compile(rb"@@ -(\d{1,9})(?:,(\d{1,9}))? \+(\d{1,9})(?:,(\d{1,9}))? @@")
#: The last word, a mode, is missing where the mode changes.
_INDEX = re.compile(rb"([0-9a-f]{7,40})\.\.([0-9a-f]{7,40})(?: \d{6})?\r?$")
#: The abbreviated id of an empty file, and of no file.
_EMPTY = re.compile(rb"e69de29|0+$")
#: A path as git quotes it.
_QUOTED = re.compile(rb'"(?:[^"\\]|\\(?:[0-3][0-7]{2}|["\\abfnrtv]))*"')
#: The field that says what a patch changes on purpose, and for which recipes.
_CHANGE = re.compile(
    r"Changes: (?P<what>kernels|distributions) / (?P<recipes>[\w.*?-]+)"
    r"(?:: (?P<layer>(?:prefill|decode) \w+))? / (?P<why>\S.*)"
)
#: What git puts before a subject.
_PREFIX = re.compile(r"\[[^]]*PATCH[^]]*\]")
#: A line of a hunk, and the mark of a missing line end. Some programs remove the blank of an empty
#: line; git takes it as context, too.
_LINE = re.compile(rb"(?:([ +-])([^\n]*\n)|\n)(\\[^\n]*\n?)?")


class PatchError(SparkwrightError):
    """A patch, a pick or a series cannot be used."""

    references: ClassVar[Mapping[str, Advice]] = {
        "backport-stale": Advice(
            "A patch in place of a part of a pull request was made from another state than "
            "the ledger pins, or the stack does not carry that pull request.",
            "Compare the two, correct the patch with `sparkwright patch rebase`, and write "
            "the pinned sha256 into `Backport-Of: #NUMBER SHA256`.",
        ),
        "export-mismatch": Advice(
            "The files of the series are not what its commits give: edited by hand, or made by "
            "another tool.",
            "Run `sparkwright patch rebase` and `sparkwright patch export`, read what they "
            "change, and commit it.",
        ),
        "patch-already-upstream": Advice(
            "The base has this change already: upstream took it, or an earlier patch does "
            "the same.",
            "Drop it, naming the upstream commit or release: remove the stack from the ledger's "
            "record, or the file from the series.",
        ),
        "patch-conflict": Advice(
            "The pinned source differs from the one that the patch was made for; no fuzz and no "
            "3-way merge are used here.",
            "Read the report above; then make the patch again: `sparkwright patch rebase`, "
            "and `sparkwright patch export` when it applies.",
        ),
        "patch-invalid": Advice(
            "A patch file cannot be read as one, or its header lacks a trailer that says why it "
            "exists and until when.",
            "Export it again, or add the missing trailer.",
        ),
        "patch-lost": Advice(
            "The worktree has no commit for a patch of the series: it was dropped while "
            "rebasing, perhaps silently by git.",
            "If it is to go, say so with --drop NAME; if not, put its commit back in the worktree.",
        ),
        "patch-no-effect": Advice(
            "The patch leaves the tree as it was: upstream has it already, or an earlier patch "
            "does the same.",
            "Drop the patch, and say in the changelog which upstream release took it.",
        ),
        "pick-mismatch": Advice(
            "The ledger's record and the pull request disagree: edited by hand, a replaced "
            "repository, or a record that was never pinned.",
            "Do not build from it. Compare with the pull request, then run "
            "`sparkwright patch pick` for it.",
        ),
        "pick-moved": Advice(
            "The author pushed to the pull request, perhaps with force. What stacks carry is "
            "still the pinned state.",
            "Read the difference at the address above. Take the new state with `sparkwright "
            "patch pick NUMBER --accept`, or leave everything as it is.",
        ),
        "pull-request-gone": Advice(
            "The pull request was deleted or never existed, or its repository is private, "
            "renamed or gone.",
            "Compare number and repository with the ledger. What was deleted may still be in"
            " a mirror, by the commit that the ledger names.",
        ),
        "rebase-unfinished": Advice(
            "A rebase is under way in the worktree: a patch conflicts and waits for you, or "
            "changes are not committed.",
            "Finish it with git in the worktree (git am --continue), then `sparkwright patch "
            "export`; or give it up: `sparkwright patch rebase --abort`.",
        ),
    }


class Hunk(msgspec.Struct, frozen=True):
    """
    A hunk.

    Attributes:
        label: Its header, with the surrounding function as git shows it.
        start, new_start: First line, from 1, of the replaced lines and of their replacement.
        before, after: The replaced lines and their replacement, with context and line ends.
        last: No context follows the change, so git expects the end of the file there.
    """

    label: str
    start: int
    new_start: int
    before: tuple[bytes, ...]
    after: tuple[bytes, ...]
    last: bool = False

    def fitting_lines(self, text: bytes, *, done: bool = False) -> list[int]:
        """
        Return every line of *text*, from 1, at which git could apply the hunk (apply.c).

        Args:
            done: Look for the replacement instead of the replaced lines.
        """
        wanted, fits, at = b"".join(self.after if done else self.before), list[int](), 0
        first = (self.new_start if done else self.start) == 1
        for number, line in enumerate(lines_of(text) if wanted else (), 1):
            # Bytes are compared before lines: a long file of equal lines would take hours.
            if text.startswith(wanted, at) and not (first and at):
                end = at + len(wanted)
                if end == len(text) or (wanted.endswith(b"\n") and not self.last):
                    fits.append(number)
            at += len(line)
        return fits


class Section(msgspec.Struct, frozen=True):
    """
    The part of a diff that changes one file.

    Attributes:
        old, new: Path before and after; empty if there is no file.
        data: The bytes of the section.
        binary: The content is a binary delta instead of hunks.
        blob: Id of the content that the section was made for, possibly abbreviated; empty for a new
            file.
    """

    old: str
    new: str
    data: bytes
    hunks: tuple[Hunk, ...]
    binary: bool = False
    blob: str = ""

    @property
    def path(self) -> str:
        """The path after the change, or before it if the file is deleted."""
        return self.new or self.old


class DeclaredChange(msgspec.Struct, frozen=True):
    """
    What a patch changes on purpose: its trailer ``Changes: WHAT / WHERE / WHY``.

    Attributes:
        what: ``kernels`` (G3: another class of kernels than with the stock wheel) or
            ``distributions`` (G5: other numbers, since those of the stock wheel are wrong).
        recipes: The recipes that it concerns, as a pattern of the shell.
        layer: ``decode moe`` and the like, behind a ``:``; empty for all.
        why: The reason.
    """

    what: str
    recipes: str
    layer: str
    why: str

    def concerns(self, what: str, recipe: str) -> bool:
        """Return whether *recipe* is served otherwise, in *what*, by this change."""
        return self.what == what and fnmatchcase(recipe, self.recipes)


class Patch(msgspec.Struct, frozen=True):
    """
    A patch.

    Attributes:
        name: File name inside the series; ``#35568`` for a pull request.
        sha256: Of the file, or of the diff of a pull request.
        author, date: As in the header.
        reason, drop_when: The trailers.
        files: Changed paths, in order.
        data: The diff.
        pick: Number of the pull request; 0 for a patch of ours.
        text: The header below the subject, trailers included.
        changes: What it declares to change.
    """

    name: str
    sha256: str
    subject: str
    reason: str
    drop_when: str
    files: tuple[str, ...]
    data: bytes
    pick: int = 0
    author: str = ""
    date: str = ""
    text: str = ""
    changes: tuple[DeclaredChange, ...] = ()


def parse(name: str, data: bytes) -> Patch:
    """
    Return the patch in *data*.

    Raises:
        patch-invalid: It is not a mail with a diff, lacks a trailer, has an unknown
            Upstream-Status or a malformed Changes; or see `sections`.
    """
    top, _, body = data.partition(b"\n\n")
    message = HeaderParser(policy=email.policy.compat32).parsestr(top.decode("utf-8", "replace"))
    raw, separator, rest = body.partition(b"\n---\n")
    text = raw.decode("utf-8", "replace")
    if not separator or b"\ndiff --git " not in b"\n" + rest or text.encode() != raw:
        raise PatchError(
            "patch-invalid", f"{name} is not a patch in UTF-8 as git format-patch writes it."
        )
    trailers = dict(_TRAILER.findall(text))
    if missing := sorted(set(TRAILERS) - trailers.keys()):
        raise PatchError(
            "patch-invalid",
            f"The header of {name} is incomplete.",
            details=[f"missing trailer: {', '.join(missing)}"],
        )
    if trailers["Upstream-Status"].split()[0] not in STATUSES:
        raise PatchError(
            "patch-invalid",
            f"{name} has an unknown Upstream-Status.",
            details=[trailers["Upstream-Status"], f"known: {', '.join(STATUSES)}"],
        )
    declared = re.findall(r"^Changes: .*$", text, re.MULTILINE)
    changes = list(map(_CHANGE.fullmatch, declared))
    if None in changes:
        raise PatchError(
            "patch-invalid",
            f"{name} declares a change in another form.",
            details=[*declared, "Changes: kernels|distributions / RECIPE[: PHASE KIND] / WHY"],
        )
    diff = rest[(b"\n" + rest).index(b"\ndiff --git ") :]
    try:
        parts = sections(diff)
    except PatchError as error:
        raise PatchError(
            "patch-invalid", f"{name}: {error.what}", details=error.details, todo=error.todo
        ) from error
    return Patch(
        name=name,
        sha256=sha256_bytes(data),
        reason=trailers["Reason"],
        subject=_PREFIX.sub("", _decoded(str(message.get("Subject", ""))), 1).strip(),
        drop_when=trailers["Drop-When"],
        files=tuple(dict.fromkeys(path for part in parts for path in (part.old, part.new) if path)),
        data=diff,
        author=_decoded(str(message.get("From", ""))),
        date=str(message.get("Date", "")),
        text=text,
        changes=tuple(DeclaredChange(**match.groupdict("")) for match in changes if match),
    )


def _decoded(header: str) -> str:
    """
    Return a header as its author wrote it: git encodes non-ASCII text (RFC 2047) and folds long
    lines.
    """
    with contextlib.suppress(HeaderParseError, LookupError, ValueError):
        header = str(make_header(decode_header(header)))
    # Some encodings that a header may name decode to surrogates, which cannot be written as UTF-8.
    return " ".join(header.encode("utf-8", "replace").decode().split())


def render(objects: Objects, before: str, after: str, *, context: int = 3) -> bytes:
    """
    Return the diff between two trees or commits, which must be in *objects*, independent of
    configuration.
    """
    return objects.run(["diff-tree", *FLAGS, f"-U{context}", before, after, "--"])[1]


def blobs(objects: Objects, before: str, after: str) -> set[str]:
    """Return the ids of the file contents that a diff between two trees or commits reads."""
    words = ["diff-tree", "-r", "--raw", "--no-abbrev", "--no-renames", before, after, "--"]
    ids = set[str]()
    for line in objects.text(*words).splitlines():
        ids.update(raw_blobs(line))
    return ids - {""}


def raw_blobs(line: str) -> tuple[str, str]:
    """
    Return the ids of a file's contents before and after, by a *line* of git's raw format; empty if
    there is none, or a submodule.
    """
    old_mode, new_mode, old, new = line[1:].split()[:4]
    return (
        old if old_mode != SUBMODULE and old.strip("0") else "",
        new if new_mode != SUBMODULE and new.strip("0") else "",
    )


def patch_id(objects: Objects, diff: bytes) -> str:
    """Return git's stable patch-id of *diff*; empty for an empty diff."""
    return objects.text("patch-id", "--stable", stdin=diff).partition(" ")[0].strip()


def without(diff: bytes, left_out: Collection[str]) -> bytes:
    """Return *diff* without *left_out*: files, and hunks as ``PATH#NUMBER``, counted from 1."""
    parts = []
    for part in sections(diff) if left_out else ():
        head, *hunks = re.split(rb"(?m)^(?=@@ )", part.data)
        rest = [
            hunk
            for number, hunk in enumerate(hunks, start=1)
            if f"{part.path}#{number}" not in left_out
        ]
        if part.path not in left_out and (rest or not hunks):
            parts += [head, *rest]
    return b"".join(parts) if left_out else diff


def changed_lines(diff: bytes) -> tuple[Counter[tuple[str, bytes]], Counter[tuple[str, bytes]]]:
    """
    Return the non-blank lines that *diff* removes and those that it adds, each with the path of its
    file.
    """
    removed, added = Counter[tuple[str, bytes]](), Counter[tuple[str, bytes]]()
    for part in sections(diff):
        for hunk in part.hunks:
            old, new = Counter(hunk.before), Counter(hunk.after)
            for lines, count in ((removed, old - new), (added, new - old)):
                lines.update((part.path, line) for line in count.elements() if line.strip())
    return removed, added


def takes_back(diff: bytes, change: bytes) -> bool:
    """
    Return whether *diff* removes what the diff *change* adds and adds what that removes, apart from
    a small rest.
    """
    removed, added = changed_lines(change)
    gone, restored = changed_lines(diff)
    undone = (added & gone).total() + (removed & restored).total()
    return undone > 0 and undone >= REVERTED * (added.total() + removed.total())


def paths(diff: bytes) -> tuple[str, ...]:
    """Return the path of each file that *diff* changes."""
    return tuple(part.path for part in sections(diff))


def lines_of(text: bytes) -> list[bytes]:
    """Return the lines of *text* with their ends; only a line feed ends a line, as in git."""
    return re.findall(rb"[^\n]*\n|[^\n]+", text)


@lru_cache(maxsize=64)
def sections(diff: bytes) -> tuple[Section, ...]:
    """
    Return *diff*, file by file.

    Raises:
        patch-invalid: A header or a hunk is cut off, a path leaves the tree, or the diff was made
            without prefixes or got other line ends.
    """
    return tuple(map(_section, re.split(rb"(?m)^(?=diff --git )", diff)[1:]))


def _section(data: bytes) -> Section:
    body = _BODY.search(data)
    head = data[: body.start()] if body else data
    fields, first = dict(_FIELD.findall(head)), head.partition(b"\n")[0]
    old, new = _paths(first, fields)
    path, index = new or old, _INDEX.match(fields.get(b"index ", b""))
    for name in (old or new, path):
        parts = {"", "..", ".git", "."} & set(name.lower().split("/"))
        if parts or re.search("[\0-\x08\n-\x1f\x7f\ud800-\udfff]", name):
            raise PatchError(
                "patch-invalid",
                f"A patch names a path outside the tree, or none in plain UTF-8: {name!r}",
            )
    # A section without hunks changes a mode, a name, or an empty file; else its hunks were cut off,
    # which git accepts.
    if index:
        whole = bool(_EMPTY.match(index[1]) and _EMPTY.match(index[2]))
    else:
        whole = not fields.keys().isdisjoint((b"new mode ", b"rename to ", b"copy to "))
    if body is None and (b"--- " in fields or not whole):
        raise PatchError("patch-invalid", f"The header of {path} is cut off.")
    blob = index[1].decode() if index and index[1].strip(b"0") else ""
    binary = body is not None and not body[0].startswith(b"@@ ")
    hunks = [] if body is None or binary else re.split(rb"(?m)^(?=@@ )", data[body.start() :])[1:]
    return Section(old, new, data, tuple(_hunk(hunk, path) for hunk in hunks), binary, blob)


def _paths(first: bytes, fields: dict[bytes, bytes]) -> tuple[str, str]:
    """Return both paths of a section with that *first* line."""
    names = first.removeprefix(b"diff --git ")
    middle = len(names) // 2
    old, new = _unquoted(names[:middle]), _unquoted(names[middle + 1 :])
    if old and old == new:
        raise PatchError(
            "patch-invalid",
            f"The diff of {old!r} was made without the prefixes a/ and b/.",
            todo="Make it again with them (git: without --no-prefix, diff.noprefix=false).",
        )
    old, new = old[2:], new[2:]
    for verb in (b"rename", b"copy"):
        if verb + b" from " in fields:
            old = _unquoted(fields[verb + b" from "])
            new = _unquoted(fields.get(verb + b" to ", b""))
    return (
        "" if b"new file mode " in fields else old,
        "" if b"deleted file mode " in fields else new,
    )


def _unquoted(text: bytes) -> str:
    if _QUOTED.fullmatch(text):
        text = text[1:-1].decode("unicode_escape").encode("latin-1")
    return text.decode("utf-8", "surrogateescape")


def _hunk(data: bytes, path: str) -> Hunk:
    header, match = data.partition(b"\n")[0], _HUNK.match(data)
    if match is None:
        raise PatchError("patch-invalid", f"A hunk of {path} does not say where it is.")
    start, count, new_start, new_count = map(int, match.groups(b"1"))
    before, after, mark, at = list[bytes](), list[bytes](), b"", len(header) + 1
    while len(before) < count or len(after) < new_count:
        line = _LINE.match(data, at)
        if line is None:
            break
        mark, text, at = line[1] or b" ", line[2] or b"\n", line.end()
        for side in [before] * (mark != b"+") + [after] * (mark != b"-"):
            side.append(text[:-1] if line[3] else text)
    whole = all(text.endswith(b"\n") for text in before[:-1] + after[:-1])
    if (len(before), len(after)) != (count, new_count) or not whole:
        raise PatchError(
            "patch-invalid",
            f"A hunk of {path} is cut off.",
            details=[f"at its line {start}: {count} and {new_count} lines announced"],
        )
    # git ignores them. A mail's patch is followed by its signature.
    rest = data[at:].partition(b"\n")[0]
    if rest.startswith((b"@", b"+", b"-", b" ")) and rest.rstrip() != b"--":
        raise PatchError(
            "patch-invalid",
            f"A hunk of {path} has more lines than it announces.",
            details=[rest.decode("utf-8", "replace")],
        )
    label = header.decode("utf-8", "replace").strip()[:60]
    return Hunk(label, start, new_start, tuple(before), tuple(after), mark != b" ")


def series_names(folder: Path) -> list[str]:
    """
    Return the file names that the file ``series`` in *folder* lists; none if there is no such file.

    Raises:
        patch-invalid: A listed patch is missing, is listed twice, or a patch in the folder is not
            listed.
    """
    listing = folder / "series"
    text = listing.read_text("utf-8", errors="replace") if listing.is_file() else ""
    listed = _ENTRY.findall(text)
    present = {path.name for path in list_folder(folder, "*.patch")}
    twice = Counter(listed) - Counter(set(listed))
    if twice or present != set(listed):
        raise PatchError(
            "patch-invalid",
            f"{listing} and its folder disagree.",
            details=[
                *map("listed twice: {}".format, sorted(twice)),
                *map("listed, but not there: {}".format, sorted(set(listed) - present)),
                *map("there, but not listed: {}".format, sorted(present - set(listed))),
            ],
            todo="List every patch once, in the order of application.",
        )
    return listed


def load_folder(folder: Path) -> tuple[Patch, ...]:
    """
    Return our patches in *folder*, in order.

    Raises:
        patch-invalid: See `series_names`; or a patch cannot be read.
    """
    return tuple(parse(name, (folder / name).read_bytes()) for name in series_names(folder))
