"""
A series as commits, and back: import and export are each other's inverse, byte for byte.

A patch of ours becomes a commit whose message ends with the name of its file; a pick becomes one that says which pull request it is, and
is never exported. Who, when and what are fixed by the patch, so the commit ids are the same on every machine.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from email.header import Header

import msgspec

from sparkwright.cherry_picks import diff, patch
from sparkwright.cherry_picks.patch import Patch
from sparkwright.errors import PatchInvalid
from sparkwright.git import Objects

#: The trailers that carry a file name or a pull request through git; no exported patch holds them.
FILE, PICK = "Patch-File", "Patch-Pick"

#: Context of the patches that we write: the smallest that git accepts (DESIGN §2).
CONTEXT = 1

COMMITTER = {"GIT_COMMITTER_NAME": "sparkwright", "GIT_COMMITTER_EMAIL": "export@sparkwright.invalid"}

_PERSON = re.compile(r"\s*(.*?)\s*<([^<>]*)>\s*")
_EPOCH = "Thu, 1 Jan 2026 00:00:00 +0000"


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
    """Return *one* as ``git am`` reads it, its file name in the message."""
    head = f"From: {encoded(one.author or 'upstream <upstream@invalid>')}\nDate: {one.date or _EPOCH}\n"
    text = message(one).split("\n", 1)
    return f"{head}Subject: [PATCH] {encoded(text[0])}\n{text[1]}---\n".encode() + one.data


def encoded(text: str) -> str:
    """Return a header's text as it may stand in a mail: as it is, or encoded where it is not ASCII (RFC 2047)."""
    found = _PERSON.fullmatch(text)
    if text.isascii():
        return text
    return f"{Header(found[1], 'utf-8').encode()} <{found[2]}>" if found else Header(text, "utf-8", maxlinelen=900).encode()


def _commit(objects: Objects, tree: str, parent: str, author: str, date: str, text: str) -> str:
    found = _PERSON.fullmatch(author)
    name, address = (found[1], found[2]) if found else (author, "upstream@invalid")
    who = {
        "GIT_AUTHOR_NAME": name or "upstream",
        "GIT_AUTHOR_EMAIL": address,
        "GIT_AUTHOR_DATE": date or _EPOCH,
        "GIT_COMMITTER_DATE": date or _EPOCH,
    }
    words = ["commit-tree", tree, *(["-p", parent] if parent else [])]
    return objects.run(words, env={**who, **COMMITTER}, stdin=text.encode("utf-8", "surrogateescape"))[1].decode().strip()


def export(objects: Objects, base: str, tip: str) -> list[Exported]:
    """
    Return the files of the commits after *base* up to *tip*, oldest first.

    Raises:
        PatchInvalid: A merge is among them, or a message lacks a trailer that every patch must have.
    """
    made: list[Exported] = []
    for commit in objects.run(["rev-list", "--reverse", f"{base}..{tip}", "--"])[1].decode().split():
        head, _, text = objects.run(["cat-file", "commit", commit])[1].decode("utf-8", "surrogateescape").partition("\n\n")
        parents = [line.removeprefix("parent ") for line in head.splitlines() if line.startswith("parent ")]
        if len(parents) != 1:
            raise PatchInvalid(f"{commit[:12]} has {len(parents)} parents; a series is a line of commits.")
        trailers = {
            key: value.strip()
            for key, colon, value in (line.partition(": ") for line in text.splitlines())
            if colon and key in (FILE, PICK)
        }
        if PICK in trailers:
            made.append(Exported(f"#{trailers[PICK]}", b"", int(trailers[PICK]), commit, parents[0]))
            continue
        subject = " ".join(text.partition("\n\n")[0].split())
        name = trailers.get(FILE) or f"{_slug(subject)}.patch"
        if name in {one.name for one in made} or "/" in name or name.startswith(".") or not name.endswith(".patch"):
            raise PatchInvalid(f"{commit[:12]} would become {name!r}, which is taken or is no file name of a patch.")
        made.append(Exported(name, _rendered(objects, commit, parents[0], head, subject, text), 0, commit, parents[0]))
        patch.parse(name, made[-1].data)
    return made


def _rendered(objects: Objects, commit: str, parent: str, head: str, subject: str, text: str) -> bytes:
    date = objects.run(["log", "-1", "--no-walk", "--format=%aD", commit])[1].decode().strip()
    author = next(line for line in head.splitlines() if line.startswith("author ")).removeprefix("author ").rsplit(" ", 2)[0]
    body = "\n".join(line for line in text.partition("\n\n")[2].split("\n") if not line.startswith((f"{FILE}: ", f"{PICK}: "))).strip("\n")
    top = f"From: {encoded(author)}\nDate: {date}\nSubject: [PATCH] {encoded(subject)}\n\n{body}\n---\n"
    return top.encode("utf-8", "surrogateescape") + diff.render(objects, parent, commit, context=CONTEXT)


def _slug(subject: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", subject.lower()).strip("-")[:72].strip("-")


def build(objects: Objects, base: str, steps: Sequence[tuple[Patch, str]]) -> str:
    """Return the tip of the commits of *steps* (a patch and the tree that it gives) on top of the commit *base*."""
    tip = base
    for one, tree in steps:
        tip = add(objects, tip, tree, one)
    return tip
