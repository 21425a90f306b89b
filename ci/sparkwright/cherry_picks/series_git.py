"""
A series as commits, and back: import and export are each other's inverse, byte for byte.

A patch of ours becomes a commit whose message ends with the name of its file; a pick becomes one that says which pull request it is, and
is never exported. Who, when and what are fixed by the patch, so the commit ids are the same on every machine.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from email.header import Header

import msgspec

from sparkwright.cherry_picks import diff, patch
from sparkwright.cherry_picks.errors import PatchError
from sparkwright.cherry_picks.patch import Patch
from sparkwright.core.git_store import Objects

#: The trailers that carry a file name or a pull request through git; no exported patch holds them.
FILE, PICK = "Patch-File", "Patch-Pick"

#: Context of the patches that we write: the smallest that git accepts (DESIGN §2).
CONTEXT = 1

COMMITTER = {"GIT_COMMITTER_NAME": "sparkwright", "GIT_COMMITTER_EMAIL": "export@sparkwright.invalid"}

_PERSON = re.compile(r"\s*(.*?)\s*<([^<>]*)>\s*")
_EPOCH = "Thu, 1 Jan 2026 00:00:00 +0000"

#: A file of a series: no path, nothing hidden, no comment of quilt's list, and short enough for a temporary name beside it.
_NAME = re.compile(r"[^\s.#/-][^#/]*\.patch")
_LONGEST = 200

#: Beginnings of lines that git takes out of a mail, whatever they were meant for (mailinfo.c, mailsplit.c).
_TAKEN = ("diff -", "index: ", "---", "from ", ">from ", "from:", "subject:", "date:", "[patch]")


class Exported(msgspec.Struct, frozen=True):
    """A commit as the file that it becomes; *pick* is set, and *data* empty, for a pull request."""

    name: str
    data: bytes
    pick: int
    commit: str
    parent: str


def root(objects: Objects, tree: str, title: str) -> str:
    """Return a commit of *tree* without a parent, on which a series is built."""
    return _commit(objects, tree, "", "sparkwright <export@sparkwright.invalid>", _EPOCH, title)


def add(objects: Objects, parent: str, tree: str, one: Patch) -> str:
    """Return the commit of *one* on top of *parent*; *tree* is what it gives."""
    return _commit(objects, tree, parent, one.author, one.date, message(one))


def message(one: Patch) -> str:
    """Return the commit message of *one*."""
    if one.pick:
        return f"{one.subject} ({one.name})\n\n{one.reason}\n\n{PICK}: {one.pick}\n"
    return f"{one.subject}\n\n{one.text}\n{FILE}: {one.name}\n"


def mail(one: Patch) -> bytes:
    """Return *one* as ``git am --keep`` reads it, its file name in the message."""
    head = f"From: {encoded(one.author or 'upstream <upstream@invalid>')}\nDate: {one.date or _EPOCH}\n"
    subject, _, text = _safe(message(one)).partition("\n")
    return f"{head}Subject: {encoded(subject)}\n{text}---\n".encode("utf-8", "surrogateescape") + one.data


def carried(objects: Objects, one: Patch) -> str:
    """Return the commit message that ``git am`` makes of `mail`; `export` is told whose it is, so that nothing of it is lost."""
    return objects.run(["stripspace"], stdin=_safe(message(one)).encode("utf-8", "surrogateescape"))[1].decode("utf-8", "replace")


def _safe(text: str) -> str:
    subject, _, rest = text.partition("\n")
    return "\n".join([subject, *(f" {line}" if line.lower().startswith(_TAKEN) else line for line in rest.split("\n"))])


def encoded(text: str) -> str:
    """Return a header's text as it may stand in a mail: as it is, or encoded where it is not ASCII or looks so (RFC 2047)."""
    found = _PERSON.fullmatch(text)
    if text.isascii() and "=?" not in text:
        return text
    return f"{Header(found[1], 'utf-8').encode()} <{found[2]}>" if found else Header(text, "utf-8", maxlinelen=900).encode()


def _commit(objects: Objects, tree: str, parent: str, author: str, date: str, text: str) -> str:
    if "\0" in author + date:  # no variable holds one
        raise PatchError("patch-invalid", f"The author or the date of {text.partition(chr(10))[0]!r} holds a NUL.")
    found = _PERSON.fullmatch(author)
    name, address = (found[1], found[2]) if found else (author, "upstream@invalid")
    who = {
        # Python writes variables in the locale's encoding, and git reads UTF-8.
        "GIT_AUTHOR_NAME": os.fsdecode((name or "upstream").encode("utf-8", "surrogateescape")),
        "GIT_AUTHOR_EMAIL": address,
        "GIT_AUTHOR_DATE": date or _EPOCH,
        "GIT_COMMITTER_DATE": date or _EPOCH,
    }
    words = ["commit-tree", tree, *(["-p", parent] if parent else [])]
    status, out, said = objects.run(words, env={**who, **COMMITTER}, stdin=text.encode("utf-8", "surrogateescape"), check=False)
    if status:
        raise PatchError("patch-invalid", f"git makes no commit of {text.partition(chr(10))[0]!r}.", details=said.splitlines()[-5:])
    return out.decode().strip()


