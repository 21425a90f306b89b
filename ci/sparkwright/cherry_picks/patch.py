"""
Patches: ours, each a mail as ``git format-patch`` writes it, and the diffs of the pull requests that we carry.

The header of ours says why it exists and until when, in trailers that every patch must have; of a pull request the ledger says it.
"""

from __future__ import annotations

import contextlib
import email.policy
from email.errors import HeaderParseError
from email.header import decode_header, make_header
from email.parser import HeaderParser

import msgspec

from sparkwright.cherry_picks import diff
from sparkwright.cherry_picks.diff import Section
from sparkwright.digest import sha256_bytes
from sparkwright.errors import PatchInvalid

#: What upstream knows of a change; the vocabulary is Yocto's, less what does not apply to a fork.
STATUSES = ("Pending", "Submitted", "Backport", "Inappropriate", "Denied")
TRAILERS = ("Upstream-Status", "Reason", "Drop-When")


class Patch(msgspec.Struct, frozen=True):
    """
    A patch.

    Attributes:
        name: File name inside the series; ``#35568`` for a pull request.
        sha256: Of the file, or of the diff that is applied; two patches are the same when this is.
        author, date: As its header has them.
        status, reason, drop_when: Its trailers.
        files: Paths that it touches, in order.
        data: The diff.
        pick: Number of the pull request; 0 for a patch of ours.
        text: What the header says besides, trailers included.
    """

    name: str
    sha256: str
    subject: str
    status: str
    reason: str
    drop_when: str
    files: tuple[str, ...]
    data: bytes
    pick: int = 0
    author: str = ""
    date: str = ""
    text: str = ""

    def sections(self) -> tuple[Section, ...]:
        """Return what it does, file by file."""
        return diff.sections(self.data)


def parse(name: str, data: bytes) -> Patch:
    """
    Return the patch in *data*.

    Raises:
        PatchInvalid: It is not a mail with a diff, lacks a trailer, or has an unknown Upstream-Status.
    """
    top, _, body = data.partition(b"\n\n")
    message = HeaderParser(policy=email.policy.compat32).parsestr(top.decode("utf-8", "replace"))
    raw, found, rest = body.partition(b"\n---\n")
    try:
        head = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise PatchInvalid(f"The header of {name} is not UTF-8.") from error
    if not found or b"\ndiff --git " not in b"\n" + rest:
        raise PatchInvalid(f"{name} is not a patch as git format-patch writes it.")
    trailers = dict(line.split(": ", 1) for line in head.splitlines() if line.startswith(tuple(f"{one}: " for one in TRAILERS)))
    missing = [trailer for trailer in TRAILERS if not trailers.get(trailer, "").strip()]
    if missing:
        raise PatchInvalid(f"The header of {name} does not say everything.", details=[f"missing trailer: {', '.join(missing)}"])
    if trailers["Upstream-Status"].split()[0] not in STATUSES:
        raise PatchInvalid(
            f"{name} has an unknown Upstream-Status.", details=[trailers["Upstream-Status"], f"known: {', '.join(STATUSES)}"]
        )
    data_of = rest[(b"\n" + rest).index(b"\ndiff --git ") :]
    try:
        touched = diff.sections(data_of)
    except PatchInvalid as error:
        raise PatchInvalid(f"{name}: {error.what}", details=error.details) from error
    return Patch(
        name=name,
        sha256=sha256_bytes(data),
        subject=_subject(str(message.get("Subject", ""))),
        status=trailers["Upstream-Status"],
        reason=trailers["Reason"],
        drop_when=trailers["Drop-When"],
        files=tuple(dict.fromkeys(path for section in touched for path in (section.old, section.new) if path)),
        data=data_of,
        author=_plain(str(message.get("From", ""))),
        date=str(message.get("Date", "")),
        text=head,
    )


def _subject(header: str) -> str:
    """Return the subject as its author wrote it: git encodes what is not ASCII (RFC 2047), and folds long lines."""
    return _plain(header).removeprefix("[PATCH]").strip()


def _plain(header: str) -> str:
    with contextlib.suppress(HeaderParseError, LookupError, ValueError):
        header = str(make_header(decode_header(header)))
    # Some of the encodings that a header may name have halves of pairs, which are no text.
    return " ".join(header.encode("utf-8", "replace").decode().split())
