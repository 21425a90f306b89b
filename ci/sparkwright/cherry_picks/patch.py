"""
A patch of ours: a mail as ``git format-patch`` writes it, with the smallest context that git accepts.

Its header says why it exists and until when, in trailers that every patch must have.
"""

from __future__ import annotations

import contextlib
import email.policy
from email.errors import HeaderParseError
from email.header import decode_header, make_header
from email.parser import BytesParser

import msgspec

from sparkwright.digest import sha256_bytes
from sparkwright.errors import PatchInvalid

#: What upstream knows of a change; the vocabulary is Yocto's, less what does not apply to a fork.
STATUSES = ("Pending", "Submitted", "Backport", "Inappropriate", "Denied")
TRAILERS = ("Upstream-Status", "Reason", "Drop-When")


class Patch(msgspec.Struct, frozen=True):
    """
    A patch.

    Attributes:
        name: File name inside the series.
        sha256: Of the file; two patches are the same when this is.
        status, reason, drop_when: Its trailers.
        files: Paths that it touches, in order.
    """

    name: str
    sha256: str
    subject: str
    status: str
    reason: str
    drop_when: str
    files: tuple[str, ...]
    data: bytes


def parse(name: str, data: bytes) -> Patch:
    """
    Return the patch in *data*.

    Raises:
        PatchInvalid: It is not a mail with a diff, lacks a trailer, or has an unknown Upstream-Status.
    """
    message = BytesParser(policy=email.policy.compat32).parsebytes(data)
    body = data.partition(b"\n\n")[2]
    head, found, diff = body.partition(b"\n---\n")
    if not found or b"\ndiff --git " not in b"\n" + diff:
        raise PatchInvalid(f"{name} is not a patch as git format-patch writes it.")
    trailers = dict(line.split(": ", 1) for line in head.decode("utf-8", "replace").splitlines() if line.partition(": ")[0] in TRAILERS)
    missing = [trailer for trailer in TRAILERS if not trailers.get(trailer, "").strip()]
    if missing:
        raise PatchInvalid(f"The header of {name} does not say everything.", details=[f"missing trailer: {', '.join(missing)}"])
    if trailers["Upstream-Status"].split()[0] not in STATUSES:
        raise PatchInvalid(
            f"{name} has an unknown Upstream-Status.", details=[trailers["Upstream-Status"], f"known: {', '.join(STATUSES)}"]
        )
    return Patch(
        name=name,
        sha256=sha256_bytes(data),
        subject=_subject(str(message.get("Subject", ""))),
        status=trailers["Upstream-Status"],
        reason=trailers["Reason"],
        drop_when=trailers["Drop-When"],
        files=_touched(diff),
        data=diff[diff.index(b"diff --git ") :],
    )


def _subject(header: str) -> str:
    """Return the subject as its author wrote it: git encodes what is not ASCII (RFC 2047), and folds long lines."""
    with contextlib.suppress(HeaderParseError, LookupError, ValueError):
        header = str(make_header(decode_header(header)))
    return " ".join(header.split()).removeprefix("[PATCH]").strip()


def _touched(diff: bytes) -> tuple[str, ...]:
    """Return the paths after ``+++ b/`` and ``--- a/``; a deletion names only the latter."""
    paths: dict[str, None] = {}
    for line in diff.decode("utf-8", "replace").splitlines():
        for mark in ("--- a/", "+++ b/"):
            if line.startswith(mark):
                paths[line.removeprefix(mark).split("\t")[0]] = None
    return tuple(paths)