class Commit(msgspec.Struct, frozen=True):
    """
    A commit of a series.

    Attributes:
        text: Its message, less the trailer that names the file or the pull request.
        name: What that trailer names: a file, or ``#7``; empty where there is none.
    """

    commit: str
    parents: tuple[str, ...]
    author: str
    date: str
    text: str
    name: str


def read(objects: Objects, base: str, tip: str, said: Mapping[str, str] | None = None) -> list[Commit]:
    """
    Return the commits after *base* up to *tip*, oldest first.

    Args:
        said: Messages by what ``git am`` made of them; see `carried`.

    Raises:
        patch-invalid: A message is not text.
    """
    words = ["log", "--reverse", "--topo-order", "-z", "--encoding=UTF-8", "--format=%H%x00%P%x00%an <%ae>%x00%aD%x00%B"]
    raw = objects.run([*words, f"{base}..{tip}", "--"])[1].split(b"\0")
    made = []
    for at in range(0, len(raw) - 4, 5):
        try:
            commit, parents, author, date, text = (part.decode() for part in raw[at : at + 5])
        except UnicodeDecodeError:
            raise PatchError("patch-invalid", f"The message of {raw[at].decode()[:12]} is not UTF-8.") from None
        made.append(Commit(commit, tuple(parents.split()), author, date, *_marked((said or {}).get(text, text))))
    return made


def _marked(text: str) -> tuple[str, str]:
    """Return *text* without our trailer, and what that names; ours is the last of its kind in the last paragraph."""
    lines = text.rstrip("\n").split("\n")
    for at in range(len(lines) - 1, -1, -1):
        key, _, value = lines[at].partition(": ")
        if key in (FILE, PICK):
            return "\n".join(lines[:at] + lines[at + 1 :]), f"#{value.strip()}" if key == PICK else value.strip()
        if not lines[at].strip():
            break
    return text, ""


def export(objects: Objects, base: str, tip: str, said: Mapping[str, str] | None = None) -> list[Exported]:
    """
    Return the files of the commits after *base* up to *tip*, oldest first.

    Raises:
        patch-invalid: A merge is among them, a name cannot be a file's or is taken, or a message lacks a trailer that every patch must
        have.
    """
    made: list[Exported] = []
    for one in read(objects, base, tip, said):
        if len(one.parents) != 1:
            raise PatchError(
                "patch-invalid",
                f"{one.commit[:12]} has {len(one.parents)} parents; a series is a line of commits.",
                todo="Make it one with git rebase.",
            )
        if re.fullmatch(r"#[1-9][0-9]*", one.name):
            made.append(Exported(one.name, b"", int(one.name[1:]), one.commit, one.parents[0]))
            continue
        subject = " ".join(one.text.partition("\n\n")[0].split())
        name = one.name or f"{_slug(subject)}.patch"
        if name in {other.name for other in made} or not _NAME.fullmatch(name) or not name.isprintable() or len(name.encode()) > _LONGEST:
            raise PatchError(
                "patch-invalid",
                f"{one.commit[:12]} would become {name!r}, which is taken or is no file name of a patch.",
                todo=f"Name its file in the last line of its message: {FILE}: NAME.patch",
            )
        made.append(Exported(name, _rendered(objects, one, subject), 0, one.commit, one.parents[0]))
        patch.parse(name, made[-1].data)
    return made


def _rendered(objects: Objects, one: Commit, subject: str) -> bytes:
    body = one.text.partition("\n\n")[2].strip("\n")
    if "---" in body.split("\n"):
        raise PatchError(
            "patch-invalid", f"The message of {one.commit[:12]} has a line ---, which ends the text of a patch.", todo="Write it otherwise."
        )
    top = f"From: {encoded(one.author)}\nDate: {one.date}\nSubject: [PATCH] {encoded(subject)}\n\n{body}\n---\n"
    return top.encode() + diff.render(objects, one.parents[0], one.commit, context=CONTEXT)


def _slug(subject: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", subject.lower()).strip("-")[:72].strip("-")


def build(objects: Objects, base: str, steps: Sequence[tuple[Patch, str]]) -> str:
    """Return the tip of the commits of *steps* (a patch and the tree that it gives) on top of the commit *base*."""
    tip = base
    for one, tree in steps:
        tip = add(objects, tip, tree, one)
    return tip
